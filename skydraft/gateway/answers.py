"""Make answers from a desk's events, whole or as server-sent events. All interfaces build on this."""

import codecs
import itertools
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from skydraft.decoding.accounts.receipt import ITS_OWN
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.vocab import Vocab
from skydraft.gateway.desk import Began, Ended, Event, Wrote
from skydraft.gateway.refusals import Refusal
from skydraft.gateway.requests import Order
from skydraft.gateway.schema import Body
from skydraft.prompts.tool_calls import Piece
from skydraft.types import FinishReason, Round, Score, StepRecord, Token

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # some clients split lines at these
_RECORD = (
    "round", "outcome", "reason", "num_draft", "num_accepted", "num_committed", "num_audited", "num_agreed", "wall_ms",
)  # fmt: skip


@dataclass
class WrittenCall:
    """A tool call so far. If it `is_whole`, its arguments are a JSON object, else the beginning of one."""

    name: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    arguments: str = ""
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one origin, as additions to a choice."""

    pieces: Seq[Piece]
    scores: Seq[Score] = ()
    ours: dict[str, Any] | None = None  # the chunk's key `skydraft`


@dataclass
class Choice:
    """One choice so far. `prefix` is the prompt, if it is echoed."""

    prefix: str = ""
    text: str = ""
    thought: str = ""
    calls: list[WrittenCall] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    both: dict[str, Any] = field(default_factory=dict)  # log-probabilities by both models, if requested
    began: Began = field(default_factory=Began)
    ended: Ended | None = None

    def take(self, piece: Piece) -> WrittenCall:
        if piece.name:
            self.calls.append(WrittenCall(piece.name))
        call = self.calls[-1]
        call.arguments += piece.text
        call.is_whole = piece.is_last
        return call

    @property
    def finish(self) -> FinishReason | None:
        return self.ended.finish if self.ended else None

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's name for why it ended: "tool_calls" only if the last call is whole."""
        if self.finish in (None, "length", "content_filter"):
            return self.finish
        return "tool_calls" if self.calls and self.calls[-1].is_whole else "stop"

    @property
    def figures(self) -> dict[str, Any]:
        """Statistics and receipt of the ended choice, and each model's tokens and cost."""
        assert self.ended
        stats, receipt = self.ended.stats, self.ended.receipt
        num_cloud = sum(token.origin in ITS_OWN for token in self.tokens)
        read = {"tokens_in": stats.tokens_in, "tokens_hit": stats.tokens_hit, "tokens_out": stats.tokens_out}
        edge = {"completion_tokens": len(self.tokens) - num_cloud, "cost": 0.0}
        cloud = {"completion_tokens": num_cloud, **read, "cost": stats.cost}
        usage = {"edge": edge, "cloud": cloud}
        return {"stats": asdict(stats), "receipt": asdict(receipt), "usage": usage} | self.both


class Answer(ABC):
    """One answer in progress. `ending` follows the last chunk of a stream."""

    ending = b""
    reads: ClassVar[type[Body]]
    tells_length_in_stream: ClassVar[bool] = False  # report a too long prompt in the stream, not by HTTP status

    def __init__(self, order: Order, vocab: Vocab) -> None:
        self._ask, self._vocab = order.ask, vocab
        self._body: Any = order.ask.body
        self._left_out = {"left_out": order.left_out} if order.left_out else {}
        self.choices = [Choice(_echoed(request, vocab)) for request in order.requests]

    @property
    def is_complete(self) -> bool:
        return all(choice.finish for choice in self.choices)

    @abstractmethod
    def first(self) -> Iterator[dict[str, Any]]: ...

    def take(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """Add an event to a choice, and yield its chunks. Raises the event if it is an error."""
        choice = self.choices[index]
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Began):
            choice.began = event
            choice.scores += self._wanted(event.prompt_scores)
        elif isinstance(event, Wrote):
            for run in self._runs(choice, event):
                yield from self._write(index, run)
        elif isinstance(event, Ended):
            choice.ended = event
            if (num_best := self._body.choice.logprobs) is not None:
                choice.both = {"logprobs": both_logprobs(self._vocab, event.scores, len(choice.tokens), num_best)}
            if event.pieces:
                yield from self._write(index, Run(event.pieces))

    @abstractmethod
    def _write(self, index: int, run: Run) -> Iterator[dict[str, Any]]:
        """Add a run to its choice, and yield its chunks in the order of its pieces."""

    def _runs(self, choice: Choice, event: Wrote) -> Iterator[Run]:
        """Yield the runs of a round, and add their tokens to the choice."""
        scores, first = iter(event.scores), 0
        for _, run in itertools.groupby(zip(event.tokens, event.pieces, strict=True), lambda each: each[0].origin):
            tokens, pieces = zip(*run, strict=True)
            scored = self._wanted(itertools.islice(scores, len(tokens)))
            begins = {"begins": choice.began.begins} if choice.began.begins and not choice.tokens else {}
            choice.scores += scored
            choice.tokens += tokens
            ours = begins | {"origin": tokens[0].origin, "round": tokens[0].round, "reason": event.done.record.reason}
            ours |= {"num_tokens": len(tokens)}
            ours |= named_tokens(tokens, first, event.done) if self._body.choice.token_ids else {}
            first += len(tokens)
            if tokens[-1] is event.tokens[-1]:
                ours["record"] = _shown(event.done.record)
                ours |= {"notice": event.notices} if event.notices else {}
            joined = _joined(itertools.chain(*pieces))
            text = "".join(token.text for token in tokens)
            ours |= {"text": text} if text != "".join(piece.text for piece in joined if piece.kind == "text") else {}
            yield Run(joined, scored, ours)

    def _wanted(self, scores: Iterable[Score]) -> list[Score]:
        """Cut each score to the number of best tokens that the client requested; empty without a request."""
        best, scores = self._ask.num_best, list(scores)
        return [] if best is None else [replace(each, best=each.best[:best]) for each in scores]

    @abstractmethod
    def last(self) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...

    @property
    def usage(self) -> tuple[int, int, int]:
        """(prompt tokens, each prompt once; cached tokens of the first prompt; tokens written)."""
        each, numbers = self._body.n or 1, [choice.began.num_prompt_tokens for choice in self.choices]
        ended = self.choices[0].ended
        cached = max(ended.stats.cached_tokens.edge, ended.stats.cached_tokens.cloud) if ended else 0
        return sum(numbers[::each]), min(cached, numbers[0]), sum(len(choice.tokens) for choice in self.choices)

    @property
    def num_reasoning(self) -> int:
        return sum(choice.ended.stats.num_reasoning_tokens for choice in self.choices if choice.ended)

    @staticmethod
    def refused(refusal: Refusal) -> dict[str, Any]:
        return refusal.body

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        return self.refused(refusal)

    def ping(self) -> bytes:
        """Return the bytes that keep a silent stream open."""
        return b": ping\n\n"

    def as_event(self, chunk: dict[str, Any]) -> bytes:
        """Encode a chunk as a server-sent event, named by the chunk's type, if any."""
        text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
        name = f"event: {chunk['type']}\n" if "type" in chunk else ""
        return f"{name}data: {text}\n\n".encode()

    def _ours(self, choice: Choice) -> dict[str, Any]:
        origins, ids = [token.origin for token in choice.tokens], [token.token_id for token in choice.tokens]
        ours = self._left_out | {"origins": origins, "finish_reason": choice.finish} | choice.figures
        ours |= {"begins": choice.began.begins} if choice.began.begins else {}
        return ours | ({"token_ids": ids} if self._body.choice.token_ids else {})


class ItemsAnswer(Answer):
    """An answer of one choice, with texts and calls as ordered items. The last item may be open."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._items: list[dict[str, Any]] = []

    def _write(self, index: int, run: Run) -> Iterator[dict[str, Any]]:
        for piece in run.pieces:
            if piece.kind == "call":
                yield from self._call(self.choices[index].take(piece), piece)
            else:
                yield from self._add(piece.kind, piece.text)

    @abstractmethod
    def _add(self, kind: Literal["text", "thinking"], text: str) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def _call(self, call: WrittenCall, piece: Piece) -> Iterator[dict[str, Any]]: ...


def _echoed(request: GenerateRequest, vocab: Vocab) -> str:
    if not request.scores_prompt:
        return ""
    return vocab.written(request.prompt_ids) if request.prompt_ids else request.messages[-1].content


def _shown(record: StepRecord) -> dict[str, Any]:
    link = {name: getattr(record.link, name) for name in ("rtt_ms", "bytes_up", "bytes_down")}
    return {name: getattr(record, name) for name in _RECORD} | link


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join adjacent pieces of one kind."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.kind == piece.kind and not piece.name:
            joined[-1] = replace(piece, text=last.text + piece.text, name=last.name)
        else:
            joined.append(piece)
    return joined


def _token_text(data: bytes) -> str:
    """Return a token's text. Spell out bytes that are not valid UTF-8, like OpenAI."""
    with suppress(UnicodeDecodeError):
        return data.decode()
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_logprobs(vocab: Vocab, scores: Seq[Score]) -> list[dict[str, Any]]:
    """Return scores in OpenAI's shape, plus each token's id, and whether it ends a text."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = vocab.name_bytes(token_id)
        told = {"token": _token_text(data), "logprob": _number(logprob), "bytes": list(data), "id": token_id}
        return told | ({"ends": True} if token_id in vocab.end_ids else {})

    return [
        entry(each.token_id, each.logprob) | {"top_logprobs": [entry(*best) for best in each.best]} for each in scores
    ]


def both_logprobs(
    vocab: Vocab, scores: Iterable[Seq[Score | None]], num_tokens: int, num_best: int
) -> dict[str, list[dict[str, Any] | None]]:
    """Return both models' log-probabilities of the first `num_tokens` tokens; None where a model did not read one."""

    cut = [[each and replace(each, best=each.best[:num_best]) for each in side[:num_tokens]] for side in scores]
    told = [[token_logprobs(vocab, [each])[0] if each else None for each in side] for side in cut]
    return dict(zip(("draft", "target"), told, strict=True))


def text_logprobs(vocab: Vocab, scores: Seq[Score], offset: int) -> dict[str, Any]:
    """Return the `logprobs` of a text's tokens from `offset` characters on."""
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
    return None if logprob is None else max(logprob, -9999.0)  # JSON has no infinity


def named_tokens(tokens: Seq[Token], first: int, done: Round) -> dict[str, Any]:
    """Return a run's token ids, their lengths in characters, and which were forced. `first` is the run's place in its
    round."""
    drafted = tokens[0].origin not in ITS_OWN
    forced = [at for at in range(len(tokens)) if drafted and done.block.is_forced(first + at)]
    named = {"token_ids": [each.token_id for each in tokens], "token_chars": [len(each.text) for each in tokens]}
    return named | ({"forced": forced} if forced else {})
