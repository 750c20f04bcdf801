"""Measures what forwards of n rows give and cost on this machine, and remembers it beside the models.

It takes seconds, with a short text. `exactness` compares longer ones where they occur.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from filelock import FileLock
from pydantic import TypeAdapter

from skydraft.config import num_cores
from skydraft.engines.base import Engine, Sequence
from skydraft.engines.options import EngineOptions, RowProfile, tell_nobody
from skydraft.files import read_file, write_whole

MAX_PROBED_ROWS = 8
_PROBED_LEN = 16  # tokens before the probed rows
_MAX_REPETITIONS = 3
_SLOW_STEP_S = 0.02  # the probe takes fifty steps or so
_ENOUGH_S = 2.0  # no further repetition begins after that
_MIN_AGE = timedelta(minutes=5)  # of a doubtful profile that is measured again
_LOCK_S = 5.0
_PROFILES = TypeAdapter(dict[str, RowProfile])  # the file of profiles, by key


def probe(engine: Engine, notify: Callable[[str], None] = tell_nobody) -> RowProfile:
    """Feed the same tokens one by one and n at a time; compare their bits and take the times.

    `notify` gets a line if it takes a second or more.
    """
    length = min(_PROBED_LEN, engine.context_len // 2)
    # Special tokens may stand for audio that is not there.
    plain_ids = np.setdiff1d(np.arange(engine.vocab.size), list(engine.vocab.special_ids))
    num_ids = min(length + MAX_PROBED_ROWS, engine.context_len)
    token_ids = np.random.default_rng(0).choice(plain_ids, num_ids).tolist()
    load = load_average()
    with closing(engine.open(token_ids[: length + 1])) as sequence:
        began = time.perf_counter()
        sequence.extend(token_ids[length : length + 1])
        if time.perf_counter() - began > _SLOW_STEP_S:
            notify(f"measuring {engine.name} on this machine: once, some seconds.")
        sequence.truncate(length)
        profile = _compare(sequence, token_ids[length:], min(num_ids - length, engine.max_output_rows))
    if not engine.is_full_precision:
        profile = replace(profile, invariant_rows=1)
    return replace(profile, date=datetime.now(UTC).isoformat(timespec="minutes"), load=round(load, 2))


def _compare(sequence: Sequence, feed: list[int], max_rows: int) -> RowProfile:
    """Times of forwards of 1 to `max_rows` rows, and up to which their bits are those of one row at a time."""
    length, singly, single_ms = sequence.length, [], []
    for token_id in feed:
        began = time.perf_counter()
        singly.append(sequence.extend([token_id]).copy())
        single_ms.append((time.perf_counter() - began) * 1e3)
    single_ms.sort()
    forward_ms, invariant_rows, begin = [math.inf] * max_rows, max_rows, time.perf_counter()
    # Not all repetitions of one n together: a busy moment should spoil one of them only.
    for repetition in range(_MAX_REPETITIONS):
        if repetition and time.perf_counter() - begin > _ENOUGH_S:
            break
        for num_rows in range(1, max_rows + 1):
            sequence.truncate(length)
            began = time.perf_counter()
            rows = sequence.extend(feed[:num_rows])
            forward_ms[num_rows - 1] = min(forward_ms[num_rows - 1], (time.perf_counter() - began) * 1e3)
            if num_rows > 1 and not np.array_equal(rows, np.concatenate(singly[:num_rows])):
                invariant_rows = min(invariant_rows, num_rows - 1)
    # A row more does not save time: what took longer met a busy moment.
    times = np.minimum.accumulate(forward_ms[::-1])[::-1].round(3)
    spread = single_ms[-2] / max(single_ms[0], 1e-3) if len(single_ms) > 1 else 1.0
    return RowProfile(invariant_rows, tuple(times.tolist()), spread=round(spread, 2))


def load_average() -> float:
    """How many processes have wanted a core in the last minute, for each core; 0 where the system does not say."""
    return os.getloadavg()[0] / num_cores() if hasattr(os, "getloadavg") else 0.0


def cpu_model() -> str:
    """The processor's name where the system tells it, else the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{os.cpu_count()} cores"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def profile_of(engine: Engine, key: str, options: EngineOptions) -> RowProfile:
    """The profile under `key` in the JSON file at `options.profile_path`; if there is none, probe and add it.

    The key must name everything that could change the answer: file, library, processor, threads, cache types. One that
    was measured while the machine was busy is measured again once it is not. An unreadable file counts as empty.
    """
    path = options.profile_path
    known = _read(path).get(key) if path else None
    if known and not options.probe_again and not _is_due(known):
        return known
    profile = probe(engine, options.notify)
    if path:
        _remember(path, key, profile)
    return profile


def _is_due(known: RowProfile) -> bool:
    is_old = datetime.now(UTC) - datetime.fromisoformat(known.date) > _MIN_AGE
    return known.is_doubtful and is_old and load_average() < max(known.load, 1.0) / 2


def _read(path: Path) -> dict[str, RowProfile]:
    try:
        known = _PROFILES.validate_json(read_file(path))
    except (OSError, ValueError):
        return {}
    return {key: profile for key, profile in known.items() if profile.forward_ms and _has_time(profile)}


def _has_time(profile: RowProfile) -> bool:
    """Whether it says when it was measured; those of older versions say the day."""
    try:
        date = datetime.fromisoformat(profile.date)
        return date.tzinfo is not None and date.astimezone(UTC) < datetime.max.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return False


def _remember(path: Path, key: str, profile: RowProfile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_S):  # its Timeout is an OSError
            write_whole(path, _PROFILES.dump_json({**_read(path), key: profile}, indent=1))
    except OSError:
        return  # a read-only cache folder costs a probe at the next start, nothing else
