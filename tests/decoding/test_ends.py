"""Ends: an error or a cancel at any step frees the places and is heard again by who asks for more, and each observer
sees each end once.
"""

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any
from unittest.mock import Mock

import pytest

import skydraft
from skydraft import Generation, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import EngineError
from skydraft.prompts.messages import asked

from .. import toys
from ..engines.test_lock import interrupt_in
from ..serving import waiting
from .test_slots import few

MODES = ("edge", "cloud", "lossless", "quality")
WAYS: dict[str, Any] = {
    "run": lambda generation: generation.run(), "text": lambda generation: generation.text, "tokens": list,
    "rounds": lambda generation: list(generation.rounds()),
    "two iterations": lambda generation: [next(iter(generation)), *generation],
    "in a thread": lambda generation: ThreadPoolExecutor(1).submit(generation.run).result(),
    "with": lambda generation: [list(each) for each in [generation.__enter__()]],
}  # fmt: skip


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def failing(fail_at: int = 0) -> tuple[Any, Any]:
    """Two models that share a count of forwards; the one with the number `fail_at` fails."""
    numbers = itertools.count(1)

    def count() -> None:
        if next(numbers) == fail_at:
            raise EngineError("The device was lost.")

    return waiting(few(spec="toy:drift=0.2"), count), waiting(few(), count)


def begun_by(mode: str, engines: tuple[Any, Any]) -> Generation:
    sides = {"edge": engines[0], "cloud": engines[1]}
    sides.pop({"edge": "cloud", "cloud": "edge"}.get(mode, ""), None)
    params = skydraft.decoding_params(max_new_tokens=12)
    return skydraft.generate("你好世界", plan=make_plan(mode), params=params, **sides)


AGAIN = *map(attrgetter, ("text", "reasoning", "token_ids")), list, Generation.run

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


@pytest.mark.parametrize("read", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_an_error_at_any_step_ends_it_and_is_raised_again(mode: str, read: Any, no_collector: None) -> None:
    calm, kept = begun_by(mode, failing()).run().token_ids, []
    for fail_at in itertools.count(1):
        engines = failing(fail_at)
        generation = begun_by(mode, engines)
        try:
            read(generation)
            break
        except EngineError as error:
            kept.append(error)  # with its traceback, which refers to all that was under way
        for once_more in AGAIN:
            with pytest.raises(EngineError, match="lost"):
                once_more(generation)
        told = [token_id for done in generation.rounds_so_far for token_id in done.token_ids]
        assert calm[: len(generation.origins)] == tuple(told)
        assert begun_by(mode, engines).run().token_ids == calm  # there is a place, at once
    assert len(kept) >= 3, "it failed at no step"


@pytest.mark.parametrize("mode", MODES)
def test_who_lets_go_of_it_in_the_middle_leaves_no_place_taken(mode: str, no_collector: None) -> None:
    engines = failing()
    calm = begun_by(mode, engines).run().token_ids
    for num in range(1, 5):
        for _, token in zip(range(num), begun_by(mode, engines), strict=False):
            assert token.token_id in calm
        cancelled = begun_by(mode, engines)
        rounds = cancelled.rounds()
        next(rounds)
        cancelled.cancel()
        assert not list(rounds) and cancelled.token_ids == calm[: len(cancelled.token_ids)]
        assert begun_by(mode, engines).run().token_ids == calm


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_between_any_two_steps_leaves_the_places_to_others(mode: str) -> None:
    chance, engines = random.Random(0), failing()
    calm = begun_by(mode, engines).run().token_ids
    with ThreadPoolExecutor(1) as pool:
        for _ in range(80):
            interrupt_in(chance.uniform(1e-6, 5e-3), lambda: begun_by(mode, engines).run())
            assert pool.submit(lambda: begun_by(mode, engines).run().token_ids).result(20) == calm


def test_nothing_keeps_the_vocabulary_of_a_closed_model() -> None:
    """What is known of a vocabulary goes with it; gateways and long programs open many models."""
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ enable_thinking and '</think>' }}"
    messages = [{"role": "system", "content": "快"}, {"role": "user", "content": "你好"}]
    limits: dict[str, Any] = {"think_budget": 2, "min_call_prob": 0.5, "comma_gap": 2}
    params, kept = skydraft.decoding_params(grammar=skydraft.regex("[a-z]+"), **limits), list[Any]()
    for _ in range(9):
        with few(spec="toy:drift=0.2") as edge, few() as cloud:
            for engine in (edge, cloud):
                engine.vocab.chat_template = template
                kept.append(weakref.ref(engine.vocab))
            skydraft.generate(messages=messages, edge=edge, cloud=cloud, params=params).run()
    del edge, cloud, engine
    gc.collect()
    assert [ref() for ref in kept] == [None] * 18


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


def test_a_text_is_audited_if_one_observer_says_so() -> None:
    watching = [Seen() for _ in range(3)]
    others = watching[1:]
    others[0].begins, others[1].begins = Mock(return_value=False), Mock(return_value=None)  # type: ignore[method-assign]
    sides = {"edge": toys.toy(1, 0.7), "cloud": toys.toy(1)}
    for order, is_audited in ((watching, True), (others, False)):
        assert skydraft.start(REQUEST, **sides, observers=order).run().is_audited is is_audited
    assert [len(each.ends) for each in watching] == [1, 2, 2]
