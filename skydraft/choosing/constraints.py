"""Constraints: pure functions of the prefix that give sparse edits of a row of logits.

`repetition_penalty`, `no_repeat_ngram_size` and `min_new_tokens` follow transformers' logits processors to the
letter: on raw logits, prompt included, in that order. `frequency_penalty`, `presence_penalty` and `logit_bias` are as
OpenAI defines them: mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias[j], where c[j] counts how often token j was
generated. `min_call_prob` looks at the row itself: at how likely all tokens together are with which a call begins.

The constraints for fluent Chinese (styles `zh-short`, `zh-detailed`) are over the generated part of the prefix. They
prevent repeated characters (F9), a comma after every second character (F10), and penalties that drive a model from one
punctuation mark to the next (F12).

A row costs its new tokens (`incremental`); a penalty also its distinct tokens, an n-gram ban the length of its n-gram.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import array_api_compat
import numpy as np
import numpy.typing as npt

from skydraft.characters import is_cjk
from skydraft.choosing.incremental import Along, Repeats, Tally
from skydraft.choosing.stopping import said_along
from skydraft.config import DecodingParams
from skydraft.engines.rows import namespace_of, on_host
from skydraft.engines.vocab import Mask, TokenIds, Vocab, check_chinese
from skydraft.errors import OptionError

_OPENERS = (b"{", b"`", b"<tool")
_MAX_BLANK = 8  # tokens of white space before a call
_MAX_CHAR_TOKENS = 4  # a character in UTF-8 has at most four bytes, so at most four tokens


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of some logits. `ban` sets -inf, `shift` adds `amount`, which may be one number for each id.
    `ban_unlikely` sets -inf unless the ids together have at least the probability `amount`.

    `scale` makes a token less likely by the factor `amount`: it divides a positive logit and multiplies a
    negative one (CTRL, arXiv 1909.05858, as in transformers). An id named twice is changed once.
    """

    op: Literal["ban", "ban_unlikely", "scale", "shift"]
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
    if edit.op == "ban_unlikely":
        logits = on_host(row).astype(np.float64)  # the same sum wherever the row lies; for the first token alone
        if np.isfinite(best := logits.max()):  # else it has no probabilities
            weights = np.exp(logits - best)  # [vocab]
            if weights[edit.token_ids].sum() < edit.amount * weights.sum():
                row[ids] = -xp.inf
        return
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
    """Scale every token of the prefix, once per distinct id."""
    tally = Tally()
    return lambda prefix: [Edit("scale", tally.distinct(prefix), penalty)]


def occurrence_penalty(frequency: float, presence: float, prompt_len: int) -> Constraint:
    """Shift every generated token down: by `presence` once, and by `frequency` for each time."""
    tally = Tally()

    def shift(prefix: TokenIds) -> list[Edit]:
        token_ids, counts = tally.counts(prefix[prompt_len:])
        return [Edit("shift", token_ids, -(counts * frequency + presence).astype(np.float32))]

    return shift


def logit_bias(biases: Iterable[tuple[int, float]]) -> Constraint:
    """Add to the logits of certain tokens."""
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


@lru_cache(maxsize=8)
def call_openers(vocab: Vocab) -> TokenIds:
    """The tokens with which a call begins, or its fence or mark, after white space.

    A model that may not begin one otherwise begins with the template's mark of the list of tools.
    """
    texts = [piece.lstrip() for piece in vocab.pieces]
    found = [token_id for token_id, text in enumerate(texts) if text.startswith(_OPENERS) or text == b"<"]
    return np.array(found, np.int32)


def no_unlikely_call(least: float, vocab: Vocab, prompt_len: int) -> Constraint:
    """Ban the beginning of a call unless it has at least the probability `least`.

    Small models for code call a tool where the words of an answer, each for itself unlikely, have most of the chance.
    """
    edits = [Edit("ban_unlikely", call_openers(vocab), least)]

    def ban(prefix: TokenIds) -> list[Edit]:
        generated = prefix[prompt_len:]
        has_begun = len(generated) > _MAX_BLANK or vocab.text_bytes(generated).strip()
        return [] if has_begun else edits

    return ban


def constraints_of(params: DecodingParams, vocab: Vocab, prompt_len: int) -> list[Constraint]:
    """The constraints that `params` turns on, in the order in which they apply. Raises OptionError for one that cannot.

    Those of a style come last: scale, bans, shift.
    """
    for name, token_id in (
        ("--logit-bias", params.logit_bias[-1][0] if params.logit_bias else 0),
        ("--stop-token-ids", params.stop_token_ids[-1] if params.stop_token_ids else 0),
    ):
        if token_id >= vocab.size:
            raise OptionError(f"{name}: the vocabulary of {vocab.size} tokens has no id {token_id}.")
    constraints: list[Constraint] = []
    if params.min_call_prob:  # by the raw row
        constraints.append(no_unlikely_call(params.min_call_prob, vocab, prompt_len))
    if params.repetition_penalty != 1:
        constraints.append(repetition_penalty(params.repetition_penalty))
    if params.frequency_penalty or params.presence_penalty:
        constraints.append(occurrence_penalty(params.frequency_penalty, params.presence_penalty, prompt_len))
    if params.logit_bias:
        constraints.append(logit_bias(params.logit_bias))
    if params.no_repeat_ngram_size:
        constraints.append(no_repeat_ngram(params.no_repeat_ngram_size))
    if params.min_new_tokens:
        ban = no_end_before(params.min_new_tokens, prompt_len, vocab.end_ids | set(params.stop_token_ids))
        # A text with all its sentences may end early: a model that must go on begins another topic.
        constraints.append(_unless_said(params.sentences, vocab, prompt_len, ban) if params.sentences else ban)
    if params.shapes_chinese:
        check_chinese(vocab)
    if params.content_penalty != 1:
        constraints.append(_content_penalty(params.content_penalty, vocab, prompt_len))
    if params.content_ngram_size:
        constraints.append(_content_ngram(params.content_ngram_size, vocab, prompt_len))
    if params.no_adjacent_repeat:
        constraints.append(_no_adjacent_repeat(vocab, prompt_len))
    if params.comma_gap:
        early_comma = _too_early(vocab.classes.comma, params.comma_gap, vocab, prompt_len)
        constraints.append(lambda prefix: [Edit("ban", early_comma(prefix))])
    if params.full_stop_gap:
        early_stop = _too_early(vocab.classes.full_stop, params.full_stop_gap, vocab, prompt_len)
        constraints.append(lambda prefix: [Edit("shift", early_stop(prefix), params.full_stop_shift)])
    return constraints


def _unless_said(sentences: int, vocab: Vocab, prompt_len: int, ban: Constraint) -> Constraint:
    """`ban`, except where the generated text ends a sentence and has `sentences` of them."""
    said = said_along(vocab)

    def lifted(prefix: TokenIds) -> Iterable[Edit]:
        edits = list(ban(prefix))
        return [] if edits and said.at(prefix[prompt_len:]).has(sentences) else edits

    return lifted


def _content_penalty(penalty: float, vocab: Vocab, prompt_len: int) -> Constraint:
    content, tally = vocab.classes.content, Tally()

    def scale(prefix: TokenIds) -> list[Edit]:
        token_ids = tally.distinct(prefix[prompt_len:])
        return [Edit("scale", token_ids[content[token_ids]], penalty)]

    return scale


def _content_ngram(size: int, vocab: Vocab, prompt_len: int) -> Constraint:
    content, repeats = vocab.classes.content, Repeats(size)

    def ban(prefix: TokenIds) -> list[Edit]:
        generated = prefix[prompt_len:]
        return [Edit("ban", repeats.after(generated[content[generated]]))]

    return ban


def _no_adjacent_repeat(vocab: Vocab, prompt_len: int) -> Constraint:
    first_char = vocab.classes.first_char

    def ban(prefix: TokenIds) -> list[Edit]:
        last = vocab.decode(prefix[prompt_len:][-_MAX_CHAR_TOKENS:])[-1:]
        if not (last and is_cjk(last)):
            return []
        return [Edit("ban", np.flatnonzero(first_char == ord(last)).astype(np.int32))]

    return ban


def _too_early(marks: Mask, gap: int, vocab: Vocab, prompt_len: int) -> Callable[[TokenIds], TokenIds]:
    """Which of the marked tokens come less than `gap` CJK characters after the last punctuation of a prefix."""
    mark_ids = np.flatnonzero(marks).astype(np.int32)
    lead = vocab.classes.lead_cjk[mark_ids]
    wide_only = ~vocab.classes.ascii_punct[mark_ids]
    num_since = num_cjk_since_punctuation(vocab)

    def find(prefix: TokenIds) -> TokenIds:
        generated = prefix[prompt_len:]
        early = num_since.at(generated) + lead < gap
        if len(generated) and vocab.token_bytes(int(generated[-1]))[-1:].isalnum():
            early &= wide_only  # 3.5 is no sentence end, 3,000 no pause
        return mark_ids[early]

    return find


def num_cjk_since_punctuation(vocab: Vocab) -> Along[int]:
    """CJK characters since the last punctuation, along the tokens of a text."""
    classes = vocab.classes
    punct, tail_cjk, num_cjk = classes.punct, classes.tail_cjk, classes.num_cjk
    return Along(0, lambda count, token_id: int(tail_cjk[token_id] if punct[token_id] else count + num_cjk[token_id]))
