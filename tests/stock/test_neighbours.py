"""Texts of one process share a server: what fails for one of them costs the others nothing."""

import threading
from contextlib import closing
from typing import Any

import pytest

import skydraft
from tests.hostile.texts import ALONE, LENGTH, TARGET, write
from tests.serving import Unhurried
from tests.stock import faults
from tests.stock.fakes import GENERATING, Fake, fake


@pytest.mark.parametrize("dialect", ["vllm", "llama-server", "sglang"])
@pytest.mark.parametrize("asks", ["a text that lost its server", "facts"])
def test_what_fails_for_one_text_breaks_no_stream_of_another(
    dialect: str, asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy server leaves a sign of life unanswered: the other text reads on, in its one request."""
    monkeypatch.setattr("skydraft.edge.cloud.Patience", Unhurried)
    with fake(dialect, TARGET, token_s=0.05) as server, closing(skydraft.connect(server.url, timeout_s=2)) as cloud:
        assert cloud.facts(None) is not None
        texts, hung_up = list[Any](), list[str]()
        stream = threading.Thread(target=lambda: texts.append(write(cloud, "cloud").run()))
        begun = len(server.model.asked)
        stream.start()
        server.wait_until(lambda: any(asked.num_written > 2 for asked in server.model.asked[begun:]))

        def hangs_up(path: str) -> faults.Fault:
            hung_up.append(path)
            return faults.hangs_up()

        server.fault_of = hangs_up
        if asks == "facts":
            cloud.servers.facts.clear()
            with pytest.raises(skydraft.SkydraftError):
                cloud.facts(None)
        else:
            assert len(write(cloud, "gated").run().token_ids) == LENGTH
            Fake.wait_until(lambda: sum(path not in GENERATING for path in hung_up) > 1 or not stream.is_alive())
        stream.join(20)
    assert texts and texts[0].token_ids == ALONE and texts[0].receipt.calls == 1
