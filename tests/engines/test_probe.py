"""Probes: rows that are bit-equal near the beginning only, busy moments, and what is remembered."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from skydraft.engines import probe as probing
from skydraft.engines.options import EngineOptions
from skydraft.engines.probe import probe, profile_of
from skydraft.engines.row_costs import RowProfile
from skydraft.engines.toy import ToyEngine

from .contract import toy


class SomeRowsDiffer(ToyEngine):
    """So many rows at once have other last bits, as with other kernels, once the cache is `from_len` long."""

    widths, from_len = range(3, 99), 0

    def forward(self, feeds: Any, *, want_logits: bool) -> Any:
        num_rows = sum(len(token_ids) for _, token_ids in feeds)
        differs = want_logits and num_rows in self.widths and feeds[0][0].length >= self.from_len
        rows = super().forward(feeds, want_logits=want_logits)
        return [np.nextafter(row, np.float32(9)) for row in rows] if differs else rows


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
