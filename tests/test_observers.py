"""Observers see each generation end once, from the thread that used it, and can end none of them."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

import skydraft
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import EngineError
from skydraft.prompts.messages import asked
from tests import toys

PARAMS = skydraft.DecodingParams(max_new_tokens=20)
REQUEST = GenerateRequest(asked(toys.PROMPT), skydraft.make_plan(k=3), PARAMS, raw=True)


class Seen:
    def __init__(self, *, fails: bool = False) -> None:
        self.ends: list[int] = []
        self.threads: set[int] = set()
        self._fails = fails

    def begins(self, request: GenerateRequest) -> bool:
        return True

    def ended(self, generation: Generation) -> None:
        assert generation.is_audited
        self.threads.add(threading.get_ident())
        self.ends.append(len(generation.token_ids))
        if self._fails:
            raise RuntimeError("an observer that fails")


def complete(generation: Generation) -> None:
    generation.run().close()


def cancelled_as_it_reads(generation: Generation) -> None:
    forward = generation.edge.forward  # type: ignore[union-attr]

    def cancels(*given: Any, **named: Any) -> Any:
        generation.cancel()
        return forward(*given, **named)

    generation.edge.forward = cancels  # type: ignore[union-attr, method-assign]
    assert list(generation) == [] and generation.finish_reason is None


def left_by_an_error(generation: Generation) -> None:
    with pytest.raises(KeyboardInterrupt), generation:
        next(iter(generation.rounds()))
        raise KeyboardInterrupt


def failed(generation: Generation) -> None:
    rounds = generation.rounds()
    next(rounds)
    generation.edge.forward = Mock(side_effect=EngineError("broken"))  # type: ignore[union-attr, method-assign]
    with pytest.raises(EngineError), generation:
        list(rounds)


@pytest.mark.parametrize("use", [complete, cancelled_as_it_reads, left_by_an_error, failed, Generation.close])
def test_each_end_is_told_once(use: Callable[[Generation], None]) -> None:
    first, second = Seen(fails=True), Seen()
    generation = skydraft.start(REQUEST, edge=toys.toy(1, 0.7), cloud=toys.toy(1), observers=[first, second])
    assert generation.is_audited and not first.ends
    use(generation)
    assert first.ends == second.ends == [sum(len(done.token_ids) for done in generation.rounds_so_far)]
    assert first.threads == {threading.get_ident()}


def test_an_observer_that_fails_at_the_beginning_is_left_out() -> None:
    broken, seen = Seen(), Seen()
    broken.begins = Mock(side_effect=RuntimeError("an observer that fails"))  # type: ignore[method-assign]
    skydraft.start(REQUEST, edge=toys.toy(1, 0.7), cloud=toys.toy(1), observers=[broken, seen]).run()
    assert not broken.ends and len(seen.ends) == 1
