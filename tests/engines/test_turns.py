"""Who may use an engine: one thread at a time, and nobody once it is closed."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines.base import Engine
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.engines.turns import Floor
from skydraft.errors import EngineError

from .tiny_checkpoint import OPTIONS
from .tiny_omni import clip
from .tiny_toy import VOCAB, toy

Load = Callable[[], Engine]


@pytest.fixture(params=["toy", "text", "omni"])
def load(request: pytest.FixtureRequest) -> Load:
    """Loads an engine of each kind that needs no download."""
    if request.param == "toy":
        return toy
    pytest.importorskip("torch")
    if request.param == "text":
        from skydraft.engines.transformers_text import TransformersEngine

        folder: Path = request.getfixturevalue("folders")[0]
        return lambda: TransformersEngine(folder, OPTIONS, name="text")
    from skydraft.engines.transformers_omni import OmniEngine

    omni_folder: Path = request.getfixturevalue("omni_folder")
    return lambda: OmniEngine(omni_folder, OPTIONS, name="omni")


# --- closed ---


def test_a_closed_engine_refuses_everything(load: Load) -> None:
    engine = load()
    vocab, sequence, begun = engine.vocab, engine.open([10, 11, 12]), engine.begin([10, 11, 12])
    held, text = sequence.token_ids.tolist(), vocab.decode([10, 11])
    media = engine.media(clip(1, 0.31)) if engine.takes_audio else None
    engine.close()
    uses: list[Callable[[], Any]] = [
        lambda: engine.open([10, 11]),
        lambda: engine.begin([10, 11]),
        lambda: engine.check_prompt([10, 11]),
        lambda: engine.prefill(begun, [10, 11, 12]),
        lambda: engine.extend_batch([(sequence, [10])]),
        lambda: sequence.extend([10]),
        lambda: sequence.truncate(1),
        lambda: sequence.truncate(sequence.length),
        lambda: vocab.encode("a"),
    ]
    if media is not None:
        uses += [lambda: engine.media(clip(1, 0.31)), lambda: engine.audio_tokens(media)]
    for use in uses:
        with pytest.raises(EngineError, match=f"^{engine.name} is closed.$"):
            use()
    assert (sequence.token_ids.tolist(), vocab.decode([10, 11])) == (held, text)
    for close in (sequence.close, begun.close, engine.close, sequence.close):
        close()


def test_a_with_block_closes_the_engine(load: Load) -> None:
    with pytest.raises(ZeroDivisionError), load() as engine:
        assert engine.open([10, 11]).extend([11]) is not None
        raise ZeroDivisionError
    assert engine.turns.is_over


def test_a_closed_toy_leaves_the_vocabulary_it_was_given_alone() -> None:
    toy().close()
    assert VOCAB.encode("我") == (0,)


def test_an_engine_that_is_dropped_is_freed_at_once(load: Load) -> None:
    engine = load()
    gone, vocab = weakref.ref(engine), engine.vocab
    gc.collect()
    gc.disable()
    try:
        del engine
        assert gone() is None, "something refers to the engine in a circle"
    finally:
        gc.enable()
    assert vocab.encode("a")


def test_the_model_is_freed_once() -> None:
    freed = []

    class Counting(ToyEngine):
        def free(self) -> None:
            freed.append(self)

    with toy(Counting) as engine:
        engine.close()
    assert len(freed) == 1


def test_a_closed_sequence_refuses_everything(load: Load) -> None:
    engine = load()
    sequence, other = engine.open([10, 11, 12]), engine.open([10, 11, 12])
    sequence.close()
    for use in (
        lambda: sequence.extend([10]),
        lambda: sequence.truncate(0),
        lambda: engine.prefill(sequence, [10, 11, 12, 13]),
        lambda: engine.extend_batch([(other, [10]), (sequence, [10])]),
    ):
        with pytest.raises(EngineError, match="This sequence is closed"):
            use()
    assert other.token_ids.tolist() == [10, 11]


# --- threads ---


class Blocking(ToyEngine):
    """A forward of the token 7 says that it has begun, then waits to be let go; so does rolling back to 1."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.inside, self.go, self.released = threading.Event(), threading.Event(), list[Any]()

    def _wait(self) -> None:
        self.inside.set()
        assert self.go.wait(20)

    def forward(self, feeds: Any, *, want_logits: bool) -> Any:
        if any(7 in token_ids for _, token_ids in feeds):
            self._wait()
        return super().forward(feeds, want_logits=want_logits)

    def roll_back(self, sequence: Any, length: int) -> None:
        if length == 1:
            self._wait()
        super().roll_back(sequence, length)

    def release(self, sequence: Any) -> None:
        self.released.append(sequence)
        super().release(sequence)


@pytest.mark.parametrize("slow", ["extend", "prefill", "truncate"])
def test_calls_of_two_threads_do_not_overlap(slow: str) -> None:
    engine = toy(Blocking)
    mine, other, begun = engine.open([1, 2, 3]), engine.open([4, 5, 6]), engine.begin([7, 8])
    slow_call = {
        "extend": lambda: mine.extend([7]),
        "prefill": lambda: engine.prefill(begun, [7, 8]),
        "truncate": lambda: mine.truncate(1),
    }[slow]
    calls: list[Callable[[], Any]] = [
        lambda: other.extend([6]),
        lambda: other.truncate(0),
        lambda: engine.open([1, 2]),
        lambda: engine.begin([1, 2]),
        lambda: engine.prefill(other, [4, 5, 6, 1]),
        lambda: mine.extend([1]),
        engine.close,
    ]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(slow_call)
        assert engine.inside.wait(20)
        began = time.monotonic()
        for call in calls:
            with pytest.raises(EngineError, match=r"^Another thread is using toy\."):
                call()
        assert time.monotonic() - began < 1, "nobody waits"
        assert (mine.length, other.token_ids.tolist()) == (2, [4, 5]) and not engine.turns.is_over
        engine.go.set()
        running.result(20)
    assert other.extend([6]).shape[0] == 1 and other.token_ids.tolist() == [4, 5, 6]
    assert mine.length == {"extend": 3, "prefill": 2, "truncate": 1}[slow]


def test_a_sequence_closed_meanwhile_is_released_before_the_next_begins() -> None:
    engine = toy(Blocking)
    mine, other = engine.open([1, 2, 3]), engine.open([4, 5, 6])
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(mine.extend, [7])
        assert engine.inside.wait(20)
        other.close()
        assert other.is_closed and engine.released == []
        engine.go.set()
        running.result(20)
    assert engine.released == []
    third = engine.begin([1])
    assert engine.released == [other]
    mine.close()
    mine.close()
    third.close()
    assert engine.released == [other, mine, third]


def test_an_engine_may_be_used_by_one_thread_after_another() -> None:
    engine = toy()
    sequence, expected = engine.open([1, 2, 3]), toy().open([1, 2, 3]).extend([3, 1])
    for _ in range(5):
        with ThreadPoolExecutor(1) as pool:
            assert (pool.submit(sequence.extend, [3, 1]).result() == expected).all()
            pool.submit(sequence.truncate, 2).result()


def test_a_refused_call_gives_its_turn_back() -> None:
    engine = toy()
    sequence = engine.open([1, 2, 3])
    for _ in range(3):
        with pytest.raises(EngineError):
            sequence.truncate(99)
        with pytest.raises(EngineError):
            sequence.extend([])
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(sequence.extend, [1]).result()) == 1


def test_who_has_the_floor_never_finds_the_engine_in_use_by_one_who_closes() -> None:
    engine: Any = open_toy("toy", 4096, 3)
    sound = engine.release

    def slow_release(sequence: Any) -> None:
        time.sleep(0.002)  # as long as freeing KV may take
        sound(sequence)

    engine.release = slow_release
    with engine.floor:
        held = [engine.begin([1, 2]) for _ in range(60)]
        mine = engine.begin([1, 2])
    closing = threading.Thread(target=lambda: [sequence.close() for sequence in held])
    closing.start()
    for _ in range(60):
        with engine.floor:
            mine.extend([1])  # raises, if somebody has a turn without having the floor
    closing.join()
    mine.close()


def test_the_floor_is_handed_on_in_the_order_in_which_it_was_asked_for() -> None:
    floor, order, started = Floor(), list[int](), list[threading.Thread]()

    def wait(number: int) -> None:
        with floor:
            order.append(number)

    floor.acquire()
    assert not floor.try_acquire()
    for number in range(5):
        thread = threading.Thread(target=wait, args=(number,))
        thread.start()
        started.append(thread)
        while len(floor._waiting) <= number:
            time.sleep(0.001)
    floor.release()
    for thread in started:
        thread.join()
    assert order == list(range(5)) and floor.try_acquire()


def test_a_sequence_that_the_garbage_collector_closes_does_not_wait_for_the_floor() -> None:
    floor = Floor()
    with floor._lock:  # as if it ran in the middle of `acquire`
        assert floor.try_acquire()
        floor.release()


def test_ctrl_c_in_one_who_waits_for_the_floor_leaves_it_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    floor = Floor()
    floor.acquire()
    locks = iter([KeyboardInterrupt])

    class Interrupted:
        """A lock whose second `acquire`, the wait, is ended by Ctrl-C."""

        num_asked = 0

        def acquire(self) -> bool:
            self.num_asked += 1
            if self.num_asked == 2:
                raise next(locks)
            return True

        def release(self) -> None:
            raise AssertionError("handed to one who has gone")

    with monkeypatch.context() as patch:
        patch.setattr("skydraft.engines.turns.threading.Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            floor.acquire()
    floor.release()
    assert floor.try_acquire()
