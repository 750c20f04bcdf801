"""Rows: a probe finds how many at once keep their bits and what they cost, which decides how forwards are padded and
feeds parted; and they have the bits of one row at a time at every length."""

import logging
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines import probe as probing
from skydraft.engines.options import EngineOptions
from skydraft.engines.probe import probe, profile_of
from skydraft.engines.row_costs import RowCosts, RowProfile
from skydraft.engines.toy import ToyEngine
from skydraft.errors import EngineError
from skydraft.files import log

from ..toys import FlakyEngine, law
from .contract import SIZE, one_by_one, toy

IN_FOURS = (10.0, 18.0, 26.0, 14.0, 24.0, 32.0, 40.0, 27.0)
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)
times = st.lists(st.floats(0.5, 50), min_size=1, max_size=16)


class SomeRowsDiffer(ToyEngine):
    """So many rows at once have other last bits, as with other kernels, once the cache is `from_len` long."""

    widths, from_len = range(3, 99), 0

    def forward(self, feeds: Any, *, want_logits: bool) -> Any:
        num_rows = sum(len(token_ids) for _, token_ids in feeds)
        differs = want_logits and num_rows in self.widths and feeds[0][0].length >= self.from_len
        rows = super().forward(feeds, want_logits=want_logits)
        return [np.nextafter(row, np.float32(9)) for row in rows] if differs else rows


def costs_of(forward_ms: tuple[float, ...] = IN_FOURS, invariant_rows: int = 8) -> RowCosts:
    return RowCosts(RowProfile(invariant_rows, forward_ms), "toy")


def probed(kind: type[ToyEngine], rows: int = 4, **changes: Any) -> Any:
    engine = toy(kind, context_len=2048)
    for name, value in ({"has_kernels": True, "profile": RowProfile(rows, (1.0,) * 8)} | changes).items():
        setattr(engine, name, value)
    return engine


@pytest.mark.parametrize("context_len", [16, 17, 31, 32, 100, 2000])
def test_probing_finds_how_many_rows_are_bit_equal(context_len: int) -> None:
    profile = probe(toy(context_len=context_len))
    num_rows = min(16, context_len - context_len // 2)
    assert profile.invariant_rows == len(profile.forward_ms) == num_rows and min(profile.forward_ms) >= 0
    for widths in (range(3, 99), [3]):  # that four are equal again is no help
        engine = toy(SomeRowsDiffer, context_len=context_len)
        engine.widths = widths
        assert probe(engine).invariant_rows == 2


def test_sixteen_bits_are_not_compared_and_no_forward_is_too_wide() -> None:
    for limit, value, expected in (("is_full_precision", False, (1, 16)), ("max_output_rows", 5, (5, 5))):
        engine = toy(context_len=2000)
        setattr(engine, limit, value)
        profile = probe(engine)
        assert (profile.invariant_rows, len(profile.forward_ms)) == expected


@pytest.mark.parametrize(("quiet", "ms", "num_lines", "num_times", "best"), [
    # Two busy moments of three leave no mark: each row count is timed once in each.
    *((quiet, 50.0, 0, 3, 1.0) for quiet in range(3)),
    (None, 19.0, 0, 3, 19.0), (None, 21.0, 1, 3, 21.0), (None, 300.0, 1, 2, 300.0),
])  # fmt: skip
def test_busy_moments_leave_no_mark_and_a_slow_machine_is_told_of_and_timed_less_often(
    quiet: int | None, ms: float, num_lines: int, num_times: int, best: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward takes `ms`; in the moment `quiet`, and before all of them where there is one, 1 ms."""
    now, num_forwards, told, forward = 0.0, 0, list[str](), ToyEngine.forward

    def timed(engine: ToyEngine, feeds: Any, *, want_logits: bool) -> Any:
        nonlocal now, num_forwards
        moment = 0 if num_forwards < 17 + 16 else 1 + (num_forwards - 33) // 7
        is_quiet = quiet is not None and (num_forwards < 17 or moment == quiet)
        now += want_logits * (1.0 if is_quiet else ms) / 1e3
        num_forwards += want_logits
        return forward(engine, feeds, want_logits=want_logits)

    monkeypatch.setattr(ToyEngine, "forward", timed)
    monkeypatch.setattr(probing, "time", SimpleNamespace(perf_counter=lambda: now))
    forward_ms = probe(toy(context_len=32), told.append).forward_ms
    assert {forward_ms[num - 1] for num in (1, 2, 3, 4, 8, 12, 16)} == {best}
    assert num_forwards == 1 + 16 + 16 + (num_times - 1) * 7
    assert len(told) == num_lines and all("measuring toy" in line for line in told)


def test_a_profile_is_measured_once_for_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[RowProfile] = []

    def measure(engine: object, notify: object) -> RowProfile:
        measured.append(RowProfile(len(measured) + 1, (1.5,) * 16))
        return measured[-1]

    busy = [True, False, True]  # before the first probe, and after the second: neither is kept
    monkeypatch.setattr(probing, "probe", measure)
    monkeypatch.setattr(probing, "is_busy", lambda: bool(busy) and busy.pop(0))
    options = EngineOptions(profile_path=tmp_path / "cache" / "profiles.json")
    for key, expected in (("a", 1), ("a", 2), ("a", 3), ("a", 3), ("b", 4), ("a", 3)):
        assert profile_of(toy(), key, options).invariant_rows == expected
    assert profile_of(toy(), "a", options) == measured[2]
    (blocked := tmp_path / "file").touch()
    for path, expected in ((None, 5), (None, 6), (blocked / "profiles.json", 7)):
        assert profile_of(toy(), "a", EngineOptions(profile_path=path)).invariant_rows == expected


def test_two_and_three_rows_are_padded_to_four_and_one_never() -> None:
    assert [costs_of().padded(num) for num in range(1, 10)] == [1, 4, 4, 4, 5, 8, 8, 8, 9]
    assert costs_of().forward_ms == (10.0, 14.0, 14.0, 14.0, 24.0, 27.0, 27.0, 27.0)
    few = costs_of(invariant_rows=3)  # four rows give other bits, and those of five are lost anyway
    assert [few.padded(num) for num in range(1, 9)] == [1, 2, 3, 4, 5, 8, 8, 8]
    assert [costs_of((10.0, 14.2, 14.0, 14.1)).padded(num) for num in (2, 3)] == [2, 3]  # what saves nothing


def test_sequences_with_few_rows_are_padded_where_another_forward_would_cost_more() -> None:
    assert costs_of().passes([1, 3]) == [((0, 1), 3)]  # 27 ms as 8 rows; 14 and 14 as two forwards of 4
    assert costs_of().passes([1, 1, 1]) == [((0, 1, 2), 1)]
    assert costs_of().passes([1, 7]) == [((0, 1), 1), ((1,), 6)]  # 14 rows would lose their bits


@law(200)
@given(times, st.integers(1, 16), sizes)
def test_passes_hold_each_row_once_and_keep_the_bits(forward_ms: list[float], exact: int, given: list[int]) -> None:
    costs = costs_of(tuple(forward_ms), min(exact, len(forward_ms)))
    done = 0
    for feeds, num_rows in costs.passes(given):
        assert feeds == tuple(index for index, size in enumerate(given) if size > done)
        done += num_rows
        assert sum(given) > costs.profile.invariant_rows or len(feeds) * num_rows <= costs.profile.invariant_rows
    assert done == max(given)
    for num_rows in range(1, len(forward_ms) + 1):
        assert num_rows <= costs.padded(num_rows) <= max(costs.profile.limit(num_rows), num_rows)


def test_medians_of_what_forwards_take_replace_a_profile_of_a_busy_moment(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, log.name)
    costs = costs_of((10.0, 18.0, 26.0, 60.0, 70.0, 80.0, 90.0, 100.0))
    assert costs.padded(3) == 3
    for number in count():
        costs.note(1, 20.0)  # the machine is half as fast, evenly
        costs.note(4, 28.0 if number % 3 else 400.0)
        if costs.padded(3) == 4:
            break
    assert 5 <= number < 16 and costs.forward_ms[:4] == (20.0, 28.0, 28.0, 28.0) and costs.forward_ms[7] == 200.0
    assert [each.message for each in caplog.records] == ["toy: 4 rows take 28 ms, 120 by the profile."]
    costs.note(99, 1.0)  # more than was probed says nothing


@law(30)
@given(st.data(), st.sampled_from([256, 512, 1024]))
def test_rows_are_those_of_one_row_at_a_time(data: st.DataObject, from_len: int) -> None:
    """Two sequences on an engine whose wide rows differ from some length on, beside one that is always fed singly."""
    plain = toy(context_len=2048)
    engine = probed(SomeRowsDiffer, widths=range(data.draw(st.integers(2, 5)), 99), from_len=from_len)
    starts = data.draw(st.lists(st.integers(180, 1100), min_size=2, max_size=2))
    ids = np.random.default_rng(1).integers(0, SIZE, 1200).tolist()
    ours = [engine.open(ids[: start + 1]) for start in starts]
    theirs = [plain.open(ids[: start + 1]) for start in starts]
    for _ in range(data.draw(st.integers(1, 6))):
        sizes = data.draw(st.sampled_from([(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 2), (1, 3)]))
        feeds = [(ours[i], ids[ours[i].length :][:size]) for i, size in enumerate(sizes) if size]
        rows = [np.array(found) for found in engine.extend_batch(feeds)]
        for (sequence, fed), found in zip(feeds, rows, strict=True):
            other = theirs[ours.index(sequence)]
            assert np.array_equal(found, np.concatenate([np.array(other.extend([token_id])) for token_id in fed]))
            assert sequence.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_forward_that_fails_while_it_compares_leaves_the_sequence_as_it_was(fails_at: int) -> None:
    engine, text = probed(FlakyEngine, fail_at=fails_at), [1] * 299 + [1, 2, 3]
    with closing(engine.open([1] * 300)) as sequence:
        with pytest.raises(EngineError, match="lost"):
            sequence.extend([1, 2, 3])
        assert sequence.length == 299
        assert np.array_equal(sequence.extend([1, 2, 3]), one_by_one(toy(context_len=2048), text)[-3:])
