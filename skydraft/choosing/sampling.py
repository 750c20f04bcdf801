"""From edited logits to a token: temperature once, top-k, top-p, min-p, then Gumbel-max with counter-based noise.

A token whose logit is below best - `REACH` * T is never chosen: 6e-6 of the probability (docs/exactness.md). The noise
is a pure hash of (seed, position, token id). So draft and target share it, and any position can be computed again
(Gumbel coupling, arXiv 2408.07978). The hash is SplitMix64 (public domain).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skydraft.config import DecodingParams
from skydraft.errors import EngineError

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

REACH = 24.0  # nats at the temperature
_NEAR = 4.0  # nats; tokens further down need rare noise to win, which their hash shows
_HEAVY = 10.0  # nats; tokens further down are rarely within top-k or top-p, and sorting all would be slow
_WEIGHED = 18.0  # nats; the weight of tokens further down rarely changes top-p
_CHUNK = 16_384  # tokens hashed at once, in the processor's cache
_MASK = (1 << 64) - 1
_STEP, _MIX_A, _MIX_B = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def sample(row: npt.NDArray[Any], params: DecodingParams, position: int) -> int:
    """Return the token for `position` from edited logits [vocab], at a temperature above 0.

    Raises EngineError for logits that are not numbers.
    """
    top = row.max()
    if not math.isfinite(top):
        raise no_number()
    few = _Few(row, top, params.temperature)
    reach = min(REACH, -math.log(params.min_p)) if params.min_p > 0 else REACH
    if 0 < params.top_k < len(row):
        token_ids = few.highest(params.top_k)
        if params.top_p < 1:
            token_ids, mass = few.by_weight(token_ids)
            token_ids = token_ids[: np.searchsorted(mass, params.top_p * mass[-1]) + 1]
    elif params.top_p < 1:
        token_ids = few.nucleus(params.top_p)
    else:
        return few.winner(few.within(reach), few.within(min(reach, _NEAR)), params.seed, position)
    token_ids = token_ids[row[token_ids] >= few.cut(reach)]
    return few.winner(token_ids[:0], token_ids, params.seed, position)


def no_number() -> EngineError:
    return EngineError("The model gave logits that are not numbers.", hint="Fetch the model again.")


@dataclass(frozen=True, slots=True)
class _Few:
    """The tokens of a row that could win. Distances from the top logit are in nats at the temperature."""

    row: npt.NDArray[Any]  # [vocab]
    top: Any
    temperature: float

    def cut(self, distance: float) -> Any:
        return self.top - self.row.dtype.type(distance * self.temperature)

    def within(self, distance: float) -> Ids:
        return np.flatnonzero(self.row >= self.cut(distance))

    def highest(self, num: int) -> Ids:
        """Return the `num` best tokens, and ties with the last of them."""
        token_ids = self.within(_HEAVY)
        if len(token_ids) < num:
            token_ids = self.within(REACH)
        if len(token_ids) <= num:
            return token_ids
        logits = self.row[token_ids]
        kept: Ids = token_ids[logits >= np.partition(logits, -num)[-num]]
        return kept

    def by_weight(self, token_ids: Ids) -> tuple[Ids, Floats]:
        """Return the tokens, heaviest first, and their cumulative weights; the best weighs 1."""
        weights = np.exp((self.row[token_ids].astype(np.float64) - self.top) / self.temperature)
        order = np.argsort(-weights, kind="stable")
        return token_ids[order], np.cumsum(weights[order])

    def nucleus(self, top_p: float) -> Ids:
        """Return the fewest tokens with `top_p` of the probability; among equals the first."""
        token_ids, mass = self.by_weight(self.within(_HEAVY))
        for distance in (_WEIGHED, REACH):
            whole = self.mass(distance)
            beyond = len(self.row) * math.exp(-distance) if distance < REACH else 0.0  # at most
            least, most = np.searchsorted(mass, [top_p * whole, top_p * (whole + beyond)])
            if least == most:
                break
        if least == len(mass):
            token_ids, mass = self.by_weight(self.within(REACH))
            least = np.searchsorted(mass, top_p * mass[-1])
        return token_ids[: least + 1]

    def mass(self, distance: float) -> float:
        weights = self.row[self.row >= self.cut(distance)]
        weights -= self.top
        weights *= self.row.dtype.type(1 / self.temperature)
        return float(np.exp(weights, out=weights).sum())

    def winner(self, token_ids: Ids, near: Ids, seed: int, position: int) -> int:
        """Return the token with the highest logit / T + noise; the tokens `near` can win without rare noise."""
        found = self._best(near, _words(seed, position, near))
        noise = found[0] - float(self.top) / self.temperature + _NEAR  # needed by tokens further down
        lowest = np.uint64(int(math.exp(-math.exp(-noise)) * (1 - 1e-9) * 2.0**64))
        for start in range(0, len(token_ids), _CHUNK):
            some = token_ids[start : start + _CHUNK]
            words = _words(seed, position, some)
            if len(rare := np.flatnonzero(words >= lowest)):
                found = max(found, self._best(some[rare], words[rare]))
        return found[1]

    def _best(self, token_ids: Ids, words: Words) -> tuple[float, int]:
        values = self.row[token_ids].astype(np.float64) / self.temperature + _gumbel(words)
        return float(values.max()), int(token_ids[values.argmax()])


def _gumbel(words: Words) -> Floats:
    """Turn each word into standard Gumbel noise."""
    # The largest word would round up to 1 and give infinite noise.
    uniform = np.minimum(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)
    gumbel: Floats = -np.log(-np.log(uniform))
    return gumbel


def _words(seed: int, position: int, token_ids: npt.NDArray[Any]) -> Words:
    """Hash each token with SplitMix64, whose state is the hash of seed and position."""
    words: Words = _mixed(token_ids.astype(np.uint64) * _STEP + _mixed(_mixed(seed) + position))
    return words


def _mixed(word: Any) -> Any:
    """Return SplitMix64's next word for a word or an array of words."""
    word = (word + _STEP) & _MASK
    word = ((word ^ (word >> 30)) * _MIX_A) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_B) & _MASK
    return word ^ (word >> 31)
