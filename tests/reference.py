"""The slow and obvious way: every rule again, on whole rows and whole texts, with nothing kept between steps."""

from __future__ import annotations

import codecs
import math
import unicodedata
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

import numpy as np

from skydraft.choosing.stopping import Said, Stopping
from skydraft.config import DecodingParams
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from tests import grammars

_MASK = 2**64 - 1
_COMMAS, _STOPS = "，,、；;：:﹐﹑﹔﹕､", "。．.！!？?｡﹒﹗﹖"


def splitmix(word: int) -> int:
    """One output of SplitMix64 from its state, as published by Steele, Lea and Flood."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


@lru_cache(maxsize=200_000)
def noise(seed: int, position: int, token_id: int) -> float:
    key = splitmix(splitmix(seed) + position)
    word = splitmix(key + token_id * 0x9E3779B97F4A7C15)
    uniform = min(((word >> 11) + 0.5) / 2**53, 1 - 2.0**-53)
    return -math.log(-math.log(uniform))


def warped(row: Any, params: DecodingParams) -> Any:
    """Temperature, 24 nats, top-k, top-p, min-p, each by masking the whole row, as transformers' warpers do. [vocab]"""
    scores = row.astype(np.float64) / params.temperature
    scores = np.where(row < row.max() - row.dtype.type(24 * params.temperature), -np.inf, scores)
    if params.top_k:
        scores = np.where(scores < np.sort(scores)[-min(params.top_k, len(scores))], -np.inf, scores)
    if params.top_p < 1:
        order = np.argsort(scores, kind="stable")
        remove = np.cumsum(probabilities(scores)[order]) <= 1 - params.top_p
        remove[-1] = False
        scores[order[remove]] = -np.inf
    if params.min_p > 0:
        probs = probabilities(scores)
        scores = np.where(probs < params.min_p * probs.max(), -np.inf, scores)
    return scores


def probabilities(scores: Any) -> Any:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def sample(row: Any, params: DecodingParams, position: int) -> int:
    if params.temperature == 0:
        return int(row.argmax())
    scores = warped(row, params)
    kept = np.flatnonzero(scores > -np.inf)
    return int(max(kept, key=lambda token_id: scores[token_id] + noise(params.seed, position, int(token_id))))


def constrained(row: Any, prefix: Seq[int], prompt_len: int, params: DecodingParams, vocab: Vocab) -> Any:
    """The edited row. Rules for Chinese are asked of texts, token by token, never of token classes."""
    row = follow_grammar(row, prefix, prompt_len, params, vocab)
    edited = row.copy()
    prefix = [int(token_id) for token_id in prefix]
    generated = prefix[prompt_len:]
    openers = [at for at in range(vocab.size) if vocab.pieces[at].lstrip()[:1] in (b"{", b"`")]
    openers += [at for at in range(vocab.size) if vocab.pieces[at].lstrip() in (b"<", b"<tool_call>")]
    chance = probabilities(row.astype(np.float64))[openers].sum()
    if len(generated) <= 8 and not vocab.text_bytes(generated).strip() and chance < params.min_call_prob:
        edited[openers] = -np.inf
    for token_id in sorted(set(prefix)):
        _scale(edited, token_id, params.repetition_penalty)
    for token_id in range(vocab.size):  # OpenAI: mu[j] -> mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence
        count = generated.count(token_id)
        lowered = count * params.frequency_penalty + (count > 0) * params.presence_penalty
        edited[token_id] -= np.float32(lowered)
    for token_id, bias in params.logit_bias:
        edited[token_id] += np.float32(bias)
    if params.no_repeat_ngram_size:
        _ban_ngrams(edited, prefix, params.no_repeat_ngram_size)
    text = vocab.decode(generated)
    said = params.sentences and Said().then(text.encode()).has(params.sentences)
    if len(generated) < params.min_new_tokens and not said:
        edited[[*vocab.end_ids, *params.stop_token_ids]] = -np.inf
    content = [token_id for token_id in generated if _is_content(vocab, token_id)]
    for token_id in sorted(set(content)):
        _scale(edited, token_id, params.content_penalty)
    if params.content_ngram_size:
        _ban_ngrams(edited, content, params.content_ngram_size)
    for token_id in range(vocab.size):
        _shape(edited, token_id, generated, params, vocab)
    return row if edited.max() == -np.inf else edited


def follow_grammar(row: Any, prefix: Seq[int], prompt_len: int, params: DecodingParams, vocab: Vocab) -> Any:
    """The row without what the grammar does not allow; all that it does is alike where the model rules it out."""
    if not params.grammar:
        return row
    allowed = grammars.allowed(params.grammar, list(prefix)[prompt_len:], vocab)
    masked = np.where(allowed, row, -np.inf).astype(row.dtype)
    return masked if masked.max() > -np.inf else np.where(allowed, 0, -np.inf).astype(row.dtype)


def _scale(edited: Any, token_id: int, penalty: float) -> None:
    edited[token_id] = edited[token_id] * penalty if edited[token_id] < 0 else edited[token_id] / penalty


def _ban_ngrams(edited: Any, history: Seq[int], size: int) -> None:
    tail = history[len(history) - size + 1 :]
    for end in range(size, len(history) + 1):
        if history[end - size : end - 1] == tail:
            edited[history[end - 1]] = -np.inf


def _shape(edited: Any, token_id: int, generated: Seq[int], params: DecodingParams, vocab: Vocab) -> None:
    text = _text(vocab, token_id)
    written = vocab.text_bytes(generated)
    last = codecs.getincrementaldecoder("utf-8")("replace").decode(written)[-1:]  # a finished character
    is_repeat = _is_content(vocab, token_id) and _is_cjk(last) and text.lstrip()[0] == last
    if params.no_adjacent_repeat and is_repeat:
        edited[token_id] = -np.inf
    marks = [char for char in text if _is_mark(char)]
    if not marks:
        return
    gap = _cjk_since_mark(generated, vocab) + sum(map(_is_cjk, text[: text.index(marks[0])]))
    in_number = (
        bool(generated) and vocab.token_bytes(generated[-1])[-1:].isalnum() and all(char.isascii() for char in marks)
    )
    if any(char in _COMMAS for char in marks) and gap < params.comma_gap and not in_number:
        edited[token_id] = -np.inf
    if any(char in _STOPS for char in marks) and gap < params.full_stop_gap and not in_number:
        edited[token_id] += params.full_stop_shift


def _cjk_since_mark(generated: Seq[int], vocab: Vocab) -> int:
    """CJK characters begun since the last token with punctuation, each by its first byte: 0xE4 to 0xE9 in UTF-8.

    Punctuation that is spelled in several tokens is not seen as such.
    """
    since = b""
    for token_id in reversed(generated):
        text = _text(vocab, token_id)
        if marks := [index for index, char in enumerate(text) if _is_mark(char)]:
            since = text[marks[-1] + 1 :].encode() + since
            break
        since = vocab.token_bytes(token_id) + since
    return sum(0xE4 <= byte <= 0xE9 for byte in since)


def _text(vocab: Vocab, token_id: int) -> str:
    return vocab.token_bytes(token_id).decode(errors="ignore")


def _is_content(vocab: Vocab, token_id: int) -> bool:
    text = _text(vocab, token_id)
    return any(map(_is_cjk, text)) and all(_is_cjk(char) or char.isspace() for char in text)


def _is_cjk(char: str) -> bool:
    return "\u4e00" <= char <= "\u9fff"


def _is_mark(char: str) -> bool:
    return unicodedata.category(char).startswith("P")


def row_after(engine: Engine, prefix: Seq[int]) -> Any:
    sequence = engine.open(list(prefix))
    row = sequence.extend([int(prefix[-1])])[0].copy()
    sequence.close()
    return row


def next_token(engine: Engine, prefix: Seq[int], prompt_len: int, params: DecodingParams) -> int:
    edited = constrained(row_after(engine, prefix), prefix, prompt_len, params, engine.vocab)
    return sample(edited, params, len(prefix) - prompt_len)


def plain(engine: Engine, prompt: Seq[int], params: DecodingParams) -> tuple[tuple[int, ...], str]:
    """A fresh sequence per step, no rollback: tokens and the finish reason."""
    stopping = Stopping(params, engine.vocab, min(params.max_new_tokens, engine.context_len - len(prompt)))
    token_ids = list(prompt)
    while True:
        token_ids.append(next_token(engine, token_ids, len(prompt), params))
        generated = token_ids[len(prompt) :]
        if reason := stopping.finish(np.array(generated, np.int32)):
            return tuple(generated), reason


def tokens_per_s(
    alpha: float, k: int, draft_ms: float, forward_ms: Seq[float], max_rows: int, wire_ms: float = 0.0
) -> float:
    """What rounds of k drafts give, summed over every number of accepted drafts."""
    tokens = spent = 0.0
    for accepted in range(k + 1):
        chance = alpha**accepted * ((1 - alpha) if accepted < k else 1)
        passes = accepted // max_rows + 1  # the pass that holds the row of the first difference is the last
        rows = [min(max_rows, k + 1 - start * max_rows) for start in range(passes)]
        known = len(forward_ms)
        cost = sum(forward_ms[num - 1] if num <= known else num * forward_ms[-1] / known for num in rows)
        tokens += chance * (accepted + 1)
        spent += chance * (k * draft_ms + wire_ms + cost)
    return 1e3 * tokens / spent
