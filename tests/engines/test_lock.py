"""One thread at a time uses an engine, in the order in which they asked, and none once it is closed."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest

from skydraft.engines.model import FairLock
from skydraft.engines.toy import ToyEngine
from skydraft.errors import EngineError

from ..serving import Serving
from .tiny_toy import toy


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


def test_calls_wait_in_the_order_in_which_they_came(engine: Blocking) -> None:
    order: list[int] = []

    def call(number: int) -> None:
        with engine.floor, engine.floor:  # its owner may take it again, and calls engines inside
            order.append(number)
            assert len(engine.open([1, 2]).extend([2])) == 1
            order.append(number)

    begun = in_line(engine.lock, [lambda at=number: call(at) for number in range(4)])
    assert not order
    engine.go.set()
    for each in begun:
        each.result(20)
    assert order == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_model_is_freed_once_after_those_who_came_before_and_later_ones_are_refused(engine: Blocking) -> None:
    calls = [lambda: engine.log.append(engine.begin([1]).length), engine.close, engine.close, lambda: engine.open([1])]
    *ended, refused = in_line(engine.lock, calls)
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
        second.close()
        assert first.is_closed and engine.log == []
        third = engine.begin([1])
        assert set(engine.log) == {first, second}
    third.close()
    third.close()
    assert engine.log[2:] == [third]


def test_ctrl_c_in_a_waiting_thread_leaves_the_floor_to_others(engine: Blocking) -> None:
    before = engine.lock._last
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell begins without it

    def interrupt() -> None:
        Serving.wait_until(lambda: engine.lock._last is not before)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), engine.floor:
        pass
    assert not is_free(engine.lock)
    engine.go.set()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: engine.open([1]).close()).result(20)
    assert is_free(engine.lock)


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
            pool.submit(lambda: engine.open([1, 2]).close()).result(20)
