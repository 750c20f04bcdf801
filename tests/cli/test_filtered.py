"""A text that the filter of a hosted model ended, on the command line."""

from __future__ import annotations

import json

from tests.hostile.texts import TARGET, TEXT
from tests.stock.fakes import GENERATING, fake
from tests.stock.test_endings import FILTERS

from .conftest import Invoke


def test_the_reason_is_told_with_what_was_written(invoke: Invoke) -> None:
    with fake("completions", TARGET) as server:
        server.fault_of = lambda path: FILTERS["Zhipu: sensitive"] if path in GENERATING else None
        asked = ["generate", TEXT, "--edge-model", "toy", "--cloud", f"{server.url}/v1", "--cloud-api", "completions"]
        status, out, _ = invoke(*asked, "--cloud-model", "toy", "--mode", "cloud", "--raw", "--json")
        answer = json.loads(out)
        assert (status, answer["finish_reason"]) == (0, "content_filter") and answer["text"]
        status, out, err = invoke(*asked, "--cloud-model", "toy", "--mode", "cloud", "--raw")
        assert (status, out.strip()) == (0, answer["text"].strip()) and "ended by content_filter" in err
