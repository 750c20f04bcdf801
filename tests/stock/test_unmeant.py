"""A server that comes up after its gateway and is not the one that was meant: the log says so, not the answers."""

from contextlib import closing
from typing import Any

import pytest

import skydraft
from skydraft.gateway.pair import Pair
from tests.gateway.running import gateway
from tests.hostile.texts import DRAFT, TARGET
from tests.stock.fakes import fake
from tests.thinking.scripts import thinking_toy

CASES: dict[str, tuple[Any, dict[str, str], str]] = {
    "no http": (DRAFT, {}, "does not speak skydraft's protocol"),
    "another model": (DRAFT, {"model": "other"}, "has no model other"),
    "another tokenizer": (thinking_toy(), {}, "as other tokens"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_operator_must_mend_is_in_the_log_and_no_clients_fault(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    draft, options, says = CASES[case]
    with fake("vllm", TARGET) as server:
        address = server.url.split("/")[2] if case == "no http" else server.url
        cloud = skydraft.connect(address, fallback="start", timeout_s=3, **options)
        with closing(cloud), gateway(Pair(draft, cloud)) as running:
            for mode in ("quality", "lossless"):
                caplog.clear()
                answer = running.chat(model=f"skydraft-{mode}")
                assert answer.status_code == 500 and says not in answer.text
                assert [each.levelname for each in caplog.records if says in each.getMessage()] == ["ERROR"]
            health = running.client.get(f"{running.url}/health")
            assert health.json() == {"status": "ok", "cloud": "down" if case == "no http" else "up"}
