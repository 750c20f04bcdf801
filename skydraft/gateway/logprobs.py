"""Log-probabilities in OpenAI's shapes, for chats and for texts."""

import codecs
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any

from skydraft.decoding.receipt import ITS_OWN
from skydraft.engines.vocab import Vocab
from skydraft.types import Round, Score, Token

_LEAST = -9999.0  # JSON has no infinity


def _token_text(data: bytes) -> str:
    """A token's text; as OpenAI does, bytes that are no whole characters are spelled out."""
    with suppress(UnicodeDecodeError):
        return data.decode()
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_logprobs(vocab: Vocab, scores: Seq[Score], *, has_ids: bool = False) -> list[dict[str, Any]]:
    """With `has_ids` also what OpenAI's shape lacks: the id of each token, and whether it ends a text."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = vocab.name_bytes(token_id)
        told = {"token": _token_text(data), "logprob": _number(logprob), "bytes": list(data)}
        more = {"id": token_id} | ({"ends": True} if token_id in vocab.end_ids else {})
        return told | (more if has_ids else {})

    return [
        entry(each.token_id, each.logprob) | {"top_logprobs": [entry(*best) for best in each.best]} for each in scores
    ]


def both_logprobs(
    vocab: Vocab, scores: Iterable[Seq[Score | None]], num_tokens: int, num_best: int
) -> dict[str, list[dict[str, Any] | None]]:
    """For each of so many tokens what the draft model and the target say of it; None where a model did not read it."""

    cut = [[each and replace(each, best=each.best[:num_best]) for each in side[:num_tokens]] for side in scores]
    told = [[token_logprobs(vocab, [each], has_ids=True)[0] if each else None for each in side] for side in cut]
    return dict(zip(("draft", "target"), told, strict=True))


def text_logprobs(vocab: Vocab, scores: Seq[Score], offset: int) -> dict[str, Any]:
    """The `logprobs` of the part of a text that begins after `offset` characters."""
    names = [vocab.name_bytes(each.token_id) for each in scores]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts = itertools.accumulate((len(decoder.decode(name)) for name in names), initial=offset)
    return {
        "tokens": [_token_text(name) for name in names],
        "token_logprobs": [_number(each.logprob) for each in scores],
        "top_logprobs": [None if each.logprob is None else _best(vocab, each) for each in scores],
        "text_offset": list(itertools.islice(starts, len(names))),
    }


def _best(vocab: Vocab, score: Score) -> dict[str, float | None]:
    shown = dict([*score.best, (score.token_id, score.logprob)])
    return {_token_text(vocab.name_bytes(each)): _number(logprob) for each, logprob in shown.items()}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST)


def named_tokens(tokens: Seq[Token], first: int, done: Round) -> dict[str, Any]:
    """The ids of a run that begins at `first` of its round, how many characters each adds, and which were forced."""
    drafted = tokens[0].origin not in ITS_OWN
    forced = [at for at in range(len(tokens)) if drafted and done.block.is_forced(first + at)]
    named = {"token_ids": [each.token_id for each in tokens], "token_chars": [len(each.text) for each in tokens]}
    return named | ({"forced": forced} if forced else {})
