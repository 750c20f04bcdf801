"""Measures what forwards of n rows give and cost on this machine, and remembers it beside the models.

Kernels may take another path for another batch shape, or for a longer KV cache (llama.cpp splits the keys of a
single row from 512 cells on), so both are probed: bit-equality at a short and at a longer length.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skydraft.engines.base import Engine, RowProfile, Rows

MAX_PROBED_ROWS = 8
_SHORT_LEN, _LONG_LEN = 16, 544  # tokens; the second is past the first 512 cells of a KV cache
_NUM_TOKENS = MAX_PROBED_ROWS
PROBED_LEN = _LONG_LEN + _NUM_TOKENS  # a shorter context is not probed at the longer length


def to_numpy(rows: Rows) -> npt.NDArray[np.floating]:
    """A copy of the rows in host memory, numpy, same precision (bfloat16 becomes float32)."""
    if isinstance(rows, np.ndarray):
        return rows.copy()
    return np.asarray(rows.detach().float().cpu().numpy())


def probe(engine: Engine, *, max_rows: int = MAX_PROBED_ROWS) -> RowProfile:
    """Feed the same tokens one by one and n at a time, at two lengths; compare bits and take times."""
    forward_ms, invariant_rows = _probe_at(engine, min(_SHORT_LEN, engine.context_len // 2), max_rows)
    if invariant_rows > 1 and engine.context_len >= PROBED_LEN:
        invariant_rows = min(invariant_rows, _probe_at(engine, _LONG_LEN, invariant_rows)[1])
    return RowProfile(invariant_rows, tuple(forward_ms))


def _probe_at(engine: Engine, length: int, max_rows: int) -> tuple[list[float], int]:
    rng = np.random.default_rng(0)
    # Special tokens may stand for audio that is not there.
    plain_ids = np.setdiff1d(np.arange(engine.vocab.size), list(engine.vocab.special_ids))
    token_ids = rng.choice(plain_ids, length + _NUM_TOKENS).tolist()
    sequence = engine.open(token_ids[: length + 1])
    feed = token_ids[length:]
    singly = [to_numpy(sequence.extend([token_id])) for token_id in feed]  # also warms the engine up
    forward_ms, invariant_rows, unbroken = [], 1, True
    for num_rows in range(1, max_rows + 1):
        times, equal = [], True
        for start in (0, len(feed) - num_rows):
            sequence.truncate(length)
            for token_id in feed[:start]:
                sequence.extend([token_id])
            began = time.perf_counter()
            rows = to_numpy(sequence.extend(feed[start : start + num_rows]))
            times.append((time.perf_counter() - began) * 1e3)
            equal &= np.array_equal(rows, np.concatenate(singly[start : start + num_rows]))
        forward_ms.append(round(statistics.median(times), 3))
        unbroken &= equal
        invariant_rows = num_rows if unbroken else invariant_rows
    sequence.close()
    return forward_ms, invariant_rows


def cpu_model() -> str:
    """The processor's name where the system tells it, else the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{os.cpu_count()} cores"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def remembered(key: str, path: Path | None, measure: Callable[[], RowProfile]) -> RowProfile:
    """The profile stored under `key` in the JSON file at `path`, measured and stored if it is not there.

    The key must name everything that could change the answer: file, library, processor, threads, cache types.
    An unreadable file counts as empty; it is a cache, never the truth.
    """
    if path is None:
        return measure()
    known = _read(path)
    if key not in known:
        profile = measure()
        known = {
            **_read(path),
            key: {"invariant_rows": profile.invariant_rows, "forward_ms": profile.forward_ms},
        }
        _write(path, known)
        return profile
    return RowProfile(known[key]["invariant_rows"], tuple(known[key]["forward_ms"]))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        known = json.loads(path.read_text())
        return {k: v for k, v in known.items() if isinstance(v["invariant_rows"], int) and v["forward_ms"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(path: Path, known: object) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as scratch:
            json.dump(known, scratch, indent=1)
        os.replace(scratch.name, path)
    except OSError:
        return  # a read-only cache folder costs a probe at the next start, nothing else
