"""Measures bits and times of forwards of n rows on this machine, with a short text, and stores the result."""

import math
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from skydraft.engines.base import Engine, Sequence
from skydraft.engines.llama.library import is_busy
from skydraft.engines.options import EngineOptions
from skydraft.engines.row_costs import RowProfile
from skydraft.files import read_file, write_whole

MAX_PROBED_ROWS = 16
_PROBED_LEN = 16  # tokens before the probed rows
_MAX_REPETITIONS = 3
_SLOW_STEP_S = 0.02  # the probe takes about fifty steps
_ENOUGH_S = 2.0  # no further repetition begins after that
_PROFILES = TypeAdapter(dict[str, RowProfile])  # the file of profiles, by key


def probe(engine: Engine, notify: Callable[[str], None] = lambda line: None) -> RowProfile:
    """Feed tokens one by one and n at a time; compare bits, measure times. `notify` gets a line if it is slow."""
    length = min(_PROBED_LEN, engine.context_len // 2)
    # Special tokens may need audio.
    plain_ids = np.setdiff1d(np.arange(engine.vocab.size), list(engine.vocab.special_ids))
    num_ids = min(length + MAX_PROBED_ROWS, engine.context_len)
    token_ids = np.random.default_rng(0).choice(plain_ids, num_ids).tolist()
    with closing(engine.open(token_ids[: length + 1])) as sequence:
        began = time.perf_counter()
        sequence.extend(token_ids[length : length + 1])
        if time.perf_counter() - began > _SLOW_STEP_S:
            notify(f"measuring {engine.name} on this machine: some seconds.")
        sequence.truncate(length)
        num_equal, times = _compare(sequence, token_ids[length:], min(num_ids - length, engine.max_output_rows))
    return RowProfile(num_equal if engine.is_full_precision else 1, times)


def _compare(sequence: Sequence, feed: list[int], max_rows: int) -> tuple[int, tuple[float, ...]]:
    """Return (most rows with the same bits as single rows, milliseconds for 1 to `max_rows` rows)."""
    length = sequence.length
    singly = [sequence.extend([token_id]).copy() for token_id in feed]
    forward_ms, num_equal, begin = [math.inf] * max_rows, max_rows, time.perf_counter()
    # Repetitions of one n are spread out, so that a busy moment spoils only one.
    for repetition in range(_MAX_REPETITIONS):
        if repetition > 1 and time.perf_counter() - begin > _ENOUGH_S:
            break
        # Multiples of four are cheapest per row, so they are measured again.
        for num_rows in (num for num in range(1, max_rows + 1) if not repetition or num < 4 or num % 4 == 0):
            sequence.truncate(length)
            began = time.perf_counter()
            rows = sequence.extend(feed[:num_rows])
            forward_ms[num_rows - 1] = min(forward_ms[num_rows - 1], (time.perf_counter() - began) * 1e3)
            if num_rows > 1 and not np.array_equal(rows, np.concatenate(singly[:num_rows])):
                num_equal = min(num_equal, num_rows - 1)
    return num_equal, tuple(round(ms, 3) for ms in forward_ms)


def cpu_model() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores"


def profile_of(engine: Engine, key: str, options: EngineOptions) -> RowProfile:
    """Return the profile stored under `key` in `options.profile_path`, or probe. A new profile is stored unless other
    processes are busy; then the next load probes again. The key has everything that could change the result: file,
    library, processor, threads."""
    path, key = options.profile_path, f"{key}|{MAX_PROBED_ROWS} rows"
    if path and (known := _read(path).get(key)):
        return known
    was_busy, profile = is_busy(), probe(engine, options.notify)
    if path and not was_busy and not is_busy():
        with suppress(OSError):  # with a read-only cache folder the next load probes again
            path.parent.mkdir(parents=True, exist_ok=True)
            # If two processes write at once, one of them probes again later.
            write_whole(path, _PROFILES.dump_json({**_read(path), key: profile}, indent=1))
    return profile


def _read(path: Path) -> dict[str, RowProfile]:
    with suppress(OSError, ValueError):
        return {key: each for key, each in _PROFILES.validate_json(read_file(path)).items() if each.is_sound}
    return {}
