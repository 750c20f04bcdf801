"""Counter-based Gumbel noise: a pure hash of (seed, position, token id), so that draft and target share it and any
position can be computed again (Gumbel coupling, arXiv 2408.07978). There is no random state.

The hash is SplitMix64 (public domain). Where rows lie on another device it is computed there in wrapping int64, which
has the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from skydraft.engines.rows import namespace_of, on_host

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# The noise has 53 bits: -log(-log(u)) with u in [2^-54, 1 - 2^-53], so nothing is noisier than this.
MAX_NOISE, MIN_NOISE = 37.43, -3.63

_MASK = (1 << 64) - 1
_STEP, _MIX_A, _MIX_B = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_HASH_CHUNK = 8192  # temporaries stay in the processor's cache: 4 times faster than whole vocabularies
_DEVICE_CHUNK = 1 << 22  # words hashed at once on another device: 32 MB


def gumbel_noise(seed: int, position: int, token_ids: Ids) -> Floats:
    """Standard Gumbel noise of tokens at a position, [len(token_ids)]: a pure function of its arguments."""
    words: Words = np.empty(len(token_ids), np.uint64)
    for start in range(0, len(words), _HASH_CHUNK):
        chunk = token_ids[start : start + _HASH_CHUNK].astype(np.uint64)
        chunk += np.uint64(1)
        chunk *= np.uint64(_STEP)
        words[start : start + _HASH_CHUNK] = _finished(_mixed(chunk, _key(seed, position)))
    return _to_gumbel(words)


def noisier_than(noise: float, seed: int, position: int, num_ids: int) -> Ids:
    """Ids below `num_ids` whose noise may reach `noise`: all that do, and one in 10^9 beside them, ascending."""
    key, lowest = _key(seed, position), np.uint64(_lowest_word(noise))
    counters, found = _counters(num_ids), []
    scratch: Words = np.empty(min(_HASH_CHUNK, num_ids), np.uint64)
    for start in range(0, num_ids, _HASH_CHUNK):
        chunk = scratch[: min(_HASH_CHUNK, num_ids - start)]
        chunk[:] = counters[start : start + _HASH_CHUNK]
        # The last shift of the hash leaves its upper 31 bits alone, and those decide nearly always.
        found.append(np.flatnonzero(_mixed(chunk, key) >= lowest) + start)
    return np.concatenate(found)


def noisier_on_device(noises: list[float], seeds: list[int], positions: list[int], like: Any) -> list[Ids]:
    """`noisier_than` for each row of `like` [num_rows, vocab], computed where that lies."""
    xp, device = namespace_of(like), array_api_compat.device(like)
    num_rows, num_ids = like.shape
    keys = [_signed(_key(seed, position)) for seed, position in zip(seeds, positions, strict=True)]
    # Unsigned words compare as signed ones do with the upper bit turned over.
    lowest = [_signed(_lowest_word(noise) ^ 1 << 63) for noise in noises]
    keys, lowest = (xp.asarray(words, dtype=xp.int64, device=device)[:, None] for words in (keys, lowest))
    found: list[list[Ids]] = [[] for _ in range(num_rows)]
    width = max(_DEVICE_CHUNK // num_rows, 1)
    for start in range(0, num_ids, width):
        ids = xp.arange(start, min(start + width, num_ids), dtype=xp.int64, device=device)[None]
        words = _mixed_signed((ids + 1) * _signed(_STEP) + keys)
        rows, columns = xp.nonzero((words ^ _signed(1 << 63)) >= lowest)
        rows, columns = on_host(rows), on_host(columns)
        for row in range(num_rows) if len(rows) else ():
            found[row].append(columns[rows == row] + start)
    return [np.concatenate([np.empty(0, np.int64), *each]) for each in found]


def _lowest_word(noise: float) -> int:
    """What the hash of a token is at least, but for its lower 33 bits, where its noise is at least `noise`."""
    threshold = float(np.exp(-np.exp(-noise))) * (1 - 1e-9)
    return int(threshold * 2.0**64) >> 33 << 33


@lru_cache(maxsize=2)
def _counters(num_ids: int) -> Words:
    counters: Words = np.arange(1, num_ids + 1, dtype=np.uint64) * np.uint64(_STEP)
    counters.flags.writeable = False
    return counters


def _mixed(words: Words, key: int) -> Words:
    """SplitMix64 but for its last shift, in place."""
    words += np.uint64(key)
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(_MIX_A)
    words ^= np.right_shift(words, np.uint64(27), out=shifted)
    words *= np.uint64(_MIX_B)
    return words


def _finished(words: Words) -> Words:
    words ^= words >> np.uint64(31)
    return words


def _mixed_signed(words: Any) -> Any:
    """`_mixed` of int64, whose right shift draws the sign along."""
    words = (words ^ ((words >> 30) & (1 << 34) - 1)) * _signed(_MIX_A)
    return (words ^ ((words >> 27) & (1 << 37) - 1)) * _signed(_MIX_B)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _key(seed: int, position: int) -> int:
    return _mix_int(_mix_int(seed & _MASK) + position)


def _mix_int(word: int) -> int:
    word = (word + _STEP) & _MASK
    word = ((word ^ (word >> 30)) * _MIX_A) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_B) & _MASK
    return word ^ (word >> 31)


def _to_gumbel(words: Words) -> Floats:
    # The largest word would round up to 1 and give infinite noise.
    uniform = np.minimum(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)
    gumbel: Floats = -np.log(-np.log(uniform))
    return gumbel
