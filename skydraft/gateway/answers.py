"""Answers in OpenAI's shapes, whole or in chunks, from the events of a desk; and chunks as server-sent events."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator
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
from skydraft.prompts.tool_calls import Called, CallReader, EnforcedReader, Piece, Reader
from skydraft.types import FinishReason, StepRecord, Token

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # where some clients cut lines
_RECORD = (
    "round", "outcome", "reason", "num_draft", "num_accepted", "num_committed", "num_audited", "num_agreed", "wall_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The format of an answer: `chat` or text, with the key `skydraft` (`extension`), with `token_ids` under it.

    With `wants_usage` a last chunk holds the usage, and every other chunk holds null. `prefixes` are the beginnings of
    the choices: the prompt if it is echoed, else nothing. Each prompt has `choices_each` choices. `tools` are the names
    of the functions that may be called; `calls_are_certain` if a grammar enforces the calls. Calls that are
    `answered` are left out. `scored` is the vocabulary of the tokens that are shown with log-probabilities, if they are
    wanted. `left_out` are the types of the tools that no answer calls.
    """

    chat: bool
    extension: bool
    token_ids: bool
    prefixes: tuple[str, ...] = ()
    choices_each: int = 1
    wants_usage: bool = False
    tools: tuple[str, ...] = ()
    calls_are_certain: bool = False
    answered: frozenset[Called] = frozenset()
    left_out: tuple[str, ...] = ()
    scored: Vocab | None = None

    @classmethod
    def of(
        cls, body: ChatRequest | TextRequest, requests: Seq[GenerateRequest], vocab: Vocab,
        answered: frozenset[Called] = frozenset(),
    ) -> Shape:  # fmt: skip
        """The shape that the client requested."""

        def written(asked: GenerateRequest) -> str:
            return vocab.written(asked.prompt_ids) if asked.prompt_ids else asked.messages[-1].content

        echo = isinstance(body, TextRequest) and body.echo
        tools = body.callable_tools if isinstance(body, ChatRequest) else []
        return cls(
            chat=isinstance(body, ChatRequest),
            extension=body.choice.extension,
            token_ids=body.choice.token_ids,
            prefixes=tuple(written(request) if echo else "" for request in requests),
            choices_each=body.n or 1,
            wants_usage=body.wants_usage,
            tools=tuple(tool.name for tool in tools),
            calls_are_certain=isinstance(body, ChatRequest) and body.calls_are_certain,
            answered=answered,
            left_out=tuple(body.left_out) if isinstance(body, ChatRequest) else (),
            scored=None if body.num_best is None else vocab,
        )

    def reader(self) -> Reader | None:
        """What finds the calls in one choice."""
        if not self.tools:
            return None
        # A call that may have to be left out is read whole, in a text of a grammar too.
        certain = self.calls_are_certain and not self.answered
        return EnforcedReader() if certain else CallReader(self.tools, self.answered)

    def only_repeats(self, text: str) -> bool:
        """Whether a complete text has calls, all of which are left out."""
        reader = CallReader(self.tools, self.answered)
        reader.push(text)
        return reader.only_repeats


@dataclass
class Choice:
    """One choice so far. `calls` are its tool calls as OpenAI writes them."""

    reader: Reader | None
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    finish: FinishReason | None = None
    stats: Stats | None = None
    receipt: Receipt | None = None

    def read(self, text: str) -> list[Piece]:
        """Split new text into text and pieces of tool calls."""
        return self.reader.push(text) if self.reader else [text]

    def take(self, pieces: Seq[Piece]) -> dict[str, Any]:
        """Add pieces to the choice; returns them as a delta."""
        text, calls = "", dict[int, dict[str, Any]]()
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
                continue
            if piece.name:
                self.calls.append(_call(piece.name, f"call_{uuid.uuid4().hex[:24]}"))
                calls[piece.index] = {"index": piece.index, **_call(piece.name, self.calls[-1]["id"])}
            for call in (self.calls[piece.index], calls.setdefault(piece.index, _more(piece.index))):
                call["function"]["arguments"] += piece.arguments
        self.text += text
        delta: dict[str, Any] = {"content": text} if text or not calls else {}
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, by OpenAI's names."""
        if self.finish in (None, "length", "content_filter"):
            return self.finish
        return "tool_calls" if self.calls else "stop"


def _call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def _more(index: int) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": ""}}


class Answer:
    """One answer under way. `ending` follows the last chunk."""

    ending = DONE

    def __init__(self, body: Any, num_choices: int, shape: Shape) -> None:
        self._shape = shape
        self.choices = [Choice(shape.reader()) for _ in range(num_choices)]
        kind = ("chat.completion" if shape.chat else "text_completion") + (".chunk" if shape.chat else "")
        self._head = {
            "id": f"{'chatcmpl' if shape.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
        }

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish for choice in self.choices)

    def first(self) -> Iterator[dict[str, Any]]:
        """Chunks before any text: the role, or the echoed prompt. With log-probabilities it comes when it was read."""
        for index, prefix in enumerate(self._shape.prefixes):
            if self._shape.chat:
                may_only_call = self._shape.tools and not self.choices[index].text
                yield self._chunk(index, {"role": "assistant", "content": None if may_only_call else ""})
            elif prefix and not self._shape.scored:
                yield self._chunk(index, {"content": prefix})

    def take(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """Add an event to a choice; returns its chunks. Raises the event if it is an error."""
        choice = self.choices[index]
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Began):
            if choice.num_prompt_tokens:  # it is written anew, without calls
                choice.reader = None
            choice.num_prompt_tokens += event.num_prompt_tokens
            if event.prompt_scores:
                choice.scores += event.prompt_scores
                told = self._logprobs(event.prompt_scores, 0)
                yield self._chunk(index, {"content": self._shape.prefixes[index]}, logprobs=told)
        elif isinstance(event, Wrote):
            yield from self._wrote(index, choice, event)
        elif isinstance(event, Ended):
            choice.finish, choice.stats, choice.receipt = event.finish, event.stats, event.receipt
            if left := choice.reader.finish() if choice.reader else []:
                yield self._chunk(index, choice.take(left))
            ended = {"stats": asdict(event.stats), "receipt": asdict(event.receipt)} | self._left_out
            yield self._chunk(index, {}, choice.finish_reason, ended)

    def _wrote(self, index: int, choice: Choice, event: Wrote) -> Iterator[dict[str, Any]]:
        runs = [list(run) for _, run in itertools.groupby(event.tokens, key=lambda token: token.origin)]
        scores = iter(event.scores)
        for run in runs:
            text = "".join(token.text for token in run)
            scored = list(itertools.islice(scores, len(run)))
            logprobs = self._logprobs(scored, len(self._shape.prefixes[index]) + len(choice.text))
            choice.scores += scored
            delta = choice.take(choice.read(text))
            choice.token_ids += [token.token_id for token in run]
            choice.origins += [token.origin for token in run]
            ours = self._run(run, event.done.record.reason)
            if run is runs[-1]:
                ours["record"] = _shown(event.done.record)
                ours |= {"notice": event.news} if event.news else {}
            ours |= {"text": text} if delta.get("content") != text else {}
            yield self._chunk(index, delta, None, ours, logprobs)

    def _logprobs(self, scores: Seq[Score], offset: int) -> dict[str, Any] | None:
        """The log-probabilities of tokens after `offset` characters of text and prompt; None if they are not wanted."""
        if self._shape.scored is None:
            return None
        told = chat_logprobs if self._shape.chat else partial(text_logprobs, offset=offset)
        return told(self._shape.scored, scores)

    def _run(self, run: Seq[Token], reason: str) -> dict[str, Any]:
        ours = {"origin": run[0].origin, "round": run[0].round, "reason": reason, "num_tokens": len(run)}
        return ours | ({"token_ids": [token.token_id for token in run]} if self._shape.token_ids else {})

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

    @property
    def usage(self) -> dict[str, Any]:
        """Numbers of tokens of the prompts, each prompt counted once for all its choices, and of the answer. Cached
        tokens are those of the first prompt, which may have been read twice."""
        each, numbers = self._shape.choices_each, [choice.num_prompt_tokens for choice in self.choices]
        prompt_tokens = sum(max(numbers[first : first + each]) for first in range(0, len(numbers), each))
        written = sum(len(choice.token_ids) for choice in self.choices)
        stats = self.choices[0].stats
        cached = max(stats.cached_tokens.edge, stats.cached_tokens.cloud) if stats else 0
        cached = min(cached, numbers[0])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": written,
            "total_tokens": prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": cached},
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
        return {"index": index, "message": message | ({"tool_calls": choice.calls} if choice.calls else {}), **ending}

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


def _shown(record: StepRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _RECORD} | {"rtt_ms": record.link.rtt_ms}
