"""Constraints: pure functions of the prefix that edit a row of logits in a few places.

`repetition_penalty`, `no_repeat_ngram_size` and `min_new_tokens` equal transformers' logits processors: on raw logits,
prompt included, in that order. `frequency_penalty`, `presence_penalty` and `logit_bias` are OpenAI's:
mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias[j], where c[j] counts how often token j was generated. The
styles for fluent Chinese look at the generated part. They prevent repeated characters (F9), a comma after every second
character (F10), and penalties that drive a model from one punctuation mark to the next (F12).

A row costs its new tokens (`incremental`). A penalty also costs its distinct tokens, an n-gram ban its n-gram's length.
"""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from skydraft.characters import COMMA_LIKE, DOUBLED, is_cjk
from skydraft.choosing.incremental import Along, Repeats, Tally
from skydraft.choosing.stopping import Said, said_along
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Mask, TokenIds, Vocab, check_chinese, kept_with_vocab
from skydraft.errors import OptionError

# Edits a row [vocab] in place, given the prefix before it and the generated part of that.
Constraint: TypeAlias = Callable[[npt.NDArray[Any], TokenIds, TokenIds], None]

_OPENERS = (b"{", b"`", b"<tool")
_MAX_BLANK = 8  # tokens of white space before a call
_MAX_WORD_TOKENS = 32  # eight characters, each of at most four bytes in UTF-8
_SURE = 0.5  # probability above which a token may be the rest of a word


def constraints_of(params: DecodingParams, vocab: Vocab) -> list[tuple[Constraint, bool]]:
    """Return the constraints that `params` turns on, in order, as (constraint, whether it begins after thinking).
    Raises OptionError."""
    biased = [token_id for token_id, _ in params.logit_bias]
    for name, ids in (("--logit-bias", biased), ("--stop-token-ids", params.stop_token_ids)):
        if (last := max(ids, default=0)) >= vocab.size:
            raise OptionError(f"{name}: the vocabulary of {vocab.size} tokens has no id {last}.")
    if params.shapes_chinese:
        check_chinese(vocab)
    window = params.penalty_window
    wanted: list[tuple[object, bool, Callable[[DecodingParams, Vocab], Constraint]]] = [
        (params.min_call_prob, True, _no_unlikely_call),  # first, since it needs the raw row
        (params.repetition_penalty != 1, False, lambda p, _: _penalty(p.repetition_penalty, window)),
        (params.frequency_penalty or params.presence_penalty, False, _occurrence_penalty),
        (params.logit_bias, False, _logit_bias),
        (params.no_repeat_ngram_size, False, lambda p, _: _no_repeat(p.no_repeat_ngram_size)),
        (params.min_new_tokens, True, _no_early_end),
        (params.no_adjacent_repeat, True, _no_adjacent_repeat),
        (params.content_ngram_size, True, lambda p, v: _no_repeat(p.content_ngram_size, v.classes.content)),
        (params.content_penalty != 1, True, lambda p, v: _penalty(p.content_penalty, window, v.classes.content)),
        (params.comma_gap or params.full_stop_gap, True, _no_early_punctuation),
    ]  # fmt: skip
    return [(make(params, vocab), is_of_answer) for is_on, is_of_answer, make in wanted if is_on]


@kept_with_vocab
def call_openers(vocab: Vocab) -> TokenIds:
    """Return tokens that begin a tool call, its code fence, or a template's tag around it."""
    texts = enumerate(piece.lstrip() for piece in vocab.pieces)
    return np.array([i for i, text in texts if text.startswith(_OPENERS) or text == b"<"], np.int32)


def _no_unlikely_call(params: DecodingParams, vocab: Vocab) -> Constraint:
    """Ban the beginning of an improbable tool call. Small models call a tool even if the many possible words of an
    answer are likelier together."""
    openers = call_openers(vocab)

    def ban(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        if len(generated) > _MAX_BLANK or vocab.text_bytes(generated).strip():
            return  # the answer has begun
        if _share(row, openers) < params.min_call_prob:
            row[openers] = -np.inf

    return ban


def _share(row: npt.NDArray[Any], token_ids: npt.NDArray[Any] | list[int]) -> float:
    """Return the probability of these tokens together."""
    logits = np.nan_to_num(row.astype(np.float64), posinf=1e300, neginf=-1e300)
    weights = np.exp(logits - logits.max())  # [vocab]
    return float(weights[token_ids].sum() / weights.sum())


def _unsure(row: npt.NDArray[Any], token_ids: TokenIds) -> TokenIds:
    """Return these tokens without one that the model is sure of, which may be the rest of a word."""
    best = int(row.argmax())
    return token_ids[token_ids != best] if best in token_ids and _share(row, [best]) > _SURE else token_ids


def _penalty(penalty: float, window: int, content: Mask | None = None) -> Constraint:
    """Divide positive logits by the penalty, multiply negative ones (CTRL, arXiv 1909.05858)."""
    tally = Tally(window)

    def scale(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        token_ids = tally.counts(prefix if content is None else generated)[0]
        if content is not None:
            token_ids = _unsure(row, token_ids[content[token_ids]])
        scores = row[token_ids]
        row[token_ids] = np.where(scores < 0, scores * penalty, scores / penalty)

    return scale


def _occurrence_penalty(params: DecodingParams, vocab: Vocab) -> Constraint:
    tally = Tally(params.penalty_window)

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
    """Ban every token that would repeat an n-gram of the prefix, or of the generated tokens that are `content`.

    A content token that the model is sure of is banned only if it would repeat an n-gram of twice that length.
    """
    repeats, copies = Repeats(size), Repeats(2 * size)

    def ban(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        if content is None:
            row[repeats.after(prefix)] = -np.inf
        else:
            text = generated[content[generated]]
            row[np.append(_unsure(row, repeats.after(text)), copies.after(text))] = -np.inf

    return ban


def _no_early_end(params: DecodingParams, vocab: Vocab) -> Constraint:
    """Ban an early end, unless the text has all its sentences: a model that must continue begins another topic."""
    end_ids = np.array(sorted(vocab.end_ids | set(params.stop_token_ids)), np.int32)
    said = said_along(vocab)

    def ban(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        has_all = params.sentences and said.at(generated).has(params.sentences)
        if len(generated) < params.min_new_tokens and not has_all:
            row[end_ids] = -np.inf

    return ban


@kept_with_vocab
def _doubled(vocab: Vocab) -> str:
    """Return all words with a doubled character, from our lists and the vocabulary, separated by spaces."""
    own = b" ".join(vocab.pieces[token_id] for token_id in np.flatnonzero(vocab.classes.content)).decode()
    return " ".join([*DOUBLED, *(word for word in own.split() if re.search(r"(.)\1", word))])


def _no_adjacent_repeat(params: DecodingParams, vocab: Vocab) -> Constraint:
    """Ban a character twice in a row, except in reduplicated words. Also ban repeating a token of several characters or
    a pair of content tokens, even after punctuation.

    A rare character (outside level 1 of GB 2312) may repeat if the model is sure of it.
    """
    classes, words = vocab.classes, _doubled(vocab)

    def ban(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        recent = generated[-_MAX_WORD_TOKENS:]
        tail, content = vocab.decode(recent), recent[classes.content[recent]]
        row[[i for i in content[-1:] if classes.num_cjk[i] > 1]] = -np.inf
        row[content[-2:-1] if len(content) > 2 and content[-3] == content[-1] else []] = -np.inf
        if not tail or not is_cjk(last := tail[-1]):
            return
        repeats = np.flatnonzero(classes.first_char == ord(last))
        known = re.findall(rf"(\S*{last})({last}\S*)", words)
        if not b"\xb0" <= last.encode("gb2312", "ignore") < b"\xd8" and _share(row, repeats) > _SURE:
            known.append((last, last))
        rests = [rest for head, rest in known if re.search(f"(?<!{head[0]}){head}$", tail)]
        texts = [vocab.pieces[i].decode().strip() if rests else "" for i in repeats]
        fits = [any(x[: len(y)] == y[: len(x)] and x[len(y) :][:1] != last for y in rests) for x in texts]
        row[repeats[~np.array(fits, bool)]] = -np.inf

    return ban


def _no_early_punctuation(params: DecodingParams, vocab: Vocab) -> Constraint:
    """Ban commas until enough CJK characters follow the last punctuation other than 、. Shift full stops until a
    sentence has enough characters.

    Items of a list may be short: 、 waits only if the last 4 * (gap + 1) tokens have four commas. After a word or a
    comma the end of the text waits like a full stop.
    """
    classes, gap, ends = vocab.classes, params.comma_gap, [*vocab.end_ids, *params.stop_token_ids]
    is_mark, starts = classes.comma | classes.full_stop, classes.punct.copy()
    marks = np.union1d(np.flatnonzero(is_mark), ends).astype(np.int32)
    is_comma, lead = classes.comma[marks], classes.lead_cjk[marks]
    is_stop, is_end = classes.full_stop[marks], np.isin(marks, ends)
    is_listing = is_comma & np.array([COMMA_LIKE & {*vocab.decode([i])} <= {*"、﹑､"} for i in marks.tolist()], bool)
    starts[marks[is_listing]] = False

    def then(before: tuple[Said, int, int], token_id: int) -> tuple[Said, int, int]:
        said, num, tail = before[0].then(vocab.pieces[token_id]), classes.num_cjk[token_id], classes.tail_cjk[token_id]
        ended = said.num_sentences > before[0].num_sentences
        return said, int(tail if starts[token_id] else before[1] + num), int(tail if ended else before[2] + num)

    state = Along((Said(), 0, 0), then)

    def change(row: npt.NDArray[Any], prefix: TokenIds, generated: TokenIds) -> None:
        (_, since, in_sentence), last = state.at(generated), generated[-1:]
        is_slow = classes.comma[generated[-4 * (gap + 1) :]].sum() < 4
        follows = not is_mark[last].all() or classes.tail_cjk[last].any()
        is_within = not len(last) or classes.num_cjk[last[0]] > 0 or classes.comma[last[0]]
        early_comma = is_comma & (np.where(is_listing, gap * is_slow, since) * follows + lead < gap)
        early_stop = (is_stop | is_end if is_within else is_stop) & (in_sentence + lead < params.full_stop_gap)
        if len(last) and vocab.pieces[last[0]][-1:].isalnum():  # the marks of 3.5 and 3,000 are allowed
            early_comma, early_stop = (early & ~classes.ascii_punct[marks] for early in (early_comma, early_stop))
        row[marks[early_comma]] = -np.inf
        row[marks[early_stop]] += params.full_stop_shift

    return change
