"""An error or a cancel at any step ends a generation: its places are free, and who asks for more hears it again."""

import gc
import itertools
import random
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any

import pytest

import skydraft
from skydraft import Generation, make_plan
from skydraft.errors import EngineError

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
