"""Constraints for fluent Chinese (styles `zh-short`, `zh-detailed`), over the generated part of the prefix.

They come from field reports: repeated characters (F9), a comma after every second character (F10), and
penalties that drive a model from one punctuation mark to the next (F12).
"""

from __future__ import annotations

import numpy as np

from skydraft.characters import is_cjk
from skydraft.config import DecodingParams
from skydraft.decoding.constraints import Constraint, Edit, repeating
from skydraft.engines.vocab import TokenIds, Vocab

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
        constraints.append(_comma_gap(params.comma_gap, vocab, prompt_len))
    if params.full_stop_gap:
        constraints.append(_full_stop_gap(params.full_stop_gap, params.full_stop_shift, vocab, prompt_len))
    return constraints


def _content_penalty(penalty: float, vocab: Vocab, prompt_len: int) -> Constraint:
    content = vocab.classes.content

    def scale(prefix: TokenIds) -> list[Edit]:
        generated = prefix[prompt_len:]
        return [Edit("scale", generated[content[generated]], penalty)]

    return scale


def _content_ngram(size: int, vocab: Vocab, prompt_len: int) -> Constraint:
    content = vocab.classes.content

    def ban(prefix: TokenIds) -> list[Edit]:
        generated = prefix[prompt_len:]
        return [Edit("ban", repeating(generated[content[generated]], size))]

    return ban


def _no_adjacent_repeat(vocab: Vocab, prompt_len: int) -> Constraint:
    first_char = vocab.classes.first_char

    def ban(prefix: TokenIds) -> list[Edit]:
        last = vocab.decode(prefix[prompt_len:][-_MAX_CHAR_TOKENS:])[-1:]
        if not (last and is_cjk(last)):
            return []
        return [Edit("ban", np.flatnonzero(first_char == ord(last)).astype(np.int32))]

    return ban


def _comma_gap(gap: int, vocab: Vocab, prompt_len: int) -> Constraint:
    commas = np.flatnonzero(vocab.classes.comma).astype(np.int32)
    lead = vocab.classes.lead_cjk[commas]
    wide_only = ~vocab.classes.ascii_punct[commas]

    def ban(prefix: TokenIds) -> list[Edit]:
        generated = prefix[prompt_len:]
        too_early = num_cjk_since_punctuation(generated, vocab, gap) + lead < gap
        if _ends_in_ascii_word(generated, vocab):
            too_early &= wide_only  # 3,000 is no pause
        return [Edit("ban", commas[too_early])]

    return ban


def _full_stop_gap(gap: int, amount: float, vocab: Vocab, prompt_len: int) -> Constraint:
    stops = np.flatnonzero(vocab.classes.full_stop).astype(np.int32)
    lead = vocab.classes.lead_cjk[stops]
    wide_only = ~vocab.classes.ascii_punct[stops]

    def shift(prefix: TokenIds) -> list[Edit]:
        generated = prefix[prompt_len:]
        too_early = num_cjk_since_punctuation(generated, vocab, gap) + lead < gap
        if _ends_in_ascii_word(generated, vocab):
            too_early &= wide_only  # 3.5 is no sentence end
        return [Edit("shift", stops[too_early], amount)]

    return shift


def num_cjk_since_punctuation(generated: TokenIds, vocab: Vocab, enough: int) -> int:
    """CJK characters since the last punctuation in `generated`; counting ends at `enough`."""
    classes, count = vocab.classes, 0
    punct = classes.punct
    for token_id in generated[::-1]:
        if punct[token_id]:
            return count + int(classes.tail_cjk[token_id])
        count += int(classes.num_cjk[token_id])
        if count >= enough:
            break
    return count


def _ends_in_ascii_word(generated: TokenIds, vocab: Vocab) -> bool:
    last = vocab.token_bytes(int(generated[-1]))[-1:] if len(generated) else b""
    return last.isalnum()
