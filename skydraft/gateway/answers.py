"""Answers in OpenAI's shapes, whole or in chunks, from the events of a desk."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

from skydraft.decoding.stats import Stats
from skydraft.gateway.desk import Ended, Event, Wrote
from skydraft.types import FinishReason, StepRecord, Token

_RECORD = (
    "round", "outcome", "reason", "num_draft", "num_accepted", "num_committed", "num_audited", "num_agreed", "wall_ms",
)  # fmt: skip


def finish_of(finish: FinishReason) -> str:
    """Why a text ended, in OpenAI's words."""
    return "length" if finish == "length" else "stop"


@dataclass
class Choice:
    """What is known of one choice so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    finish: FinishReason | None = None
    stats: Stats | None = None


class Answer:
    """One answer under way. `chat` decides its shape, `extension` and `token_ids` what stands under our key.

    Where a client `wants_usage`, a last chunk has it, and each one before says that it has none. `prefixes` are what
    each choice begins with: the prompt, where it is to be echoed. Each prompt has `choices_each` choices.
    """

    def __init__(
        self, model: str, num_choices: int, *, chat: bool, extension: bool, token_ids: bool, prefixes: Seq[str] = (),
        choices_each: int = 1, wants_usage: bool = False,
    ) -> None:  # fmt: skip
        self.choices = [Choice() for _ in range(num_choices)]
        self._chat, self._extension, self._token_ids = chat, extension, token_ids
        self._prefixes = prefixes or [""] * num_choices
        self._choices_each = choices_each
        self._wants_usage = wants_usage
        kind = ("chat.completion" if chat else "text_completion") + (".chunk" if chat else "")
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish for choice in self.choices)

    def first(self) -> Iterator[dict[str, Any]]:
        """Chunks before any text: whose turn it is, or the echo of the prompt."""
        for index, prefix in enumerate(self._prefixes):
            if self._chat:
                yield self._chunk(index, {"role": "assistant", "content": ""})
            elif prefix:
                yield self._chunk(index, {"content": prefix})

    def take(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """Note what happened to a choice; returns the chunks that say so. Raises an event that is an error."""
        choice = self.choices[index]
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Wrote):
            yield from self._wrote(index, choice, event)
        elif isinstance(event, Ended):
            choice.finish, choice.stats = event.finish, event.stats
            choice.num_prompt_tokens = event.num_prompt_tokens
            yield self._chunk(index, {}, finish_of(event.finish), {"stats": asdict(event.stats)})

    def _wrote(self, index: int, choice: Choice, event: Wrote) -> Iterator[dict[str, Any]]:
        runs = [list(run) for _, run in itertools.groupby(event.tokens, key=lambda token: token.origin)]
        for run in runs:
            text = "".join(token.text for token in run)
            choice.text += text
            choice.token_ids += [token.token_id for token in run]
            choice.origins += [token.origin for token in run]
            ours = self._run(run, event.done.record.reason)
            if run is runs[-1]:
                ours["record"] = _shown(event.done.record)
                ours |= {"notice": event.news} if event.news else {}
            yield self._chunk(index, {"content": text}, None, ours)

    def _run(self, run: Seq[Token], reason: str) -> dict[str, Any]:
        ours = {"origin": run[0].origin, "round": run[0].round, "reason": reason, "num_tokens": len(run)}
        return ours | ({"token_ids": [token.token_id for token in run]} if self._token_ids else {})

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, ours: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        body = {"delta": delta} if self._chat else {"text": delta.get("content", ""), "logprobs": None}
        choice = {"index": index, **body, "finish_reason": finish}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        chunk |= {"usage": None} if self._wants_usage else {}
        return chunk | ({"skydraft": ours} if ours and self._extension else {})

    def last(self) -> Iterator[dict[str, Any]]:
        """Chunks after all others: what it cost, where that was asked for."""
        if self._wants_usage:
            yield {**self._head, "choices": [], "usage": self.usage}

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once for all choices of it, and of the answer."""
        prompt_tokens = sum(choice.num_prompt_tokens for choice in self.choices[:: self._choices_each])
        written = sum(len(choice.token_ids) for choice in self.choices)
        stats = self.choices[0].stats
        cached = max(stats.cached_tokens.edge, stats.cached_tokens.cloud) if stats else 0
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": written,
            "total_tokens": prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self.choices)],
            "usage": self.usage,
        }
        if self._extension:
            body["skydraft"] = self._ours(self.choices[0])
            if len(self.choices) > 1:
                body["skydraft"]["choices"] = [self._ours(choice) for choice in self.choices]
        return body

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        finish = finish_of(choice.finish) if choice.finish else None
        if self._chat:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}
        text = self._prefixes[index] + choice.text
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def _ours(self, choice: Choice) -> dict[str, Any]:
        ours = {
            "origins": choice.origins,
            "finish_reason": choice.finish,
            "stats": asdict(choice.stats) if choice.stats else None,
        }
        return ours | ({"token_ids": choice.token_ids} if self._token_ids else {})


def _shown(record: StepRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _RECORD} | {"rtt_ms": record.link.rtt_ms}
