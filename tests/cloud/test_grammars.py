"""A grammar on a server: refused where it does not compile or takes too much, and nobody else waits for it."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.choosing.grammar import LIMITS, CompiledGrammar
from skydraft.cloud import service
from skydraft.engines.toy import open_toy
from skydraft.errors import GrammarRefused
from tests.serving import serving

pytest.importorskip("llguidance")
DATE = "regex:20[0-9]{2}-[01][0-9]"


def ask(address: str, grammar: str, mode: str = "lossless") -> skydraft.Generation:
    with closing(skydraft.connect(address)) as cloud:
        params = DecodingParams(grammar=grammar, max_new_tokens=40)
        edge = open_toy("toy:drift=0.2")
        return skydraft.generate("语速", edge=edge, cloud=cloud, plan=make_plan(mode, k=5), params=params).run()


@pytest.mark.parametrize("mode", ["lossless", "cloud"])
def test_a_server_without_llguidance_says_so(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "compile_grammar", Mock(side_effect=skydraft.errors.MissingDependency("no")))
    with serving(open_toy("toy")) as server, pytest.raises(GrammarRefused, match="no llguidance"):
        ask(server.address, DATE, mode)


def test_nobody_waits_for_the_grammar_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, may_go, has_come = service.compile_grammar, threading.Event(), threading.Event()

    def slow(text: str, vocab: Any) -> CompiledGrammar:
        has_come.set()
        assert may_go.wait(30)
        return sound(text, vocab)

    monkeypatch.setattr(service, "compile_grammar", slow)
    with serving(open_toy("toy")) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, server.address, DATE, "cloud")
        assert has_come.wait(30)
        began = time.monotonic()
        assert ask(server.address, "").token_ids
        assert not waiting.done() and time.monotonic() - began < 20
        may_go.set()
        assert waiting.result().finish_reason == "eos"


def test_a_grammar_that_grows_too_large_is_refused_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "max_lexer_states", 100)
    with serving(open_toy("toy")) as server:
        with pytest.raises(GrammarRefused, match="any further"):
            ask(server.address, "regex:(.*[一-龟].{30}){3}", "cloud")
        assert ask(server.address, DATE, "cloud").finish_reason == "eos"


def test_an_edge_without_llguidance_may_leave_it_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(open_toy("toy")) as server:
        first = ask(server.address, DATE, "cloud")  # compiled there before the package is hidden here
        monkeypatch.setitem(sys.modules, "llguidance", None)
        assert ask(server.address, DATE, "cloud").token_ids == first.token_ids
