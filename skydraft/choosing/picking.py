"""Edited rows of a whole batch in, tokens out: where the rows lie, and over the processor's cores."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import array_api_compat
import numpy.typing as npt

from skydraft.choosing.sampling import no_number, sample, sample_on_device
from skydraft.config import DecodingParams, num_cores
from skydraft.engines.rows import is_on_host, namespace_of, on_host
from skydraft.errors import EngineError

Picked: TypeAlias = int | Exception
_NUM_THREADS = min(num_cores(), 8)  # reading rows is bound by memory
_SHARE = 16  # rows that are worth a thread


@dataclass(frozen=True, slots=True)
class Draw:
    """One choice to be made: edited logits [vocab], numpy or torch, at least float32; parameters; the position."""

    scores: Any
    params: DecodingParams
    position: int


def pick(draws: Seq[Draw]) -> list[Picked]:
    """The token of each: at temperature 0 the best one, the lowest id among equals; else a sample.

    An EngineError in place of a token where a logit is not a number. A token depends on its own draw alone.
    """
    away = [index for index, draw in enumerate(draws) if not is_on_host(draw.scores)]
    if not away:
        return _pick_here(draws)
    picked: list[Picked] = [0] * len(draws)
    for index, token in zip(away, pick_on_device([draws[index] for index in away]), strict=True):
        picked[index] = token
    here = [index for index in range(len(draws)) if index not in set(away)]
    for index, token in zip(here, _pick_here([draws[index] for index in here]), strict=True):
        picked[index] = token
    return picked


def pick_one(draw: Draw) -> int:
    """The token of one, as `pick` has it, without what many take to be gone through. Raises EngineError."""
    if not is_on_host(draw.scores):
        (picked,) = pick_on_device([draw])
    else:
        picked = _sample(draw) if draw.params.temperature else _best(draw, int(on_host(draw.scores).argmax()))
    if isinstance(picked, Exception):
        raise picked
    return picked


def _pick_here(draws: Seq[Draw]) -> list[Picked]:
    best = iter(_best_of_each([on_host(draw.scores) for draw in draws if not draw.params.temperature]))
    return [_sample(draw) if draw.params.temperature else _best(draw, next(best)) for draw in draws]


def _sample(draw: Draw) -> Picked:
    try:
        return sample(on_host(draw.scores), draw.params, draw.position)
    except EngineError as error:
        return error


def _best(draw: Draw, best: int) -> Picked:
    return best if draw.scores[best] == draw.scores[best] else no_number()


def _best_of_each(rows: Seq[npt.NDArray[Any]]) -> list[int]:
    """Where each row is highest, or no number. A share for each core: numpy lets others run while it reads a row."""
    num_shares = min(_NUM_THREADS, len(rows) // _SHARE)
    if num_shares < 2:
        return _argmax(rows)
    best = [0] * len(rows)
    others = [_threads().submit(_argmax, rows[share::num_shares]) for share in range(1, num_shares)]
    best[::num_shares] = _argmax(rows[::num_shares])
    for share, other in enumerate(others, 1):
        best[share::num_shares] = other.result()
    return best


def _argmax(rows: Seq[npt.NDArray[Any]]) -> list[int]:
    return [int(row.argmax()) for row in rows]


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(_NUM_THREADS - 1, 1), thread_name_prefix="choosing")


def pick_on_device(draws: Seq[Draw]) -> list[Picked]:
    """One argmax for all, and one sample for those of a temperature above 0."""
    if not draws:
        return []
    xp = namespace_of(draws[0].scores)
    rows = xp.stack([draw.scores for draw in draws])  # [num_draws, vocab]
    best = xp.argmax(rows, axis=1)
    # One copy to the host for both.
    told = on_host(
        xp.stack([best, xp.astype(xp.isnan(xp.take_along_axis(rows, best[:, None], axis=1))[:, 0], best.dtype)])
    )
    picked: list[Picked] = [no_number() if is_nan else int(token) for token, is_nan in told.T.tolist()]
    drawn = [i for i, draw in enumerate(draws) if draw.params.temperature and isinstance(picked[i], int)]
    if drawn:
        kept = rows if len(drawn) == len(draws) else rows[xp.asarray(drawn, device=array_api_compat.device(rows))]
        tokens = sample_on_device(kept, [draws[i].params for i in drawn], [draws[i].position for i in drawn])
        for index, token in zip(drawn, tokens, strict=True):
            picked[index] = token
    return picked
