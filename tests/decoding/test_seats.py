"""A generation waits its turn where a model has no free sequence: in order, and never for ever."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import skydraft
from skydraft import Generation, make_plan
from skydraft.engines import seats
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.errors import EngineBusy, EngineError, OptionError

from ..serving import Serving

PATIENT_S = 60.0


def few(num: int = 1, wait_s: float = PATIENT_S, spec: str = "toy") -> ToyEngine:
    """A toy with so many sequences, as a llama.cpp model has them."""

    class Few(ToyEngine):
        def allocate(self) -> Any:
            assert self.prefixes.num_open < self.max_sequences, "more sequences than there are"
            return super().allocate()

    toy = open_toy(spec, max_sequences=num)
    toy.__class__ = Few
    toy.has_seats, toy.wait_s = True, wait_s
    return toy


def text(num: int = 40, **sides: Any) -> Generation:
    plan = make_plan("edge" if "cloud" not in sides else "cloud" if "edge" not in sides else "quality")
    return skydraft.generate("你好世界", plan=plan, params=skydraft.decoding_params(max_new_tokens=num), **sides)


def begun(generation: Generation) -> Generation:
    next(iter(generation))
    return generation


@pytest.mark.parametrize("num", [1, 2])
def test_as_many_as_come_get_the_text_of_one_whichever_models_they_need_in_which_role(num: int) -> None:
    """Each model drafts for some and checks for others: who took them one by one would wait for ever."""
    one, other = few(num), few(num, spec="toy:drift=0.2")
    roles = [{"edge": one, "cloud": other}, {"edge": other, "cloud": one}, {"cloud": one}, {"edge": other}]
    alone = [text(**{side: open_toy(toy.name) for side, toy in sides.items()}).text for sides in roles]
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda n: text(**roles[n % 4]).text, range(24)))
    assert done == alone * 6 and not seats._held and not seats._line


def test_they_come_on_in_the_order_of_their_arrival() -> None:
    toy, came, threads = few(), list[int](), list[threading.Thread]()
    holder = begun(text(edge=toy))
    for number in range(5):
        threads.append(threading.Thread(target=lambda n=number: (text(edge=toy).run(), came.append(n))))
        threads[-1].start()
        Serving.wait_until(lambda: len(seats._line) == len(threads))
    holder.close()
    for thread in threads:
        thread.join(PATIENT_S)
    assert came == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("end", ["cancel", "close", "engine"])
def test_a_wait_ends_by_cancelling_by_closing_and_with_the_engine(end: str) -> None:
    toy = few()
    holder, waiting, found = begun(text(edge=toy)), text(edge=toy), list[Any]()

    def run() -> None:
        try:
            found.append(waiting.run().token_ids)
        except EngineError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    Serving.wait_until(lambda: bool(seats._line))
    {"cancel": waiting.cancel, "close": waiting.close, "engine": toy.close}[end]()
    thread.join(PATIENT_S)
    assert found == (["toy is closed."] if end == "engine" else [()])
    holder.close()
    assert not seats._held and not seats._line


def test_one_that_is_never_closed_is_waited_for_so_long_and_one_that_is_dropped_is_not() -> None:
    toy = few(wait_s=0.05)
    kept = begun(text(edge=toy))
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(EngineBusy, match=r"in use, and none was free in 0.05 s. .*parallel"),
    ):
        pool.submit(lambda: text(edge=toy).run()).result()
    del kept
    assert text(edge=toy).text


def test_a_thread_that_would_wait_for_itself_is_told_at_once() -> None:
    toy = few()
    with begun(text(edge=toy)) as kept:
        with pytest.raises(EngineBusy, match="this thread has not ended"):
            text(edge=toy).run()
        assert kept.run().finish_reason == "length"
    assert text(edge=toy).text
    with pytest.raises(EngineError, match=r"needs 2 sequences of toy\. Load it with parallel=2."):
        text(edge=toy, cloud=toy).run()


@pytest.mark.parametrize("given", [
    {"wait_s": float("inf")}, {"wait_s": float("nan")}, {"wait_s": -1}, {"wait_s": "3"}, {"parallel": 0},
    {"parallel": 1.5}, {"parallel": "2"}, {"context": 1.5}, {"threads": "all"},
])  # fmt: skip
def test_what_is_no_number_of_places_or_seconds_is_one_clear_error(given: Any) -> None:
    with pytest.raises(OptionError, match="must be"):
        skydraft.load("toy", **given)
