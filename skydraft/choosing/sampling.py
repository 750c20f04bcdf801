"""From edited logits to a token: temperature once, top-k, top-p, min-p, then Gumbel-max with counter-based noise.

Temperature and all later steps run in float64 on the host, on the tokens that could win: those near the top, and, where
only the temperature is set, others with rare high noise. A bound on the weight of all other tokens proves the answer;
where it cannot, `sample_whole` reads the whole row. That is the definition; both give the same token.

The noise is a pure hash of (seed, position, token id), so that draft and target share it and any position can be
computed again (Gumbel coupling, arXiv 2408.07978). The hash is SplitMix64 (public domain); on another device it is
computed in wrapping int64, which has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from skydraft.config import DecodingParams
from skydraft.engines.rows import namespace_of, on_host
from skydraft.errors import EngineError

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# The noise has 53 bits: -log(-log(u)) with u in [2^-54, 1 - 2^-53], so nothing is noisier than this.
MAX_NOISE, MIN_NOISE = 37.43, -3.63

_MASK = (1 << 64) - 1
_STEP, _MIX_A, _MIX_B = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_HASH_CHUNK = 8192  # temporaries stay in the processor's cache: 4 times faster than whole vocabularies
_DEVICE_CHUNK = 1 << 22  # words hashed at once on another device: 32 MB
# A logit that is further than this below the best one (in units of the temperature) can never win.
_NOISE_SPAN = MAX_NOISE - MIN_NOISE
_NEAR = 12.0  # nats below the best; these tokens are read first
_EDGE = 1e-6  # nats; tokens this close to the end of those may count as in or out
_SUMMED = 1e-10  # relative; float64 sums of a vocabulary in another order differ by less
_LIGHT = 1 + 1e-4  # relative; float32 weights and their sums are off by less than a quarter of it
_SMALL = 2048  # tokens; a smaller vocabulary is read as a whole, which is as fast
_GROUPED = 16  # tokens of a row whose highest stands for them


@dataclass(frozen=True, slots=True)
class Near:
    """The tokens of a row that are at most `reach` nats below its top, and some below those: ids ascending, [num_near].

    All other tokens together weigh between the two of `rest`, where the top weighs 1.
    """

    token_ids: Ids
    scores: npt.NDArray[Any]
    reach: float
    rest: tuple[float, float]


def sample(scores: npt.NDArray[Any], params: DecodingParams, position: int) -> int:
    """The token for `position` from edited logits [vocab], numpy, at a temperature above 0.

    Raises EngineError where one of them is not a number.
    """
    near = near_top(scores, params) if len(scores) >= _SMALL else None
    return _decide(scores, near, params, position)


def no_number() -> EngineError:
    """The error for logits that are NaN."""
    return EngineError("The model gave logits that are not numbers.", hint="Fetch the model again.")


def sample_on_device(rows: Any, params: Seq[DecodingParams], positions: Seq[int]) -> list[int]:
    """`sample` for rows [num_rows, vocab] on another device; only logits near the top are copied to the host."""
    near = near_top_on_device(rows, params)
    lucky: dict[int, Ids] = {}
    plain = [row for row, one in enumerate(near) if one is not None and _is_plain(params[row])]
    if plain:
        noises = [_noise_to_win(one, params[row], positions[row]) for row in plain if (one := near[row])]
        seeds, places = [params[row].seed for row in plain], [positions[row] for row in plain]
        lucky = dict(zip(plain, noisier_on_device(noises, seeds, places, rows[: len(plain)]), strict=True))
    return [
        _best_of_all(rows[row], one, lucky[row], params[row], positions[row])
        if row in lucky and (one := near[row])
        else _decide(rows[row], near[row], params[row], positions[row])
        for row in range(len(near))
    ]


def _is_plain(params: DecodingParams) -> bool:
    return not params.top_k and params.top_p == 1 and params.min_p == 0


def _decide(row: Any, near: Near | None, params: DecodingParams, position: int) -> int:
    """The token, from the logits near the top if they are enough."""
    if near is not None and _is_plain(params):
        noise = _noise_to_win(near, params, position)
        return _best_of_all(row, near, noisier_than(noise, params.seed, position, len(row)), params, position)
    token_id = _winner(near, params, position, len(row)) if near is not None else None
    return sample_whole(on_host(row), params, position) if token_id is None else token_id


def _winner(near: Near, params: DecodingParams, position: int, vocab_size: int) -> int | None:
    """The token where a filter is set, or None where the logits near the top do not decide."""
    scores = near.scores
    if 0 < params.top_k < vocab_size:
        if len(scores) < params.top_k:
            return None
        kept = scores >= np.partition(scores, -params.top_k)[-params.top_k]
        chosen = _nucleus(near.token_ids[kept], _logs(scores[kept], params), params)
        return _best(*chosen, params.seed, position)[0]
    log_weights = _logs(scores, params)
    may_win = log_weights >= log_weights.max() + max(_log_min_p(params), _EDGE - near.reach)
    if _log_min_p(params) < 2 * _EDGE - near.reach and params.top_p == 1:
        return None
    if params.top_p == 1:
        return _best(near.token_ids[may_win], log_weights[may_win], params.seed, position)[0]
    return _winner_of_nucleus(near, log_weights, may_win, params, position)


def _log_min_p(params: DecodingParams) -> float:
    return float(np.log(params.min_p)) if params.min_p > 0 else -math.inf


def _winner_of_nucleus(
    near: Near, log_weights: Floats, may_win: Any, params: DecodingParams, position: int
) -> int | None:
    """The best token among those that less than `top_p` of all mass precedes.

    Sums in another order than in the definition are off by up to `_SUMMED`, and the mass of lower tokens is only known
    within `near.rest`; None where the answer depends on that.
    """
    weights = np.exp(log_weights - log_weights.max())
    mass = float(weights.sum())
    surely_in = params.top_p * (mass + near.rest[0]) * (1 - _SUMMED)
    surely_out = params.top_p * (mass + near.rest[1]) * (1 + _SUMMED)
    # Otherwise tokens that are not looked at could belong to the nucleus.
    if weights[weights >= math.exp(2 * _EDGE - near.reach)].sum() < surely_out:
        return None
    while may_win.any():
        ids = np.flatnonzero(may_win)
        values = log_weights[ids] + gumbel_noise(params.seed, position, near.token_ids[ids])
        best = ids[values == values.max()]
        index = int(best[weights[best].argmax()])
        before = weights[weights > weights[index]].sum() + weights[:index][weights[:index] == weights[index]].sum()
        if before < surely_in:
            return int(near.token_ids[index])
        if before < surely_out:
            return None
        may_win[index] = False
        may_win &= weights >= weights[index]
    return None


def _noise_to_win(near: Near, params: DecodingParams, position: int) -> float:
    """The noise that a token below those near the top needs to beat them."""
    log_weights = _logs(near.scores, params)
    return float(near.reach - log_weights.max() + _best(near.token_ids, log_weights, params.seed, position)[1])


def _best_of_all(row: Any, near: Near, lucky: Ids, params: DecodingParams, position: int) -> int:
    """argmax of scores / T + noise over the whole vocabulary, from the tokens near the top and the `lucky` ones.

    Only one token in e^_NEAR has noise that makes it lucky.
    """
    best_id, best = _best(near.token_ids, _logs(near.scores, params), params.seed, position)
    if len(lucky):
        lucky_id, lucky_best = _best(lucky, _logs(on_host(row[lucky]), params), params.seed, position)
        best_id = lucky_id if lucky_best > best else best_id
    return best_id


def near_top(row: npt.NDArray[Any], params: DecodingParams) -> Near | None:
    """The tokens near the top of a row [vocab]; None where the top is no number, or top-k needs more tokens.

    The highest of every `_GROUPED` tokens shows where to look, and bounds the weight of all others.
    """
    width = len(row) // _GROUPED
    body, tail = row[: _GROUPED * width].reshape(_GROUPED, width), row[_GROUPED * width :]
    highest = body.max(axis=0)  # [width]
    highest[: len(tail)] = np.maximum(highest[: len(tail)], tail)
    top = float(highest.max())
    if not math.isfinite(top) or width < params.top_k < len(row):
        return None
    if 0 < params.top_k < len(row):
        # As many tokens are at least that high, so the lowest of those that are kept is no lower.
        reach, cut = 0.0, float(np.partition(highest, -params.top_k)[-params.top_k])
    else:
        reach = _NEAR
        cut = _cut(top, reach * params.temperature, row.dtype)
    columns = np.flatnonzero(highest >= cut)
    if 4 * len(columns) > width:
        return _near_flat_top(row, top, highest, params)
    slices, at = np.nonzero(body[:, columns] >= cut)
    token_ids = np.concatenate([slices * width + columns[at], np.flatnonzero(tail >= cut) + len(row) - len(tail)])
    rest = (0.0, math.inf)
    if params.top_p < 1:
        heaviest = _weights(highest, top, params.temperature)
        rest = (0.0, float(np.minimum(heaviest, math.exp(-reach)).sum()) * (_GROUPED + 1) * _LIGHT)
        if rest[1] > (1 - params.top_p) / 4:
            rest = _rest(row, row[token_ids], top, params)
    return Near(token_ids, row[token_ids], reach, rest)


def _near_flat_top(row: npt.NDArray[Any], top: float, highest: npt.NDArray[Any], params: DecodingParams) -> Near:
    """`near_top` for a flat row: goes no further down than `top_p` needs, and sums the rest."""
    reach, rest = _NEAR, (0.0, math.inf)
    if params.top_p < 1 and not params.top_k:
        heaviest = np.sort(_weights(highest, top, params.temperature))
        mass = np.cumsum(heaviest)
        last = np.searchsorted(mass, (1 - params.top_p) / 4 * mass[-1])
        reach = min(max(-math.log(heaviest[last]), 1.0), _NEAR)
    token_ids = np.flatnonzero(row >= _cut(top, reach * params.temperature, row.dtype))
    scores = row[token_ids]
    if params.top_p < 1 and not params.top_k:
        rest = _rest(row, scores, top, params)
    return Near(token_ids, scores, reach, rest)


def _rest(row: npt.NDArray[Any], near: npt.NDArray[Any], top: float, params: DecodingParams) -> tuple[float, float]:
    """Lower and upper bound of the mass of a row without the scores near its top."""
    total, near_mass = (float(_weights(scores, top, params.temperature).sum()) for scores in (row, near))
    # Tokens too far down to count weigh less than the first number is lowered by.
    return max(total / _LIGHT - near_mass * _LIGHT, 0.0), total * _LIGHT - near_mass / _LIGHT


def _weights(scores: npt.NDArray[Any], top: float, temperature: float) -> npt.NDArray[np.float32]:
    """e to the power of (scores - top) / T, in float32, off by less than 1e-4 of it."""
    weights: npt.NDArray[np.float32] = np.subtract(scores, top, dtype=np.float32, casting="same_kind")
    weights *= np.float32(1 / temperature)
    np.exp(weights, out=weights)
    return weights


def near_top_on_device(rows: Any, params: Seq[DecodingParams]) -> list[Near | None]:
    """`near_top` of rows [num_rows, vocab], computed on their device."""
    xp, device = namespace_of(rows), array_api_compat.device(rows)
    dtype: np.dtype[Any] = np.dtype(np.float64 if "64" in str(rows.dtype) else np.float32)

    def column(values: list[float]) -> Any:
        return xp.asarray(np.array(values, dtype), device=device)[:, None]  # [num_rows, 1]

    tops = on_host(xp.max(rows, axis=1)).tolist()
    cuts = [_cut(top, _NEAR * each.temperature, dtype) for top, each in zip(tops, params, strict=True)]
    for row, each in enumerate(params):
        if 0 < each.top_k < rows.shape[1]:
            cuts[row] = min(cuts[row], float(xp.topk(rows[row], each.top_k).values[-1]))
    is_near = rows >= column(cuts)
    log_weights = (rows - column(tops)) * column([1 / each.temperature for each in params])
    rests = on_host(xp.sum(xp.exp(xp.where(is_near, -math.inf, log_weights)), axis=1)).tolist()
    at, token_ids = xp.nonzero(is_near)
    scores, at, token_ids = on_host(rows[at, token_ids]), on_host(at), on_host(token_ids)
    ends = np.searchsorted(at, np.arange(len(tops) + 1))
    return [
        Near(token_ids[start:end], scores[start:end], _NEAR, (0.0, rest * _LIGHT)) if math.isfinite(top) else None
        for start, end, rest, top in zip(ends, ends[1:], rests, tops, strict=False)
    ]


def _cut(top: float, reach: float, dtype: np.dtype[Any]) -> float:
    """A number of that type that is at most `top - reach` and close to it, whatever the rounding."""
    return float(dtype.type(top - reach - 1e-6 * (abs(top) + reach)))


def sample_whole(scores: npt.NDArray[Any], params: DecodingParams, position: int) -> int:
    """`sample` by definition, from every token that noise could lift to the top."""
    top = float(scores.max())
    if math.isnan(top):
        raise no_number()
    if 0 < params.top_k < len(scores):
        lowest = float(np.partition(scores, -params.top_k)[-params.top_k])
    else:
        lowest = top - _NOISE_SPAN * params.temperature
    token_ids = np.flatnonzero(scores >= lowest)
    return _best(*_nucleus(token_ids, _logs(scores[token_ids], params), params), params.seed, position)[0]


def _logs(scores: npt.NDArray[Any], params: DecodingParams) -> Floats:
    return scores.astype(np.float64) / params.temperature


def _nucleus(token_ids: Ids, log_weights: Floats, params: DecodingParams) -> tuple[Ids, Floats]:
    """Keep the smallest set of mass `top_p`, then tokens of at least `min_p` times the best probability."""
    if params.top_p < 1:
        weights = np.exp(log_weights - log_weights.max())
        wanted = params.top_p * weights.sum()
        heavy = np.flatnonzero(weights > np.exp(-_NEAR))
        if weights[heavy].sum() < wanted:  # rare: then the light ones have to be sorted, too
            heavy = np.arange(len(weights))
        order = heavy[np.argsort(-weights[heavy], kind="stable")]
        mass_before = np.cumsum(weights[order]) - weights[order]
        keep = order[mass_before < wanted]
        token_ids, log_weights = token_ids[keep], log_weights[keep]
    if params.min_p > 0:
        above = log_weights >= log_weights.max() + np.log(params.min_p)
        token_ids, log_weights = token_ids[above], log_weights[above]
    return token_ids, log_weights


def _best(token_ids: Ids, log_weights: Floats, seed: int, position: int) -> tuple[int, float]:
    values = log_weights + gumbel_noise(seed, position, token_ids)
    winner = int(values.argmax())
    return int(token_ids[winner]), float(values[winner])


def gumbel_noise(seed: int, position: int, token_ids: Ids) -> Floats:
    """Standard Gumbel noise of tokens at a position, [len(token_ids)]: a pure function of its arguments."""
    words: Words = np.empty(len(token_ids), np.uint64)
    for start in range(0, len(words), _HASH_CHUNK):
        chunk = token_ids[start : start + _HASH_CHUNK].astype(np.uint64)
        chunk += np.uint64(1)
        chunk *= np.uint64(_STEP)
        chunk = _mixed(chunk, _key(seed, position))
        words[start : start + _HASH_CHUNK] = chunk ^ (chunk >> np.uint64(31))
    # The largest word would round up to 1 and give infinite noise.
    uniform = np.minimum(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)
    gumbel: Floats = -np.log(-np.log(uniform))
    return gumbel


def noisier_than(noise: float, seed: int, position: int, num_ids: int) -> Ids:
    """Ids below `num_ids`, ascending, whose noise reaches `noise`; one in 10^9 others may be among them."""
    key, lowest = _key(seed, position), np.uint64(_lowest_word(noise))
    counters, reaching = _counters(num_ids), []
    scratch: Words = np.empty(min(_HASH_CHUNK, num_ids), np.uint64)
    for start in range(0, num_ids, _HASH_CHUNK):
        chunk = scratch[: min(_HASH_CHUNK, num_ids - start)]
        chunk[:] = counters[start : start + _HASH_CHUNK]
        # The last shift of the hash leaves its upper 31 bits alone, and those decide nearly always.
        reaching.append(np.flatnonzero(_mixed(chunk, key) >= lowest) + start)
    return np.concatenate(reaching)


def noisier_on_device(noises: list[float], seeds: list[int], positions: list[int], like: Any) -> list[Ids]:
    """`noisier_than` for each row of `like` [num_rows, vocab], computed on its device."""
    xp, device = namespace_of(like), array_api_compat.device(like)
    num_rows, num_ids = like.shape
    keys = [_signed(_key(seed, position)) for seed, position in zip(seeds, positions, strict=True)]
    # Unsigned words compare as signed ones do with the upper bit turned over.
    lowest = [_signed(_lowest_word(noise) ^ 1 << 63) for noise in noises]
    keys, lowest = (xp.asarray(words, dtype=xp.int64, device=device)[:, None] for words in (keys, lowest))
    reaching: list[list[Ids]] = [[] for _ in range(num_rows)]
    width = max(_DEVICE_CHUNK // num_rows, 1)
    for start in range(0, num_ids, width):
        ids = xp.arange(start, min(start + width, num_ids), dtype=xp.int64, device=device)[None]
        words = _mixed_signed((ids + 1) * _signed(_STEP) + keys)
        rows, columns = xp.nonzero((words ^ _signed(1 << 63)) >= lowest)
        rows, columns = on_host(rows), on_host(columns)
        for row in range(num_rows) if len(rows) else ():
            reaching[row].append(columns[rows == row] + start)
    return [np.concatenate([np.empty(0, np.int64), *each]) for each in reaching]


def _lowest_word(noise: float) -> int:
    """The smallest hash, its lower 33 bits 0, of a token whose noise is at least `noise`."""
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


def _mixed_signed(words: Any) -> Any:
    """`_mixed` for int64, whose right shift copies the sign."""
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
