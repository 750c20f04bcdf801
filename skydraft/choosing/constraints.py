"""Constraints: pure functions of the prefix that edit a row of logits in a few places.

`repetition_penalty`, `no_repeat_ngram_size` and `min_new_tokens` follow transformers' logits processors to the
letter: on raw logits, prompt included, in that order. `frequency_penalty`, `presence_penalty` and `logit_bias` are as
OpenAI defines them: mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias[j], where c[j] counts how often token j was
generated. The styles for fluent Chinese look at the generated part: at repeated characters (F9), a comma after every
second character (F10), and penalties that drive a model from one punctuation mark to the next (F12).

A row costs its new tokens (`incremental`); a penalty also its distinct tokens, an n-gram ban the length of its n-gram.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from skydraft.characters import is_cjk
from skydraft.choosing.incremental import Along, Repeats, Tally
from skydraft.choosing.stopping import said_along
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Mask, TokenIds, Vocab, check_chinese, kept_with_vocab
from skydraft.errors import OptionError

# Edits a row [vocab] in place, given the prefix before it and the generated part of that.
Constraint: TypeAlias = Callable[[npt.NDArray[Any], TokenIds, TokenIds], None]

_OPENERS = (b"{", b"`", b"<tool")
_MAX_BLANK = 8  # tokens of white space before a call
_MAX_CHAR_TOKENS = 4  # a character in UTF-8 has at most four bytes, so at most four tokens


def constraints_of(params: DecodingParams, vocab: Vocab) -> list[tuple[Constraint, bool]]:
    """The constraints that `params` turns on, in the order in which they apply, each with whether it looks at the
    answer alone, without the thinking before it. Raises OptionError."""
    biased = [token_id for token_id, _ in params.logit_bias]
    for name, ids in (("--logit-bias", biased), ("--stop-token-ids", params.stop_token_ids)):
        if (last := max(ids, default=0)) >= vocab.size:
            raise OptionError(f"{name}: the vocabulary of {vocab.size} tokens has no id {last}.")
    if params.shapes_chinese:
        check_chinese(vocab)
    wanted: list[tuple[object, bool, Callable[[DecodingParams, Vocab], Constraint]]] = [
        (params.min_call_prob, True, _no_unlikely_call),  # by the raw row
        (params.repetition_penalty != 1, False, lambda p, _: _penalty(p.repetition_penalty)),
        (params.frequency_penalty or params.presence_penalty, False, _occurrence_penalty),
        (params.logit_bias, False, _logit_bias),
        (params.no_repeat_ngram_size, False, lambda p, _: _no_repeat(p.no_repeat_ngram_size)),
        (params.min_new_tokens, True, _no_early_end),
        (params.content_penalty != 1, True, lambda p, v: _penalty(p.content_penalty, v.classes.content)),
        (params.content_ngram_size, True, lambda p, v: _no_repeat(p.content_ngram_size, v.classes.content)),
        (params.no_adjacent_repeat, True, _no_adjacent_repeat),
        (params.comma_gap, True, lambda p, v: _too_early(v.classes.comma, p.comma_gap, -np.inf, v)),
        (
            params.full_stop_gap, True,
            lambda p, v: _too_early(v.classes.full_stop, p.full_stop_gap, p.full_stop_shift, v),
        ),
    ]  # fmt: skip
    return [(make(params, vocab), is_of_answer) for is_on, is_of_answer, make in wanted if is_on]


@kept_with_vocab
def call_openers(vocab: Vocab) -> TokenIds:
    """The tokens with which a call begins, or its fence, or the template's mark of it or of the list of tools."""
    texts = [piece.lstrip() for piece in vocab.pieces]
    found = [token_id for token_id, text in enumerate(texts) if text.startswith(_OPENERS) or text == b"<"]
    return np.array(found, np.int32)


def _no_unlikely_call(params: DecodingParams, vocab: Vocab) -> Constraint:
    """Small models call a tool where the words of an answer, each for itself unlikely, have most of the chance."""
    openers = call_openers(vocab)

    def ban(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        if len(generated) > _MAX_BLANK or vocab.text_bytes(generated).strip():
            return  # the answer has begun
        logits = row.astype(np.float64)
        if not np.isfinite(best := logits.max()):
            return  # it has no probabilities
        weights = np.exp(logits - best)  # [vocab]
        if weights[openers].sum() < params.min_call_prob * weights.sum():
            row[openers] = -np.inf

    return ban


def _penalty(penalty: float, content: Mask | None = None) -> Constraint:
    """Positive logits are divided, negative ones multiplied (CTRL, arXiv 1909.05858)."""
    tally = Tally()

    def scale(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        token_ids = tally.distinct(prefix if content is None else generated)
        if content is not None:
            token_ids = token_ids[content[token_ids]]
        scores = row[token_ids]
        row[token_ids] = np.where(scores < 0, scores * penalty, scores / penalty)

    return scale


def _occurrence_penalty(params: DecodingParams, vocab: Vocab) -> Constraint:
    tally = Tally()

    def shift(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        token_ids, counts = tally.counts(generated)
        row[token_ids] -= (counts * params.frequency_penalty + params.presence_penalty).astype(np.float32)

    return shift


def _logit_bias(params: DecodingParams, vocab: Vocab) -> Constraint:
    token_ids, biases = zip(*params.logit_bias, strict=True)

    def shift(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        row[[*token_ids]] += np.array(biases, np.float32)

    return shift


def _no_repeat(size: int, content: Mask | None = None) -> Constraint:
    """Ban every token that would complete an n-gram of the prefix, or of the generated tokens that are `content`."""
    repeats = Repeats(size)

    def ban(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        row[repeats.after(prefix if content is None else generated[content[generated]])] = -np.inf

    return ban


def _no_early_end(params: DecodingParams, vocab: Vocab) -> Constraint:
    """A text that has all its sentences may end sooner: a model that must go on begins another topic."""
    end_ids = np.array(sorted(vocab.end_ids | set(params.stop_token_ids)), np.int32)
    said = said_along(vocab)

    def ban(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        if len(generated) < params.min_new_tokens and not (
            params.sentences and said.at(generated).has(params.sentences)
        ):
            row[end_ids] = -np.inf

    return ban


def _no_adjacent_repeat(params: DecodingParams, vocab: Vocab) -> Constraint:
    first_char = vocab.classes.first_char

    def ban(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        last = vocab.decode(generated[-_MAX_CHAR_TOKENS:])[-1:]
        if last and is_cjk(last):
            row[first_char == ord(last)] = -np.inf

    return ban


def _too_early(marks: Mask, gap: int, shift: float, vocab: Vocab) -> Constraint:
    """Shift the marked tokens that come less than `gap` CJK characters after the last punctuation."""
    mark_ids = np.flatnonzero(marks)
    lead = vocab.classes.lead_cjk[mark_ids]
    wide_only = ~vocab.classes.ascii_punct[mark_ids]
    num_since = num_cjk_since_punctuation(vocab)

    def change(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        early = num_since.at(generated) + lead < gap
        if len(generated) and vocab.token_bytes(int(generated[-1]))[-1:].isalnum():
            early &= wide_only  # 3.5 is no sentence end, 3,000 no pause
        row[mark_ids[early]] += shift

    return change


def num_cjk_since_punctuation(vocab: Vocab) -> Along[int]:
    """CJK characters since the last punctuation, along the tokens of a text."""
    classes = vocab.classes
    punct, tail_cjk, num_cjk = classes.punct, classes.tail_cjk, classes.num_cjk
    return Along(0, lambda count, token_id: int(tail_cjk[token_id] if punct[token_id] else count + num_cjk[token_id]))
