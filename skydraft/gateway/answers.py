"""Answers from the events of a desk, whole or as server-sent events; and those of OpenAI's completions.

Every interface writes the same pieces of text and of calls, in its own form and in their order.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from skydraft.decoding.receipt import Receipt
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.scoring import Score
from skydraft.decoding.stats import Stats
from skydraft.engines.vocab import Vocab
from skydraft.gateway.desk import Began, Ended, Event, Wrote
from skydraft.gateway.logprobs import chat_logprobs, text_logprobs
from skydraft.gateway.refusals import Refusal
from skydraft.gateway.schema import ChatRequest
from skydraft.gateway.text import TextRequest
from skydraft.prompts.tool_calls import CallText, Piece
from skydraft.types import FinishReason, StepRecord, Token

PING = b": ping\n\n"
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # where some clients cut lines
_RECORD = (
    "round", "outcome", "reason", "num_draft", "num_accepted", "num_committed", "num_audited", "num_agreed", "wall_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The format of an answer: `chat` or text, with the key `skydraft` (`extension`), with `token_ids` under it.

    With `wants_usage` a last chunk holds the usage, and every other chunk holds null. `prefixes` are the beginnings of
    the choices: the prompt if it is echoed, else nothing. Each prompt has `choices_each` choices, which `may_call`.
    `scored` is the vocabulary of the tokens that are shown with log-probabilities, if they are wanted. `left_out` are
    the types of the tools that no answer calls.
    """

    chat: bool
    extension: bool
    token_ids: bool
    prefixes: tuple[str, ...] = ()
    choices_each: int = 1
    wants_usage: bool = False
    may_call: bool = False
    left_out: tuple[str, ...] = ()
    scored: Vocab | None = None

    @classmethod
    def of(cls, body: ChatRequest | TextRequest, requests: Seq[GenerateRequest], vocab: Vocab) -> Shape:
        """The shape that the client requested."""

        def written(asked: GenerateRequest) -> str:
            return vocab.written(asked.prompt_ids) if asked.prompt_ids else asked.messages[-1].content

        echo = isinstance(body, TextRequest) and body.echo
        return cls(
            chat=isinstance(body, ChatRequest),
            extension=body.choice.extension,
            token_ids=body.choice.token_ids,
            prefixes=tuple(written(request) if echo else "" for request in requests),
            choices_each=body.n or 1,
            wants_usage=body.wants_usage,
            may_call=isinstance(body, ChatRequest) and bool(body.callable_tools),
            left_out=tuple(body.left_out) if isinstance(body, ChatRequest) else (),
            scored=None if body.num_best is None else vocab,
        )


@dataclass
class WrittenCall:
    """A call of a tool so far. Its arguments are a JSON object where it is whole, else the beginning of one."""

    name: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    arguments: str = ""
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What tokens of one origin, one after the other, add to a choice.

    `scores` are those of the tokens, if they are wanted. `ours` is what the key `skydraft` says of them.
    """

    pieces: Seq[Piece]
    scores: Seq[Score] = ()
    ours: dict[str, Any] | None = None


@dataclass
class Choice:
    """One choice so far. `stop` is the stop string that ended it, or ""."""

    text: str = ""
    calls: list[WrittenCall] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    finish: FinishReason | None = None
    stop: str = ""
    stats: Stats | None = None
    receipt: Receipt | None = None

    def take(self, piece: CallText) -> WrittenCall:
        """Add a piece of a call; returns the call."""
        if piece.name:
            self.calls.append(WrittenCall(piece.name))
        call = self.calls[-1]
        call.arguments += piece.arguments
        call.is_whole = piece.is_last
        return call

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, by OpenAI's names: for its calls only where the last one is whole."""
        if self.finish in (None, "length", "content_filter"):
            return self.finish
        return "tool_calls" if self.calls and self.calls[-1].is_whole else "stop"


class Answer(ABC):
    """One answer under way. `ending` follows the last chunk of a stream."""

    ending = b""

    def __init__(self, body: Any, num_choices: int, shape: Shape) -> None:
        self._body, self._shape = body, shape
        self.choices = [Choice() for _ in range(num_choices)]

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish for choice in self.choices)

    @abstractmethod
    def first(self) -> Iterator[dict[str, Any]]:
        """Chunks before any text."""

    def take(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """Add an event to a choice; returns its chunks. Raises the event if it is an error."""
        choice = self.choices[index]
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Began):
            choice.num_prompt_tokens += event.num_prompt_tokens
            choice.scores += event.prompt_scores
            yield from self._began(index, event)
        elif isinstance(event, Wrote):
            for run in self._runs(choice, event):
                yield from self._write(index, run)
        elif isinstance(event, Ended):
            choice.finish, choice.stop = event.finish, event.stop
            choice.stats, choice.receipt = event.stats, event.receipt
            if event.pieces:
                yield from self._write(index, Run(event.pieces))
            yield from self._ended(index, event)

    def _began(self, index: int, event: Began) -> Iterator[dict[str, Any]]:
        """The chunks of a prompt that was read."""
        return iter(())

    def _write(self, index: int, run: Run) -> Iterator[dict[str, Any]]:
        """Add a run to its choice; returns its chunks, in the order of its pieces."""
        choice = self.choices[index]
        for piece in run.pieces:
            if isinstance(piece, str):
                choice.text += piece
                yield from self._said(piece)
            else:
                yield from self._called(choice.take(piece), piece)

    def _said(self, text: str) -> Iterator[dict[str, Any]]:
        """The chunks of new text."""
        raise NotImplementedError

    def _called(self, call: WrittenCall, piece: CallText) -> Iterator[dict[str, Any]]:
        """The chunks of a piece of a call, which has been added."""
        raise NotImplementedError

    def _ended(self, index: int, event: Ended) -> Iterator[dict[str, Any]]:
        """The chunks of a choice's end."""
        return iter(())

    def _runs(self, choice: Choice, event: Wrote) -> Iterator[Run]:
        """The runs of a round. Their tokens are added to the choice."""
        scores = iter(event.scores)
        both = zip(event.tokens, event.pieces, strict=True)
        for _, run in itertools.groupby(both, key=lambda each: each[0].origin):
            tokens, pieces = zip(*run, strict=True)
            scored = list(itertools.islice(scores, len(tokens)))
            choice.scores += scored
            choice.token_ids += [token.token_id for token in tokens]
            choice.origins += [token.origin for token in tokens]
            ours = self._ours_of(tokens, event.done.record.reason)
            if tokens[-1] is event.tokens[-1]:
                ours["record"] = _shown(event.done.record)
                ours |= {"notice": event.news} if event.news else {}
            joined = _joined(itertools.chain(*pieces))
            text = "".join(token.text for token in tokens)
            ours |= {"text": text} if text != "".join(piece for piece in joined if isinstance(piece, str)) else {}
            yield Run(joined, scored, ours)

    def _ours_of(self, run: Seq[Token], reason: str) -> dict[str, Any]:
        ours = {"origin": run[0].origin, "round": run[0].round, "reason": reason, "num_tokens": len(run)}
        return ours | ({"token_ids": [token.token_id for token in run]} if self._shape.token_ids else {})

    @abstractmethod
    def last(self) -> Iterator[dict[str, Any]]:
        """The chunks after all choices."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The complete answer."""

    @property
    def usage(self) -> dict[str, Any]:
        """Numbers of tokens of the prompts, each prompt counted once for all its choices, and of the answer. Cached
        tokens are those of the first prompt, which may have been read twice."""
        each, numbers = self._shape.choices_each, [choice.num_prompt_tokens for choice in self.choices]
        prompt_tokens = sum(max(numbers[first : first + each]) for first in range(0, len(numbers), each))
        written = sum(len(choice.token_ids) for choice in self.choices)
        stats = self.choices[0].stats
        cached = max(stats.cached_tokens.edge, stats.cached_tokens.cloud) if stats else 0
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": written,
            "total_tokens": prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": min(cached, numbers[0])},
        }

    @staticmethod
    def refused(refusal: Refusal) -> dict[str, Any]:
        """The body of an error answer."""
        return refusal.body

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        """The last chunk of a stream that cannot go on."""
        return self.refused(refusal)

    def as_event(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as a server-sent event, which has the name of the chunk's type, if any."""
        text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
        name = f"event: {chunk['type']}\n" if "type" in chunk else ""
        return f"{name}data: {text}\n\n".encode()

    @property
    def _left_out(self) -> dict[str, Any]:
        return {"left_out": list(self._shape.left_out)} if self._shape.left_out else {}

    def _ours(self, choice: Choice) -> dict[str, Any]:
        ours = self._left_out | {
            "origins": choice.origins,
            "finish_reason": choice.finish,
            "stats": asdict(choice.stats) if choice.stats else None,
            "receipt": asdict(choice.receipt) if choice.receipt else None,
        }
        return ours | ({"token_ids": choice.token_ids} if self._shape.token_ids else {})


class CompletionsAnswer(Answer):
    """The choices of a completion under way."""

    ending = b"data: [DONE]\n\n"

    def __init__(self, body: Any, num_choices: int, shape: Shape) -> None:
        super().__init__(body, num_choices, shape)
        self._head = {
            "id": f"{'chatcmpl' if shape.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if shape.chat else "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }

    def first(self) -> Iterator[dict[str, Any]]:
        """Chunks before any text: the role, or the echoed prompt. With log-probabilities it comes when it was read."""
        for index, prefix in enumerate(self._shape.prefixes):
            if self._shape.chat:
                may_only_call = self._shape.may_call and not self.choices[index].text
                yield self._chunk(index, {"role": "assistant", "content": None if may_only_call else ""})
            elif prefix and not self._shape.scored:
                yield self._chunk(index, {"content": prefix})

    def _began(self, index: int, event: Began) -> Iterator[dict[str, Any]]:
        if event.prompt_scores:
            told = self._logprobs(event.prompt_scores, 0)
            yield self._chunk(index, {"content": self._shape.prefixes[index]}, logprobs=told)

    def _write(self, index: int, run: Run) -> Iterator[dict[str, Any]]:
        choice = self.choices[index]
        logprobs = self._logprobs(run.scores, len(self._shape.prefixes[index]) + len(choice.text)) if run.ours else None
        yield self._chunk(index, _delta(choice, run), None, run.ours, logprobs)

    def _ended(self, index: int, event: Ended) -> Iterator[dict[str, Any]]:
        figures = {"stats": asdict(event.stats), "receipt": asdict(event.receipt)} | self._left_out
        yield self._chunk(index, {}, self.choices[index].finish_reason, figures)

    def _logprobs(self, scores: Seq[Score], offset: int) -> dict[str, Any] | None:
        """The log-probabilities of tokens after `offset` characters of text and prompt; None if they are not wanted."""
        if self._shape.scored is None:
            return None
        told = chat_logprobs if self._shape.chat else partial(text_logprobs, offset=offset)
        return told(self._shape.scored, scores)

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, ours: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        body: dict[str, Any] = {"delta": delta} if self._shape.chat else {"text": delta.get("content", "")}
        body |= {"logprobs": logprobs} if logprobs or not self._shape.chat else {}
        choice = {"index": index, **body, "finish_reason": finish}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        chunk |= {"usage": None} if self._shape.wants_usage else {}
        return chunk | ({"skydraft": ours} if ours and self._shape.extension else {})

    def last(self) -> Iterator[dict[str, Any]]:
        """The last chunk: the usage, if the client wants it."""
        if self._shape.wants_usage:
            yield {**self._head, "choices": [], "usage": self.usage}

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion" if self._shape.chat else "text_completion",
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self.choices)],
            "usage": self.usage,
        }
        if self._shape.extension:
            body["skydraft"] = self._ours(self.choices[0])
            if len(self.choices) > 1:
                body["skydraft"]["choices"] = [self._ours(choice) for choice in self.choices]
        return body

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        ending = {"logprobs": self._logprobs(choice.scores, 0), "finish_reason": choice.finish_reason}
        if not self._shape.chat:
            return {"index": index, "text": self._shape.prefixes[index] + choice.text, **ending}
        content = choice.text if choice.text or not choice.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= {"tool_calls": list(map(_call, choice.calls))} if choice.calls else {}
        return {"index": index, "message": message, **ending}


def _delta(choice: Choice, run: Run) -> dict[str, Any]:
    """A run, added to its choice, as a delta."""
    text, calls = "", list[dict[str, Any]]()
    for piece in run.pieces:
        if isinstance(piece, str):
            text += piece
            continue
        call = choice.take(piece)
        more = {"function": {"arguments": piece.arguments}}
        calls.append({"index": len(choice.calls) - 1, **(_call(call) if piece.name else more)})
    choice.text += text
    delta: dict[str, Any] = {"content": text} if text or not calls else {}
    return delta | ({"tool_calls": calls} if calls else {})


def _call(call: WrittenCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _shown(record: StepRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _RECORD} | {"rtt_ms": record.link.rtt_ms}


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, each as long as it can be."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        elif isinstance(piece, CallText) and isinstance(last, CallText) and not piece.name:
            joined[-1] = CallText(last.arguments + piece.arguments, last.name, piece.is_last)
        else:
            joined.append(piece)
    return joined
