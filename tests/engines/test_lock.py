"""One thread at a time uses an engine, in the order in which they asked, and none once it is closed."""

import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest

from skydraft.engines.model import FairLock
from skydraft.errors import EngineError

from ..serving import PATIENCE_S, Serving, waiting
from .contract import toy


@pytest.fixture
def engine() -> Iterator[Any]:
    """An engine in the middle of a forward of another thread, which ends well at `go`. `log` has what was done."""
    engine, inside = toy(), threading.Event()
    sequence = engine.open([1, 2, 3])
    engine.go, engine.log, release = threading.Event(), list[Any](), engine.release
    engine.release = lambda sequence: (engine.log.append(sequence), release(sequence))
    engine.free = lambda: engine.log.append("freed")
    waiting(engine, lambda: inside.set() or engine.go.wait(PATIENCE_S))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sequence.extend, [7])
        assert inside.wait(PATIENCE_S)
        yield engine
        engine.go.set()
        assert len(running.result(PATIENCE_S)) == 1


def is_free(lock: FairLock) -> bool:
    done: list[int] = []
    lock.if_free(lambda: done.append(1))
    return bool(done)


def in_line(lock: FairLock, works: list[Callable[[], Any]]) -> list[Future[Any]]:
    """Begins works that wait for the lock, one after another, each in a thread of its own."""
    pool, begun = ThreadPoolExecutor(len(works)), []
    for work in works:
        before = lock._last
        begun.append(pool.submit(work))
        Serving.wait_until(lambda before=before: lock._last is not before)  # type: ignore[misc]
    pool.shutdown(wait=False)
    return begun


def interrupt_in(after_s: float, work: Callable[[], object]) -> None:
    """Do this again and again, until Ctrl-C comes, between whatever two steps."""
    is_over = False

    def interrupt(*_: Any) -> None:
        if not is_over:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s, 0.05)  # again: where Python lets go of an object it is lost
        while True:
            work()
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # on a busy machine the second one comes here
            is_over = True
        is_over = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_calls_wait_in_the_order_in_which_they_came(engine: Any) -> None:
    order: list[int] = []

    def call(number: int) -> None:
        for _ in range(2):  # who wants it again at once comes last
            with engine.floor, engine.floor:  # its owner may take it again, and calls engines inside
                order.append(number)
                assert len(engine.open([1, 2]).extend([2])) == 1
                order.append(number)

    begun = in_line(engine.lock, [lambda at=number: call(at) for number in range(4)])
    assert not order
    engine.go.set()
    for each in begun:
        each.result(PATIENCE_S)
    assert order[:8] == [0, 0, 1, 1, 2, 2, 3, 3] and len(order) == 16


def test_the_model_is_freed_once_after_those_who_came_before_and_later_ones_are_refused(engine: Any) -> None:
    calls = [lambda: engine.log.append(engine.begin([1]).length), engine.close, engine.close, lambda: engine.open([1])]
    *ended, refused = in_line(engine.lock, calls)
    engine.go.set()
    assert [each.result(PATIENCE_S) for each in ended] == [None] * 3 and engine.log == [0, "freed"]
    with pytest.raises(EngineError, match="closed"):
        refused.result(PATIENCE_S)


def test_a_sequence_closed_meanwhile_waits_for_nobody_and_is_released_before_the_next_begins(engine: Any) -> None:
    """As where the garbage collector closes one, in whatever thread and in the middle of whatever."""
    engine.go.set()
    first, second = engine.open([4, 5, 6]), engine.open([4, 5, 6])
    with engine.floor:
        first.close()
        second.close()
        assert first.is_closed and engine.log == []
        third = engine.begin([1])
        assert set(engine.log) == {first, second}
    third.close()
    third.close()
    assert engine.log[2:] == [third]


def test_ctrl_c_in_a_waiting_thread_leaves_the_floor_to_others(engine: Any) -> None:
    before = engine.lock._last
    while engine.lock._last is before:  # it has not waited yet
        interrupt_in(0.1, lambda: engine.open([1]))
    assert not is_free(engine.lock)
    engine.go.set()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: engine.open([1]).close()).result(PATIENCE_S)
    assert is_free(engine.lock)


# Where Python lets go of an object, it says that the interrupt is lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_between_any_two_steps_leaves_the_floor_to_others() -> None:
    chance, engine = random.Random(0), toy()

    def work() -> None:
        with closing(engine.open([1, 2, 3])) as sequence, engine.floor, engine.floor:
            sequence.extend([4])

    with ThreadPoolExecutor(1) as pool:
        for _ in range(300):
            interrupt_in(chance.uniform(1e-6, 3e-4), work)
            pool.submit(lambda: engine.open([1, 2]).close()).result(PATIENCE_S)
