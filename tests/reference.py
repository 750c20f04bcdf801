"""The slow and obvious way: every rule again, on whole rows and whole texts, with nothing kept between steps."""

import itertools
import math
import re
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

import numpy as np

from skydraft.characters import is_punctuation
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


def _sure(row: Any) -> list[int]:
    """The token of more than half of the probability."""
    return np.flatnonzero(probabilities(row.astype(np.float64)) > 0.5).tolist() if row.max() > -np.inf else []


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
    written = prefix[prompt_len:]
    start, thinks = answer_start(written, params, vocab)
    generated = written[start:]
    openers = [at for at in range(vocab.size) if vocab.pieces[at].lstrip()[:1] in (b"{", b"`")]
    openers += [at for at in range(vocab.size) if vocab.pieces[at].lstrip() in (b"<", b"<tool_call>")]
    chance = probabilities(row.astype(np.float64))[openers].sum()
    if not thinks and len(generated) <= 8 and not vocab.text_bytes(generated).strip() and chance < params.min_call_prob:
        edited[openers] = -np.inf
    last = slice(-params.penalty_window if params.penalty_window else None, None)
    for token_id in sorted(set(prefix[last])):
        _scale(edited, token_id, params.repetition_penalty)
    for token_id in range(vocab.size):  # OpenAI: mu[j] -> mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence
        count = written[last].count(token_id)
        lowered = count * params.frequency_penalty + (count > 0) * params.presence_penalty
        edited[token_id] -= np.float32(lowered)
    for token_id, bias in params.logit_bias:
        edited[token_id] += np.float32(bias)
    if params.no_repeat_ngram_size:
        _ban_ngrams(edited, prefix, params.no_repeat_ngram_size)
    if thinks:
        return row if edited.max() == -np.inf else edited
    text = vocab.decode(generated)
    said = params.sentences and Said().then(text.encode()).has(params.sentences)
    if len(generated) < params.min_new_tokens and not said:
        edited[[*vocab.end_ids, *params.stop_token_ids]] = -np.inf
    content = [token_id for token_id in generated if _is_content(vocab, token_id)]
    if params.no_adjacent_repeat:
        edited[[i for i in range(vocab.size) if _is_repeat(i, generated, content, vocab)]] = -np.inf
    if params.content_ngram_size:
        _ban_ngrams(edited, content, params.content_ngram_size, spared=_sure(edited))
        _ban_ngrams(edited, content, 2 * params.content_ngram_size)
    for token_id in {i for i in generated[last] if _is_content(vocab, i)} - {*_sure(edited)}:
        _scale(edited, token_id, params.content_penalty)
    is_end = [bool(set(filter(is_punctuation, _text(vocab, i))) - set("、﹑､")) for i in generated]
    num = [Said().then(vocab.text_bytes(generated[:end])).num_sentences for end in range(len(generated) + 1)]
    since = [_cjk_since(ends, generated, vocab) for ends in (is_end, [a < b for a, b in itertools.pairwise(num)])]
    for token_id in range(vocab.size):
        _shape(edited, token_id, generated, since, params, vocab)
    return row if edited.max() == -np.inf else edited


def follow_grammar(row: Any, prefix: Seq[int], prompt_len: int, params: DecodingParams, vocab: Vocab) -> Any:
    """The row without what the grammar does not allow; all that it does is alike where the model rules it out."""
    written = [int(token_id) for token_id in list(prefix)[prompt_len:]]
    start, thinks = answer_start(written, params, vocab)
    if thinks and params.think_budget and len(written) >= params.think_budget:
        return np.where(np.arange(vocab.size) == _next_of_end(written, params, vocab), row, -np.inf).astype(row.dtype)
    if not params.grammar:
        return row
    allowed = _allowed(written, start, thinks, params, vocab)
    masked = np.where(allowed, row, -np.inf).astype(row.dtype)
    return masked if masked.max() > -np.inf else np.where(allowed, 0, -np.inf).astype(row.dtype)


def _spoken(token_ids: Seq[int], params: DecodingParams, vocab: Vocab) -> bytes:
    tags = (params.think_start.encode(), params.think_end.encode())
    names = map(vocab.name_bytes, token_ids)
    both = zip(names, map(vocab.pieces.__getitem__, token_ids), strict=True)
    return b"".join(name if name and name in tags else text for name, text in both)


def answer_start(written: Seq[int], params: DecodingParams, vocab: Vocab) -> tuple[int, bool]:
    """How many tokens come before the answer, and whether it is still thought. By the text as a whole."""
    end, text = params.think_end.encode(), _spoken(written, params, vocab)
    opened = re.match(rb"[ \t\r\n]*" + re.escape(params.think_start.encode()), text) if params.think_start else None
    if not end or (params.think_start and not opened):
        return 0, False
    at = text.find(end, opened.end() if opened else 0)
    if at < 0:
        return 0, True
    after = at + len(end)
    begins = len(text) - len(text[after:].lstrip(b" \t\r\n"))
    for index in range(len(written)):
        if len(_spoken(written[: index + 1], params, vocab)) > begins:
            return index + (len(_spoken(written[:index], params, vocab)) < after), False
    return len(written), False


def _next_of_end(written: Seq[int], params: DecodingParams, vocab: Vocab) -> int:
    return max(range(vocab.size), key=lambda i: (len(_goes_on(i, written, params, vocab)), -i))


def _goes_on(token_id: int, written: Seq[int], params: DecodingParams, vocab: Vocab) -> bytes:
    """What a token says, if that goes on with the end tag."""
    end, text = params.think_end.encode(), _spoken(written, params, vocab)
    if params.think_start:
        text = text.lstrip(b" \t\r\n").removeprefix(params.think_start.encode())
    begun = max(n for n in range(len(end)) if text.endswith(end[:n]))
    piece = _spoken([token_id], params, vocab)
    return piece if end[begun:].startswith(piece) else b""


def _allowed(written: list[int], start: int, thinks: bool, params: DecodingParams, vocab: Vocab) -> Any:
    allowed = grammars.allowed(params.grammar, written[start:], vocab)
    text, tag = _spoken(written, params, vocab), params.think_start.encode()
    opening = np.zeros(vocab.size, bool)
    num_gap = sum(answer_start(written[:n], params, vocab)[0] == n for n in range(start)) if start else 0
    for i in range(vocab.size if params.think_end else 0):
        piece = _spoken([i], params, vocab)
        blank = bool(piece) and not piece.strip(b" \t\r\n")
        if thinks:
            after = answer_start([*written, i], params, vocab)
            allowed[i] = i not in vocab.end_ids and (after[1] or not _spoken_after([*written, i], params, vocab))
        elif start and start == len(written) and num_gap <= 2:
            allowed[i] |= blank
        elif not start and tag and piece:
            opens = (text + piece).lstrip(b" \t\r\n")
            opening[i] = tag.startswith(opens) or opens.startswith(tag)
    node = grammars.NODES[params.grammar]
    for token_id in written[start:]:
        node = grammars.after_piece(node, vocab.pieces[token_id])
    return opening if node == grammars.NONE and opening.any() else allowed | opening


def _spoken_after(written: Seq[int], params: DecodingParams, vocab: Vocab) -> bytes:
    text = _spoken(written, params, vocab).lstrip(b" \t\r\n").removeprefix(params.think_start.encode())
    return text.partition(params.think_end.encode())[2].strip(b" \t\r\n")


def _scale(edited: Any, token_id: int, penalty: float) -> None:
    edited[token_id] = edited[token_id] * penalty if edited[token_id] < 0 else edited[token_id] / penalty


def _ban_ngrams(edited: Any, history: Seq[int], size: int, spared: Seq[int] = ()) -> None:
    tail = history[len(history) - size + 1 :]
    for end in range(size, len(history) + 1):
        if history[end - size : end - 1] == tail and history[end - 1] not in spared:
            edited[history[end - 1]] = -np.inf


def _shape(edited: Any, token_id: int, generated: Seq[int], since: Any, params: DecodingParams, vocab: Vocab) -> None:
    """`since`: CJK characters since the last punctuation, and in the sentence."""
    text, last = _text(vocab, token_id), _text(vocab, generated[-1]) if generated else "。"
    marks = [char for char in text if is_punctuation(char)]
    lead = _num_cjk(text[: text.index(marks[0])].encode() if marks else vocab.pieces[token_id])
    if marks and all(char.isascii() for char in marks) and vocab.text_bytes(generated[-1:])[-1:].isalnum():
        return
    commas, gap = set(text) & set(_COMMAS), params.comma_gap
    num_recent = sum(not set(_COMMAS).isdisjoint(_text(vocab, i)) for i in generated[-4 * (gap + 1) :])
    is_early = num_recent >= 4 if commas <= set("、﹑､") else since[0] + lead < gap
    follows = set(_COMMAS + _STOPS).isdisjoint(last) or _tail(last.encode())
    if commas and lead < gap and (is_early or not follows):
        edited[token_id] = -np.inf
    within = not generated or _num_cjk(vocab.pieces[generated[-1]]) or set(last) & set(_COMMAS)
    waits = set(text) & set(_STOPS) or (within and token_id in vocab.end_ids | set(params.stop_token_ids))
    if waits and since[1] + lead < params.full_stop_gap:
        edited[token_id] += params.full_stop_shift


def _is_repeat(token_id: int, generated: Seq[int], content: Seq[int], vocab: Vocab) -> bool:
    """Whether a token repeats one or two of content, or the last character outside 人人 大大 说说 高高 高高兴兴."""
    text, before = _text(vocab, token_id).strip(), vocab.decode(generated)
    in_word = re.search("(?<!人)人$|(?<!大)大$|(?<!说)说$|(?<!高)高(高兴)?$", before) and text[1:2] != before[-1]
    is_last = content[-1:] == [token_id] and len(text) > 1
    is_back = content[-2:-1] == [token_id] and content[-3:-2] == content[-1:]
    is_double = _is_cjk(before[-1:]) and _is_content(vocab, token_id) and text[0] == before[-1] and not in_word
    return is_last or is_back or is_double


def _cjk_since(ends: Seq[bool], generated: Seq[int], vocab: Vocab) -> int:
    """CJK characters begun since the last token that ends something. Marks spelled in several tokens end nothing."""
    at = max((at for at in range(len(generated)) if ends[at]), default=-1)
    return (_tail(vocab.pieces[generated[at]]) if at >= 0 else 0) + _num_cjk(vocab.text_bytes(generated[at + 1 :]))


def _tail(piece: bytes) -> int:
    """CJK characters after the last punctuation."""
    marks = [char for char in piece.decode(errors="ignore") if is_punctuation(char)]
    return _num_cjk(piece.rpartition(marks[-1].encode())[2] if marks else piece)


def _num_cjk(piece: bytes) -> int:
    """CJK characters that begin in bytes of UTF-8, each by its first one: 0xE4 to 0xE9."""
    return sum(0xE4 <= byte <= 0xE9 for byte in piece)


def _text(vocab: Vocab, token_id: int) -> str:
    return vocab.pieces[token_id].decode(errors="ignore")


def _is_content(vocab: Vocab, token_id: int) -> bool:
    text = _text(vocab, token_id)
    return any(map(_is_cjk, text)) and all(_is_cjk(char) or char.isspace() for char in text)


def _is_cjk(char: str) -> bool:
    return "\u4e00" <= char <= "\u9fff"


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


def tokens_per_s(alpha: float, k: int, draft_ms: float, forward_ms: Seq[float], max_rows: int) -> float:
    """What rounds of k drafts give, summed over every number of accepted drafts."""
    tokens = spent = 0.0
    for accepted in range(k + 1):
        chance = alpha**accepted * ((1 - alpha) if accepted < k else 1)
        passes = accepted // max_rows + 1  # the pass that holds the row of the first difference is the last
        rows = [min(max_rows, k + 1 - start * max_rows) for start in range(passes)]
        known = len(forward_ms)
        cost = sum(forward_ms[num - 1] if num <= known else num * forward_ms[-1] / known for num in rows)
        tokens += chance * (accepted + 1)
        spent += chance * (k * draft_ms + cost)
    return 1e3 * tokens / spent
