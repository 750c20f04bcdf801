"""Measures what forwards of n rows give and cost on this machine, and remembers it beside the models.

Kernels may take another path for another batch shape, or for a longer KV cache (llama.cpp splits the keys of a single
row from 512 cells on), so bit-equality is probed at three lengths: short, past those 512, and near the context's end.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import closing
from datetime import date
from itertools import accumulate, product
from pathlib import Path

import numpy as np
from filelock import FileLock
from pydantic import TypeAdapter

from skydraft.engines.base import Engine, Sequence, on_host
from skydraft.engines.options import EngineOptions, RowProfile
from skydraft.files import write_whole

MAX_PROBED_ROWS = 8
_SHORT_LEN, _LONG_LEN = 16, 544  # tokens; the second is past the first 512 cells of a KV cache
_MAX_PREFILL_MS = 20_000.0  # after so much prefill, the third length is where it has come to
_NUM_REPETITIONS = 3
_LOCK_S = 5.0
_PROFILES = TypeAdapter(dict[str, RowProfile])  # the file of profiles, by key


def probe(engine: Engine) -> RowProfile:
    """Feed the same tokens one by one and n at a time; compare bits at three lengths and take times at the first."""
    end = max(engine.context_len - 16, engine.context_len // 2)
    # Special tokens may stand for audio that is not there.
    plain_ids = np.setdiff1d(np.arange(engine.vocab.size), list(engine.vocab.special_ids))
    token_ids = np.random.default_rng(0).choice(plain_ids, end + MAX_PROBED_ROWS).tolist()
    max_rows = min(MAX_PROBED_ROWS, engine.max_output_rows)
    invariant_rows, forward_ms = max_rows if engine.is_full_precision else 1, list[float]()
    with closing(engine.begin(token_ids[: end + 1])) as sequence:
        for length in sorted({min(length, end) for length in (_SHORT_LEN, _LONG_LEN, end)}):
            if forward_ms and invariant_rows == 1:
                break
            while engine.prefill(sequence, token_ids[: length + 1]):
                if length > _LONG_LEN and sequence.prefill_cost.forward_ms > _MAX_PREFILL_MS:
                    break
            feed = token_ids[sequence.length :][:MAX_PROBED_ROWS]
            times, equal_rows = _compare(sequence, feed, invariant_rows if forward_ms else max_rows)
            forward_ms, invariant_rows = forward_ms or times, min(invariant_rows, equal_rows)
        # A row more does not save time: what took longer met a busy moment.
        forward_ms = list(accumulate(reversed(forward_ms), min))[::-1]
        return RowProfile(invariant_rows, tuple(forward_ms), date.today().isoformat(), sequence.length)


def _compare(sequence: Sequence, feed: list[int], max_rows: int) -> tuple[list[float], int]:
    """(best time of a forward of n rows for each n, n up to which the rows of `feed` have the bits of one at a time).

    Leaves the sequence as it was.
    """
    length = sequence.length
    singly = [on_host(sequence.extend([token_id])).copy() for token_id in feed]  # also warms the engine up
    forward_ms, invariant_rows = [math.inf] * max_rows, max_rows
    # Not all repetitions of one n together: a busy moment should spoil one of them only.
    for repetition, num_rows in product(range(_NUM_REPETITIONS), range(1, max_rows + 1)):
        start = (len(feed) - num_rows) * repetition // (_NUM_REPETITIONS - 1)
        sequence.truncate(length)
        for token_id in feed[:start]:
            sequence.extend([token_id])
        began = time.perf_counter()
        rows = on_host(sequence.extend(feed[start : start + num_rows]))
        forward_ms[num_rows - 1] = min(forward_ms[num_rows - 1], round((time.perf_counter() - began) * 1e3, 3))
        if num_rows > 1 and not np.array_equal(rows, np.concatenate(singly[start : start + num_rows])):
            invariant_rows = min(invariant_rows, num_rows - 1)
    sequence.truncate(length)
    return forward_ms, invariant_rows


def cpu_model() -> str:
    """The processor's name where the system tells it, else the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{os.cpu_count()} cores"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def profile_of(engine: Engine, key: str, options: EngineOptions) -> RowProfile:
    """The profile under `key` in the JSON file at `options.profile_path`; if there is none, probe and add it.

    The key must name everything that could change the answer: file, library, processor, threads, cache types, context.
    An unreadable file counts as empty.
    """
    path = options.profile_path
    if path and not options.probe_again and (known := _read(path).get(key)):
        return known
    profile = probe(engine)
    if path:
        _remember(path, key, profile)
    return profile


def _read(path: Path) -> dict[str, RowProfile]:
    try:
        known = _PROFILES.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    # Those without a date were not probed at all three lengths.
    return {key: profile for key, profile in known.items() if profile.date and profile.forward_ms}


def _remember(path: Path, key: str, profile: RowProfile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_S):  # its Timeout is an OSError
            write_whole(path, _PROFILES.dump_json({**_read(path), key: profile}, indent=1))
    except OSError:
        return  # a read-only cache folder costs a probe at the next start, nothing else
