"""Probes: rows that are bit-equal near the beginning only, busy moments, and what is remembered."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
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


@pytest.mark.parametrize("context_len", [16, 17, 31, 32, 100, 559, 560, 600, 2000])
def test_probing_finds_how_many_rows_are_bit_equal(context_len: int) -> None:
    profile = probe(toy(context_len=context_len))
    assert profile.invariant_rows == len(profile.forward_ms) == 8 and min(profile.forward_ms) > 0
    assert profile.probed_len == max(context_len - 16, context_len // 2)
    assert profile.date == date.today().isoformat()
    assert probe(toy(ThreeRowsDiffer, context_len=context_len)).invariant_rows == 2  # four are equal again: no help
    assert probe(toy(WideRowsDiffer, context_len=context_len)).invariant_rows == 2


@pytest.mark.parametrize(("from_len", "expected"), [(16, 3), (544, 3), (1984, 3), (1993, 8)])
def test_rows_that_differ_further_on_only(from_len: int, expected: int) -> None:
    engine = toy(WideRowsDiffer, context_len=2000)
    engine.width, engine.from_len = 4, from_len
    profile = probe(engine)
    assert (profile.invariant_rows, len(profile.forward_ms), profile.probed_len) == (expected, 8, 1984)


def test_what_takes_too_long_is_not_probed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy(context_len=2000)
    engine.max_batch_rows = 100
    monkeypatch.setattr(probing, "_MAX_PREFILL_MS", 0.0)
    assert probe(engine).probed_len == 600  # to the end of the part that must be
    ticks = iter(range(10**6))
    monkeypatch.setattr("skydraft.engines.prefix_cache.time.perf_counter", lambda: next(ticks) / 1e3)  # 1 ms a part
    monkeypatch.setattr(probing, "_MAX_PREFILL_MS", 10.5)
    assert probe(engine).probed_len == 900  # after 11 parts, which end at 16, 100, 200, ... 500, 544, 600, ...


@pytest.mark.parametrize(
    ("limit", "value", "expected"), [("is_full_precision", False, (1, 8, 16)), ("max_output_rows", 5, (5, 5, 1984))]
)
def test_sixteen_bits_are_not_compared_and_no_forward_is_too_wide(limit: str, value: Any, expected: Any) -> None:
    engine = toy(context_len=2000)
    setattr(engine, limit, value)
    profile = probe(engine)
    assert (profile.invariant_rows, len(profile.forward_ms), profile.probed_len) == expected


@pytest.mark.parametrize("quiet", [0, 1, 2])
def test_two_busy_moments_of_three_leave_no_mark(quiet: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward takes 50 ms while the machine is busy, else 1 ms; each row count is timed once in each moment."""
    engine, clock, num_timed = toy(context_len=32), 0.0, 0

    def perf_counter() -> float:
        nonlocal clock, num_timed
        num_timed += 1
        clock += 1e-3 if (num_timed - 1) // 16 == quiet else 5e-2  # 8 row counts, two calls each
        return clock

    monkeypatch.setattr(ToyEngine, "prefill", lambda self, sequence, prompt: False)  # which takes times of its own
    monkeypatch.setattr("skydraft.engines.probe.time.perf_counter", perf_counter)
    assert set(probe(engine).forward_ms) == {1.0} and num_timed == 48


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return EngineOptions(profile_path=tmp_path / "cache" / "profiles.json")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[RowProfile]:
    """Profiles as they are measured, each with another number of rows."""
    profiles: list[RowProfile] = []

    def measure(engine: object) -> RowProfile:
        profiles.append(RowProfile(len(profiles) + 1, (1.5, 2.5), "2026-11-21", 544))
        return profiles[-1]

    monkeypatch.setattr(probing, "probe", measure)
    return profiles


def test_a_profile_is_measured_once_for_each_key(options: EngineOptions, measured: list[RowProfile]) -> None:
    for key, expected in (("a", 1), ("a", 1), ("b", 2), ("a", 1)):
        assert profile_of(toy(), key, options).invariant_rows == expected
    assert profile_of(toy(), "a", options) == measured[0]
    assert json.loads(options.profile_path.read_text())["a"] == {  # type: ignore[union-attr]
        "invariant_rows": 1, "forward_ms": [1.5, 2.5], "date": "2026-11-21", "probed_len": 544
    }  # fmt: skip


def test_probing_again_replaces_what_was_remembered(options: EngineOptions, measured: list[RowProfile]) -> None:
    for key in "ab":
        profile_of(toy(), key, options)
    assert profile_of(toy(), "a", replace(options, probe_again=True)).invariant_rows == 3
    assert [profile_of(toy(), key, options).invariant_rows for key in "ab"] == [3, 2]


def test_profiles_without_a_date_are_measured_again(options: EngineOptions, measured: list[RowProfile]) -> None:
    path = Path(options.profile_path or "")
    path.parent.mkdir()
    old = {"invariant_rows": 8, "forward_ms": [9.0]}
    path.write_text(json.dumps({"a": old, "b": {**old, "date": "2026-11-20", "probed_len": 544}}))
    assert profile_of(toy(), "b", options) == RowProfile(8, (9.0,), "2026-11-20", 544) and not measured
    assert profile_of(toy(), "a", options).invariant_rows == 1
    assert set(json.loads(path.read_text())) == {"a", "b"}


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
