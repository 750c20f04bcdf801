"""Probes: rows that are bit-equal near the beginning only, busy moments, and what is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
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


@pytest.mark.parametrize("quiet", [0, 1, 2])
def test_two_busy_moments_of_three_leave_no_mark(quiet: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward takes 50 ms while the machine is busy, else 1 ms; each row count is timed once in each moment."""
    clock = Clock(monkeypatch, lambda number: 1.0 if number < 9 or (number - 9) // 8 == quiet else 50.0)
    assert set(probe(toy(context_len=32)).forward_ms) == {1.0} and clock.num_forwards == 1 + 8 + 3 * 8


@pytest.mark.parametrize(("ms", "num_lines", "num_times"), [(19.0, 0, 3), (21.0, 1, 3), (300.0, 1, 1)])
def test_a_slow_machine_is_told_of_and_timed_less_often(
    ms: float, num_lines: int, num_times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = Clock(monkeypatch, lambda number: ms), list[str]()
    assert set(probe(toy(context_len=32), told.append).forward_ms) == {ms}
    assert clock.num_forwards == 1 + 8 + num_times * 8
    assert len(told) == num_lines and all("measuring toy" in line for line in told)


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return EngineOptions(profile_path=tmp_path / "cache" / "profiles.json")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[RowProfile]:
    """Profiles as they are measured, each with another number of rows."""
    profiles: list[RowProfile] = []

    def measure(engine: object, notify: object) -> RowProfile:
        profiles.append(RowProfile(len(profiles) + 1, (1.5, 2.5)))
        return profiles[-1]

    monkeypatch.setattr(probing, "probe", measure)
    return profiles


def test_a_profile_is_measured_once_for_each_key_or_again_on_demand(
    options: EngineOptions, measured: list[RowProfile]
) -> None:
    for key, again, expected in (
        ("a", False, 1), ("a", False, 1), ("b", False, 2), ("a", False, 1), ("a", True, 3), ("a", False, 3),
        ("b", False, 2),
    ):  # fmt: skip
        assert profile_of(toy(), key, replace(options, probe_again=again)).invariant_rows == expected
    assert profile_of(toy(), "a", options) == measured[2]


def test_profiles_of_older_versions_are_read(options: EngineOptions, measured: list[RowProfile]) -> None:
    old = {"invariant_rows": 8, "forward_ms": [9.0], "date": "2026-11-21T08:30+00:00", "spread": 1.0, "load": 0.0}
    _write(options, json.dumps({"a": old}))
    assert profile_of(toy(), "a", options) == RowProfile(8, (9.0,)) and not measured


def _write(options: EngineOptions, text: str) -> None:
    path = Path(options.profile_path or "")
    path.parent.mkdir()
    path.write_text(text)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"invariant_rows": 1, "forward_ms": []}}'])
def test_a_broken_file_counts_as_empty(text: str, options: EngineOptions, measured: list[RowProfile]) -> None:
    _write(options, text)
    assert [profile_of(toy(), "a", options).invariant_rows for _ in range(2)] == [1, 1]


def test_without_a_path_nothing_is_remembered(measured: list[RowProfile], tmp_path: Path) -> None:
    assert [profile_of(toy(), "a", EngineOptions()).invariant_rows for _ in range(2)] == [1, 2]
    blocked = tmp_path / "file"
    blocked.touch()
    assert profile_of(toy(), "a", EngineOptions(profile_path=blocked / "profiles.json")).invariant_rows == 3
