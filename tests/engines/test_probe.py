"""Probes: rows that are bit-equal near the beginning only, busy moments, and what is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from skydraft.engines import probe as probing
from skydraft.engines.options import EngineOptions, RowProfile
from skydraft.engines.probe import probe, profile_of
from skydraft.engines.toy import ToyEngine

from .tiny_toy import toy

QUIET = "2026-11-21T08:30+00:00"


class WideRowsDiffer(ToyEngine):
    """From `width` rows on the last bits are others, as with other kernels, once the cache is `from_len` long."""

    width, from_len = 3, 0

    def forward(self, feeds: Any, *, want_logits: bool) -> Any:
        num_rows = sum(len(token_ids) for _, token_ids in feeds)
        differs = want_logits and num_rows >= self.width and feeds[0][0].length >= self.from_len
        rows = super().forward(feeds, want_logits=want_logits)
        return [np.nextafter(row, np.float32(9)) for row in rows] if differs else rows


class ThreeRowsDiffer(WideRowsDiffer):
    def forward(self, feeds: Any, *, want_logits: bool) -> Any:
        self.width = 3 if sum(len(token_ids) for _, token_ids in feeds) == 3 else 99
        return super().forward(feeds, want_logits=want_logits)


@pytest.mark.parametrize("context_len", [16, 17, 31, 32, 100, 2000])
def test_probing_finds_how_many_rows_are_bit_equal(context_len: int) -> None:
    profile = probe(toy(context_len=context_len))
    assert profile.invariant_rows == len(profile.forward_ms) == 8 and min(profile.forward_ms) >= 0
    assert abs(datetime.now(UTC) - datetime.fromisoformat(profile.date)) < timedelta(minutes=2)
    assert probe(toy(ThreeRowsDiffer, context_len=context_len)).invariant_rows == 2  # four are equal again: no help
    assert probe(toy(WideRowsDiffer, context_len=context_len)).invariant_rows == 2


@pytest.mark.parametrize(
    ("limit", "value", "expected"), [("is_full_precision", False, (1, 8)), ("max_output_rows", 5, (5, 5))]
)
def test_sixteen_bits_are_not_compared_and_no_forward_is_too_wide(limit: str, value: Any, expected: Any) -> None:
    engine = toy(context_len=2000)
    setattr(engine, limit, value)
    profile = probe(engine)
    assert (profile.invariant_rows, len(profile.forward_ms)) == expected


class Clock:
    """Time in which the n-th forward takes `forward_ms(n)`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, forward_ms: Callable[[int], float]) -> None:
        self.now, self.num_forwards = 0.0, 0
        forward = ToyEngine.forward

        def timed(engine: ToyEngine, feeds: Any, *, want_logits: bool) -> Any:
            if want_logits:
                self.now += forward_ms(self.num_forwards) / 1e3
                self.num_forwards += 1
            return forward(engine, feeds, want_logits=want_logits)

        monkeypatch.setattr(ToyEngine, "forward", timed)
        monkeypatch.setattr(probing, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(probing, "load_average", lambda: 0.0)


@pytest.mark.parametrize("quiet", [0, 1, 2])
def test_two_busy_moments_of_three_leave_no_mark(quiet: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward takes 50 ms while the machine is busy, else 1 ms; each row count is timed once in each moment."""
    clock = Clock(monkeypatch, lambda number: 1.0 if number < 9 or (number - 9) // 8 == quiet else 50.0)
    profile = probe(toy(context_len=32))
    assert set(profile.forward_ms) == {1.0} and clock.num_forwards == 1 + 8 + 3 * 8
    assert profile.spread == 1.0 and not profile.is_doubtful


@pytest.mark.parametrize(("ms", "num_lines"), [(19.0, 0), (21.0, 1)])
def test_a_line_says_so_where_it_takes_long(ms: float, num_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda number: ms)
    told: list[str] = []
    probe(toy(context_len=32), told.append)
    assert len(told) == num_lines and all("measuring toy" in line for line in told)


def test_a_slow_machine_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda number: 300.0)
    assert set(probe(toy(context_len=32)).forward_ms) == {300.0} and clock.num_forwards == 1 + 8 + 8


def test_times_that_vary_are_doubtful_but_one_of_them_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda number: 9.0 if number in (0, 4) else 1.0)
    assert probe(toy(context_len=32)).spread == 1.0
    Clock(monkeypatch, lambda number: 9.0 if number in (3, 4, 6) else 1.0)
    profile = probe(toy(context_len=32))
    assert profile.spread == 9.0 and profile.is_doubtful


@pytest.mark.parametrize(("load", "doubtful"), [(0.1, False), (0.7, False), (0.8, True), (4.0, True)])
def test_a_busy_machine_makes_a_profile_doubtful(load: float, doubtful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "load_average", lambda: load)
    profile = probe(toy(context_len=32))
    assert profile.load == load and (profile.is_doubtful or profile.spread > 2) == (doubtful or profile.spread > 2)


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return EngineOptions(profile_path=tmp_path / "cache" / "profiles.json")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[RowProfile]:
    """Profiles as they are measured, each with another number of rows."""
    profiles: list[RowProfile] = []
    monkeypatch.setattr(probing, "load_average", lambda: 0.0)

    def measure(engine: object, notify: object) -> RowProfile:
        load = probing.load_average()
        profiles.append(RowProfile(len(profiles) + 1, (1.5, 2.5), QUIET, load=load))
        return profiles[-1]

    monkeypatch.setattr(probing, "probe", measure)
    return profiles


def test_a_profile_is_measured_once_for_each_key(options: EngineOptions, measured: list[RowProfile]) -> None:
    for key, expected in (("a", 1), ("a", 1), ("b", 2), ("a", 1)):
        assert profile_of(toy(), key, options).invariant_rows == expected
    assert profile_of(toy(), "a", options) == measured[0]
    assert json.loads(options.profile_path.read_text())["a"] == {  # type: ignore[union-attr]
        "invariant_rows": 1, "forward_ms": [1.5, 2.5], "date": QUIET, "spread": 1.0, "load": 0.0
    }  # fmt: skip


def test_probing_again_replaces_what_was_remembered(options: EngineOptions, measured: list[RowProfile]) -> None:
    for key in "ab":
        profile_of(toy(), key, options)
    assert profile_of(toy(), "a", replace(options, probe_again=True)).invariant_rows == 3
    assert [profile_of(toy(), key, options).invariant_rows for key in "ab"] == [3, 2]


@pytest.mark.parametrize(
    ("load_then", "load_now", "old_minutes", "again"),
    [(0.1, 0.0, 60, False), (3.0, 0.2, 60, True), (3.0, 0.2, 1, False), (3.0, 2.0, 60, False), (0.9, 0.6, 60, False)],
)
def test_what_was_measured_on_a_busy_machine_is_measured_again_once_it_is_quiet(
    load_then: float, load_now: float, old_minutes: int, again: bool, options: EngineOptions,
    measured: list[RowProfile], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    date = (datetime.now(UTC) - timedelta(minutes=old_minutes)).isoformat()
    _write(options, {"a": {"invariant_rows": 8, "forward_ms": [9.0], "date": date, "spread": 1.1, "load": load_then}})
    monkeypatch.setattr(probing, "load_average", lambda: load_now)
    assert profile_of(toy(), "a", options).invariant_rows == (1 if again else 8)
    assert profile_of(toy(), "a", options).invariant_rows == (1 if again else 8)


def test_profiles_of_older_versions_are_measured_again(options: EngineOptions, measured: list[RowProfile]) -> None:
    old = {"invariant_rows": 8, "forward_ms": [9.0]}
    impossible = "0001-01-01T00:00+23:59"
    _write(options, {
        "a": old, "b": {**old, "date": QUIET}, "c": {**old, "date": "2026-11-20", "probed_len": 544},
        "d": {**old, "date": impossible, "load": 9.0},
    })  # fmt: skip
    assert profile_of(toy(), "b", options) == RowProfile(8, (9.0,), QUIET) and not measured
    assert [profile_of(toy(), key, options).invariant_rows for key in "acd"] == [1, 2, 3]


def _write(options: EngineOptions, profiles: dict[str, Any]) -> None:
    path = Path(options.profile_path or "")
    path.parent.mkdir()
    path.write_text(json.dumps(profiles))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"date": "2026-11-21", "forward_ms": [1]}}'])
def test_a_broken_file_counts_as_empty(text: str, options: EngineOptions, measured: list[RowProfile]) -> None:
    path = Path(options.profile_path or "")
    path.parent.mkdir()
    path.write_text(text)
    assert [profile_of(toy(), "a", options).invariant_rows for _ in range(2)] == [1, 1]


def test_without_a_path_nothing_is_remembered(measured: list[RowProfile], tmp_path: Path) -> None:
    assert [profile_of(toy(), "a", EngineOptions()).invariant_rows for _ in range(2)] == [1, 2]
    blocked = tmp_path / "file"
    blocked.touch()
    assert profile_of(toy(), "a", EngineOptions(profile_path=blocked / "profiles.json")).invariant_rows == 3
