"""Drafts that arrive while the target writes: which fit, and how many of them are worth their rows."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.race.branch import MAX_KEPT, Branch, Worth, num_fed
from skydraft.types import Draft

from ..toys import array, law

TEXT = tuple(range(100, 160))
FREE = [1.0] * 100
FOURS = [1.0, 1.9, 2.4, 1.45, 3.0, 3.0, 3.0, 2.84, *[4.0] * 8]


def branch_after(*drafts: Draft, written: int = 0) -> tuple[Branch, tuple[int, ...]]:
    branch = Branch(Worth())
    for draft in drafts:
        branch.take(draft, array(TEXT[:written]))
        branch.after(array(TEXT[:written]))
    return branch, branch.after(array(TEXT[:written]))


@pytest.mark.parametrize(("drafts", "written", "left"), [
    pytest.param([Draft(1, 0, (100, 101, 7))], 0, (100, 101, 7), id="ahead"),
    pytest.param([Draft(1, 0, (100,)), Draft(0, 0, (101, 102))], 0, (100, 101, 102), id="continued"),
    pytest.param([Draft(1, 0, (100, 101, 102))], 2, (102,), id="partly late"),
    pytest.param([Draft(1, 0, (100, 7, 102))], 2, (), id="late and wrong"),
    pytest.param([Draft(1, 0, (100, 7)), Draft(0, 0, (102,))], 2, (), id="continues what was wrong"),
    pytest.param([Draft(1, 0, (100,)), Draft(0, 0, (101,))], 3, (), id="fell behind"),
    pytest.param([Draft(1, 0, (100,)), Draft(0, 0, (101, 102, 103))], 3, (103,), id="behind, and past the text"),
    pytest.param([Draft(1, 0, (100,)), Draft(0, 0, (7, 102, 103))], 3, (), id="behind and wrong"),
    pytest.param([Draft(1, 3, (103,))], 2, (), id="a gap"),
    pytest.param([Draft(1, 3, (103,)), Draft(0, 0, (104,))], 2, (), id="continues a gap"),
    pytest.param([Draft(2, 1, (7, 8)), Draft(1, 1, (101, 102))], 1, (7, 8), id="an older branch"),
    pytest.param([Draft(1, 1, (7, 8)), Draft(2, 1, (101, 102))], 1, (101, 102), id="a newer branch"),
    pytest.param([Draft(1, 1, (101,)), Draft(1, 1, (101, 102))], 1, (101, 102), id="said again"),
    pytest.param([Draft(1, 0, (7,)), Draft(1, 1, (101,))], 1, (), id="a dead branch begun again"),
    pytest.param([Draft(0, 0, (100,))], 0, (), id="continues nothing"),
    pytest.param([Draft(1, 0, (1,) * (MAX_KEPT + 1))], 0, (), id="too many"),
])  # fmt: skip
def test_drafts_that_fit(drafts: list[Draft], written: int, left: tuple[int, ...]) -> None:
    assert branch_after(*drafts, written=written)[1] == left


def test_too_many_drafts_after_enough_end_the_branch_and_a_new_one_begins() -> None:
    branch, _ = branch_after(Draft(1, 0, (1,) * MAX_KEPT), Draft(0, 0, (1,)))
    assert branch.after(array([])) == ()
    branch.take(Draft(2, 0, TEXT[:3]), array([]))
    assert branch.after(array(TEXT[:1])) == TEXT[1:3]


def test_worth_is_the_share_of_right_drafts_judged_or_late() -> None:
    branch, _ = branch_after(Draft(1, 0, TEXT[:40]))
    for written in (10, 11, 40):
        branch.after(array(TEXT[:written]))
    right = branch.worth.share
    branch.take(Draft(2, 40, (7, 8, 9)), array(TEXT[:40]))
    branch.after(array(TEXT[:50]))
    assert 0.9 < right < 1 and branch.worth.share < right  # one was wrong; nothing is known of those after it
    for number in range(3, 200):
        branch.take(Draft(number, 40, (7,)), array(TEXT[:40]))
        branch.after(array(TEXT[:41]))
    assert branch.worth.share < 0.06


@pytest.mark.parametrize(("own", "waiting", "max_rows", "ms", "may_delay", "counts"), [
    pytest.param(2, [(0.98, 9), (0.7, 0)], 16, FOURS, False, [2, 0], id="beside a plain text"),
    pytest.param(4, [(0.98, 9), *[(0.7, 0)] * 3], 16, FOURS, False, [0, 0, 0, 0], id="a plain text would wait"),
    pytest.param(1, [(0.7, 10)], 4, FREE, True, [3], id="the rows that are left"),
    pytest.param(3, [(0.9, 9)] * 3, 3, FREE, True, [0, 0, 0], id="no row is left"),
])  # fmt: skip
def test_drafts_get_rows_that_are_left_and_for_which_no_plain_text_waits(  # type: ignore[no-untyped-def]
    own, waiting, max_rows, ms, may_delay, counts
) -> None:
    assert num_fed(own, waiting, max_rows, lambda num: ms[num - 1], may_delay=may_delay) == counts


@law(100)
@given(
    st.integers(1, 8), st.lists(st.tuples(st.floats(0.05, 0.99), st.integers(0, 5)), min_size=1, max_size=3),
    st.lists(st.floats(0.5, 9), min_size=24, max_size=24),
)  # fmt: skip
def test_no_other_numbers_of_drafts_give_more_tokens_a_second(own, waiting, times) -> None:  # type: ignore[no-untyped-def]
    def speed(counts: tuple[int, ...]) -> float:
        rows = zip(waiting, counts, strict=True)
        gains = sum(worth**place for (worth, _), num in rows for place in range(1, num + 1))
        return (own + gains) / times[own + sum(counts) - 1]

    counts = tuple(num_fed(own, waiting, 16, lambda num: times[num - 1], may_delay=True))
    every = itertools.product(*(range(num + 1) for _, num in waiting))
    assert speed(counts) == pytest.approx(max(speed(each) for each in every if own + sum(each) <= 16))
