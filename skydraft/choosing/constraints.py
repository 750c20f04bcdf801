"""Constraints: pure functions of the prefix that give sparse edits of a row of logits.

`repetition_penalty`, `no_repeat_ngram_size` and `min_new_tokens` follow transformers' logits processors to the
letter: on raw logits, prompt included, in that order. `frequency_penalty`, `presence_penalty` and `logit_bias` are as
OpenAI defines them: mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias[j], where c[j] counts how often token j was
generated.

What a row costs besides the prefix's new tokens (`incremental`): penalties, their distinct tokens; an n-gram ban, the
length of its n-gram; the others nothing that grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import array_api_compat
import numpy as np
import numpy.typing as npt

from skydraft.choosing.incremental import Repeats, Tally
from skydraft.engines.rows import namespace_of
from skydraft.engines.vocab import TokenIds


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of some logits. `ban` sets -inf, `shift` adds `amount`, which may be one number for each id.

    `scale` makes a token less likely by the factor `amount`: it divides a positive logit and multiplies a
    negative one (CTRL, arXiv 1909.05858, as in transformers). An id named twice is changed once.
    """

    op: Literal["ban", "scale", "shift"]
    token_ids: TokenIds
    amount: float | npt.NDArray[np.float32] = 0.0


Constraint: TypeAlias = Callable[[TokenIds], Iterable[Edit]]


def apply(row: Any, edits: Iterable[Edit]) -> Any:
    """A copy of `row` [vocab] with the edits made in order; `row` itself when there is none."""
    edited = row
    for edit in edits:
        if len(edit.token_ids) == 0:
            continue
        if edited is row:
            edited = row.copy() if isinstance(row, np.ndarray) else row.clone()
        _apply_one(edited, edit)
    return edited


def _apply_one(row: Any, edit: Edit) -> None:
    xp = namespace_of(row)
    ids = xp.asarray(edit.token_ids, dtype=xp.int64, device=array_api_compat.device(row))
    if edit.op == "ban":
        row[ids] = -xp.inf
        return
    scores = row[ids]
    if edit.op == "shift":
        amount = edit.amount
        if isinstance(amount, np.ndarray):
            amount = xp.asarray(amount, device=array_api_compat.device(row))
        row[ids] = scores + amount
    else:
        # Gathered before anything is written, so that an id named twice is scaled once.
        row[ids] = xp.where(scores < 0, scores * edit.amount, scores / edit.amount)


def repetition_penalty(penalty: float) -> Constraint:
    """Scale every token that the prefix holds, once per distinct id."""
    tally = Tally()
    return lambda prefix: [Edit("scale", tally.distinct(prefix), penalty)]


def occurrence_penalty(frequency: float, presence: float, prompt_len: int) -> Constraint:
    """Shift every token that was generated: down by `presence` once, and by `frequency` for each time."""

    tally = Tally()

    def shift(prefix: TokenIds) -> list[Edit]:
        token_ids, counts = tally.counts(prefix[prompt_len:])
        return [Edit("shift", token_ids, -(counts * frequency + presence).astype(np.float32))]

    return shift


def logit_bias(biases: Iterable[tuple[int, float]]) -> Constraint:
    """Add to the logits of certain tokens, whatever was written."""
    token_ids, amounts = zip(*biases, strict=True)
    edits = [Edit("shift", np.array(token_ids, np.int32), np.array(amounts, np.float32))]
    return lambda prefix: edits


def no_repeat_ngram(size: int) -> Constraint:
    """Ban every token that would complete an n-gram which the prefix already holds."""
    repeats = Repeats(size)
    return lambda prefix: [Edit("ban", repeats.after(prefix))]


def no_end_before(num_tokens: int, prompt_len: int, end_ids: Iterable[int]) -> Constraint:
    """Ban the end tokens until `num_tokens` have been generated."""
    banned = np.fromiter(end_ids, np.int32)

    def ban(prefix: TokenIds) -> list[Edit]:
        return [Edit("ban", banned)] if len(prefix) - prompt_len < num_tokens else []

    return ban
