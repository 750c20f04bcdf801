"""From edited logits to a token: temperature once, top-k, top-p, min-p, then Gumbel-max with counter-based noise.

Temperature and all that follows run in float64 on the host. Only what could win is looked at: the tokens near the top,
a bound of what all others weigh together, and, where nothing but the temperature is set, those others whose noise is
so rare that they might win all the same. Where that proves nothing the whole row is looked at (`sample_whole`), which
is the definition; both give the same token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from skydraft.choosing.noise import MAX_NOISE, MIN_NOISE, Floats, Ids, gumbel_noise, noisier_on_device, noisier_than
from skydraft.config import DecodingParams
from skydraft.engines.rows import namespace_of, on_host
from skydraft.errors import EngineError

# What is further than this from the best logit (in units of the temperature) can never win, whatever its noise.
_NOISE_SPAN = MAX_NOISE - MIN_NOISE
_NEAR = 12.0  # nats, from the best: what is looked at first
_EDGE = 1e-6  # nats; what is as close to the end of them may count as in or out
_SUMMED = 1e-10  # relative; float64 sums of a vocabulary in another order differ by less
_LIGHT = 1 + 1e-4  # relative; float32 weights and their sums are off by less than a quarter of it
_SMALL = 2048  # tokens; a smaller vocabulary is looked at as a whole, which is as fast
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
    """What to raise for logits that are NaN."""
    return EngineError("The model gave logits that are not numbers.", hint="The model file may be damaged.")


def sample_on_device(rows: Any, params: Seq[DecodingParams], positions: Seq[int]) -> list[int]:
    """`sample` for rows [num_rows, vocab] that lie elsewhere, from which only what is near the top is fetched."""
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
    """The token, from what is near the top if that is enough."""
    if near is not None and _is_plain(params):
        noise = _noise_to_win(near, params, position)
        return _best_of_all(row, near, noisier_than(noise, params.seed, position, len(row)), params, position)
    token_id = _winner(near, params, position, len(row)) if near is not None else None
    return sample_whole(on_host(row), params, position) if token_id is None else token_id


def _winner(near: Near, params: DecodingParams, position: int, vocab_size: int) -> int | None:
    """The token where a filter is set, or None where what is near the top does not tell."""
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
    """The best token of those before which less than `top_p` of all mass comes: its own place is all that is asked.

    Sums in another order than that of the definition leave a doubt of `_SUMMED`, and what lies further down one of
    the width of `near.rest`; None where the answer falls into it.
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
    """What noise a token needs that is further down than what is near the top, to beat that."""
    log_weights = _logs(near.scores, params)
    return float(near.reach - log_weights.max() + _best(near.token_ids, log_weights, params.seed, position)[1])


def _best_of_all(row: Any, near: Near, lucky: Ids, params: DecodingParams, position: int) -> int:
    """argmax of scores / T + noise over the whole vocabulary: what is near the top, and what is lucky.

    Any other token needs noise that only one in e^_NEAR has.
    """
    best_id, best = _best(near.token_ids, _logs(near.scores, params), params.seed, position)
    if len(lucky):
        lucky_id, lucky_best = _best(lucky, _logs(on_host(row[lucky]), params), params.seed, position)
        best_id = lucky_id if lucky_best > best else best_id
    return best_id


def near_top(row: npt.NDArray[Any], params: DecodingParams) -> Near | None:
    """What is near the top of a row [vocab]; None where that is no number, or where more is asked for.

    The highest of every `_GROUPED` tokens tell where to look, and what all others weigh at most.
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
    slices, found = np.nonzero(body[:, columns] >= cut)
    token_ids = np.concatenate([slices * width + columns[found], np.flatnonzero(tail >= cut) + len(row) - len(tail)])
    rest = (0.0, math.inf)
    if params.top_p < 1:
        heaviest = _weights(highest, top, params.temperature)
        rest = (0.0, float(np.minimum(heaviest, math.exp(-reach)).sum()) * (_GROUPED + 1) * _LIGHT)
        if rest[1] > (1 - params.top_p) / 4:
            rest = _rest(row, row[token_ids], top, params)
    return Near(token_ids, row[token_ids], reach, rest)


def _near_flat_top(row: npt.NDArray[Any], top: float, highest: npt.NDArray[Any], params: DecodingParams) -> Near:
    """`near_top` where much is near: no further down than `top_p` needs, and what is further down is weighed."""
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
    """Bounds of what a row weighs without the scores near its top."""
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
    """`near_top` of rows [num_rows, vocab], found where they lie."""
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
    """A number of that type which is for certain no higher than `reach` below the top, and for certain near to that."""
    return float(dtype.type(top - reach - 1e-6 * (abs(top) + reach)))


def sample_whole(scores: npt.NDArray[Any], params: DecodingParams, position: int) -> int:
    """`sample` by definition, with every token that noise could still lift to the top."""
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
    """Keep the smallest set of mass `top_p`, then what has `min_p` times the best probability; always the best."""
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
