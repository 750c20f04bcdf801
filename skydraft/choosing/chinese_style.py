"""Constraints for fluent Chinese (styles `zh-short`, `zh-detailed`), over the generated part of the prefix.

They come from field reports: repeated characters (F9), a comma after every second character (F10), and
penalties that drive a model from one punctuation mark to the next (F12).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from skydraft.characters import is_cjk
from skydraft.choosing.constraints import Constraint, Edit
from skydraft.choosing.incremental import Along, Repeats, Tally
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Mask, TokenIds, Vocab

_MAX_CHAR_TOKENS = 4  # a character in UTF-8 has at most four bytes, so at most four tokens


def style_constraints(params: DecodingParams, vocab: Vocab, prompt_len: int) -> list[Constraint]:
    """The constraints that `params` turns on, in a fixed order: scale, bans, shift."""
    constraints: list[Constraint] = []
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
        if _ends_in_ascii_word(generated, vocab):
            early &= wide_only  # 3.5 is no sentence end, 3,000 no pause
        return mark_ids[early]

    return find


def num_cjk_since_punctuation(vocab: Vocab) -> Along[int]:
    """CJK characters since the last punctuation, along the tokens of a text."""
    classes = vocab.classes
    punct, tail_cjk, num_cjk = classes.punct, classes.tail_cjk, classes.num_cjk
    return Along(0, lambda count, token_id: int(tail_cjk[token_id] if punct[token_id] else count + num_cjk[token_id]))


def _ends_in_ascii_word(generated: TokenIds, vocab: Vocab) -> bool:
    last = vocab.token_bytes(int(generated[-1]))[-1:] if len(generated) else b""
    return last.isalnum()
