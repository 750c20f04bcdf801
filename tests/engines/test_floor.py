"""One thread at a time uses an engine, in the order in which they asked, and none once it is closed."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from skydraft.engines.base import Engine, Floor
from skydraft.engines.toy import ToyEngine
from skydraft.errors import EngineError

from .tiny_checkpoint import OPTIONS
from .tiny_omni import clip
from .tiny_toy import toy

Load = Callable[[], Engine]


@pytest.fixture(params=["toy", "text", "omni"])
def load(request: pytest.FixtureRequest) -> Load:
    """Loads an engine of each kind that needs no download."""
    if request.param == "toy":
        return toy
    pytest.importorskip("torch")
    if request.param == "text":
        from skydraft.engines.transformers_text import TransformersEngine

        folder = request.getfixturevalue("folders")[0]
        return lambda: TransformersEngine(folder, OPTIONS, name="text")
    from skydraft.engines.transformers_omni import OmniEngine

    omni_folder = request.getfixturevalue("omni_folder")
    return lambda: OmniEngine(omni_folder, OPTIONS, name="omni")


def test_a_closed_sequence_and_a_closed_engine_refuse_everything(load: Load) -> None:
    with load() as engine:
        vocab, sequence, begun = engine.vocab, engine.open([10, 11, 12]), engine.begin([10, 11, 12])
        media = engine.media(clip(1, 0.31)) if engine.takes_audio else None
        begun.close()
        for refused in (begun.extend, lambda ids: engine.prefill(begun, ids), lambda ids: begun.truncate(0)):
            with pytest.raises(EngineError, match=r"^This sequence is closed\.$"):
                refused([10, 11, 12])
        with pytest.raises(EngineError, match="sequence is closed"):
            engine.extend_batch([(sequence, [10]), (begun, [10])])
    uses: list[Callable[[], Any]] = [
        lambda: engine.open([10, 11]),
        lambda: engine.check_prompt([10, 11]),
        lambda: engine.prefill(sequence, [10, 11, 12]),
        lambda: sequence.extend([10]),
        lambda: sequence.truncate(sequence.length),
        lambda: vocab.encode("a"),
        engine.floor.__enter__,
    ]
    if media is not None:
        uses += [lambda: engine.media(clip(1, 0.31)), lambda: engine.audio_tokens(media)]
    for use in uses:
        with pytest.raises(EngineError, match=f"^{engine.name} is closed.$"):
            use()
    assert sequence.token_ids.tolist() == [10, 11] and vocab.decode([10, 11])
    for close in (sequence.close, begun.close, engine.close, sequence.close):
        close()


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


class Blocking(ToyEngine):
    """A forward of the token 7 waits until `go`. `log` has what was done."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.inside, self.go, self.log = threading.Event(), threading.Event(), list[Any]()

    def forward(self, feeds: Any, *, want_logits: bool) -> Any:
        if feeds[0][1][0] == 7:
            self.inside.set()
            assert self.go.wait(20)
        return super().forward(feeds, want_logits=want_logits)

    def release(self, sequence: Any) -> None:
        self.log.append(sequence)
        super().release(sequence)

    def free(self) -> None:
        self.log.append("freed")


@pytest.fixture
def engine() -> Iterator[Blocking]:
    """An engine in the middle of a forward of another thread, which ends well."""
    engine: Blocking = toy(Blocking)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.open([1, 2, 3]).extend, [7])
        assert engine.inside.wait(20)
        yield engine
        engine.go.set()
        assert len(running.result(20)) == 1


def in_line(floor: Floor, works: list[Callable[[], Any]]) -> list[Future[Any]]:
    """Begins works that wait for the floor, one after another, each in a thread of its own."""
    pool, begun = ThreadPoolExecutor(len(works)), []
    for number, work in enumerate(works, 1):
        begun.append(pool.submit(work))
        while len(floor._waiting) < number:
            time.sleep(0.001)
    pool.shutdown(wait=False)
    return begun


def test_calls_wait_in_the_order_in_which_they_came(engine: Blocking) -> None:
    order: list[int] = []

    def call(number: int) -> None:
        with engine.floor, engine.floor:  # its owner may take it again, and calls engines inside
            order.append(number)
            assert len(engine.open([1, 2]).extend([2])) == 1
            order.append(number)

    begun = in_line(engine.floor, [lambda at=number: call(at) for number in range(4)])
    assert not order
    engine.go.set()
    for each in begun:
        each.result(20)
    assert order == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_model_is_freed_once_after_those_who_came_before_and_later_ones_are_refused(engine: Blocking) -> None:
    calls = [lambda: engine.log.append(engine.begin([1]).length), engine.close, engine.close, lambda: engine.open([1])]
    *ended, refused = in_line(engine.floor, calls)
    engine.go.set()
    assert [each.result(20) for each in ended] == [None] * 3 and engine.log == [0, "freed"]
    with pytest.raises(EngineError, match="closed"):
        refused.result(20)


def test_a_sequence_closed_meanwhile_waits_for_nobody_and_is_released_before_the_next_begins(engine: Blocking) -> None:
    """As where the garbage collector closes one, in whatever thread and in the middle of whatever."""
    engine.go.set()
    first, second = engine.open([4, 5, 6]), engine.open([4, 5, 6])
    with engine.floor:
        first.close()
        with engine.floor._state:  # in the middle of `acquire` or `release`
            second.close()
        assert first.is_closed and engine.log == []
        third = engine.begin([1])
        assert set(engine.log) == {first, second}
    third.close()
    third.close()
    assert engine.log[2:] == [third]


def test_a_refused_call_gives_the_floor_back() -> None:
    engine = toy()
    sequence = engine.open([1, 2, 3])
    for call in (lambda: sequence.truncate(99), lambda: sequence.extend([])):
        with pytest.raises(EngineError):
            call()
    assert engine.floor.try_acquire() and not engine.floor.try_acquire()


@pytest.mark.parametrize("is_handed", [False, True])
def test_ctrl_c_in_a_waiting_thread_leaves_the_floor_to_others(
    monkeypatch: pytest.MonkeyPatch, is_handed: bool
) -> None:
    """Before it is handed to that thread, and after."""
    floor = Floor("toy")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(floor.acquire).result(20)

        class Interrupted:
            """A lock whose second `acquire`, the wait, is ended by Ctrl-C."""

            num_asked = 0

            def acquire(self) -> None:
                self.num_asked += 1
                if self.num_asked == 2:
                    if is_handed:
                        pool.submit(floor.release).result(20)
                    raise KeyboardInterrupt

            def release(self) -> None:
                assert is_handed, "handed to a thread that has gone"

        with monkeypatch.context() as patch:
            patch.setattr("skydraft.engines.base.threading.Lock", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                floor.acquire()
        if not is_handed:
            pool.submit(floor.release).result(20)
    assert floor.try_acquire()
