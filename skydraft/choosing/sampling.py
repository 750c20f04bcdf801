"""From edited logits to a token: temperature once, top-k, top-p, min-p, then Gumbel-max with counter-based noise.

There is no random state. The noise of a token is a pure hash of (seed, position, token id), so that draft and
target share it and any position can be computed again (Gumbel coupling, arXiv 2408.07978). Temperature and all
that follows run in float64 on the host over the surviving tokens only, the same for numpy and torch rows.
"""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from skydraft.config import DecodingParams

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_STEP, _MIX_A, _MIX_B = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64, public domain
# The noise has 53 bits: -log(-log(u)) with u in [2^-54, 1 - 2^-53]. What is further than this from the best
# logit (in units of the temperature) can never win, whatever its noise.
_MAX_NOISE = 37.43
_NOISE_SPAN = _MAX_NOISE + 3.63
_NEAR = 12.0
_HASH_CHUNK = 8192  # temporaries stay in the processor's cache: 4 times faster than whole vocabularies


def sample(scores: Any, params: DecodingParams, position: int) -> int:
    """The token for `position` from edited logits [vocab], all of them numbers, at a temperature above 0."""
    if not params.top_k and params.top_p == 1 and params.min_p == 0:
        return _sample_all(scores, params, position)
    token_ids, log_weights = _nucleus(*_survivors(scores, params), params)
    return _best(token_ids, log_weights, params.seed, position)[0]


def _sample_all(scores: Any, params: DecodingParams, position: int) -> int:
    """argmax of scores / T + noise over the whole vocabulary; logarithms only where the noise could decide.

    First the tokens near the top. Any other token weighs at most top / T - _NEAR, so it needs noise above a
    known bound, that is a hash above a threshold: one in e^_NEAR has it, and only those are looked at.
    """
    temperature, top = params.temperature, float(scores.max())
    near = _gather(scores, scores >= top - _NEAR * temperature, temperature)
    best_id, best = _best(*near, params.seed, position)
    threshold = np.exp(-np.exp(top / temperature - _NEAR - best)) * (1 - 1e-9)
    all_ids = np.arange(scores.shape[0])
    lucky = np.flatnonzero(_hash(params.seed, position, all_ids) >= np.uint64(int(threshold * 2.0**64)))
    if len(lucky):
        weights = np.array([float(scores[int(token_id)]) for token_id in lucky]) / temperature
        lucky_id, lucky_best = _best(lucky, weights, params.seed, position)
        best_id = lucky_id if lucky_best > best else best_id
    return best_id


def _survivors(scores: Any, params: DecodingParams) -> tuple[Ids, Floats]:
    """Ids and logits / temperature of what top-k keeps, or else of what noise could still lift to the top."""
    if params.top_k and params.top_k < scores.shape[0]:
        lowest = _kth_largest(scores, params.top_k)
    else:
        lowest = float(scores.max()) - _NOISE_SPAN * params.temperature
    return _gather(scores, scores >= lowest, params.temperature)


def _gather(scores: Any, kept: Any, temperature: float) -> tuple[Ids, Floats]:
    positions = _positions(kept)
    return _on_host(positions).astype(np.int64), _on_host(scores[positions]).astype(np.float64) / temperature


def _positions(mask: Any) -> Any:
    return array_api_compat.array_namespace(mask).nonzero(mask)[0]


def _kth_largest(scores: Any, k: int) -> float:
    if isinstance(scores, np.ndarray):
        return float(np.partition(scores, -k)[-k])
    return float(scores.topk(k).values[-1])


def _on_host(array: Any) -> npt.NDArray[Any]:
    if isinstance(array, np.ndarray):
        return array
    # numpy has no bfloat16; every bfloat16 and float16 is a float32
    return np.asarray((array.float() if array.is_floating_point() else array).cpu().numpy())


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


def gumbel_noise(seed: int, position: int, token_ids: Ids) -> Floats:
    """Standard Gumbel noise of tokens at a position, [len(token_ids)]: a pure function of its arguments."""
    return _to_gumbel(_hash(seed, position, token_ids))


def _best(token_ids: Ids, log_weights: Floats, seed: int, position: int) -> tuple[int, float]:
    values = log_weights + gumbel_noise(seed, position, token_ids)
    winner = int(values.argmax())
    return int(token_ids[winner]), float(values[winner])


def _hash(seed: int, position: int, token_ids: Ids) -> Words:
    key = np.uint64(_mix_int(_mix_int(seed & _MASK) + position))
    words: Words = np.empty(len(token_ids), np.uint64)
    for start in range(0, len(words), _HASH_CHUNK):
        chunk = token_ids[start : start + _HASH_CHUNK].astype(np.uint64)
        chunk += np.uint64(1)
        chunk *= np.uint64(_STEP)
        chunk += key
        chunk ^= chunk >> np.uint64(30)
        chunk *= np.uint64(_MIX_A)
        chunk ^= chunk >> np.uint64(27)
        chunk *= np.uint64(_MIX_B)
        chunk ^= chunk >> np.uint64(31)
        words[start : start + _HASH_CHUNK] = chunk
    return words


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
