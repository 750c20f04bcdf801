"""Anthropic's `/v1/messages`: its body, and its answers, whole or as server-sent events."""

import json
import re
import sys
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from skydraft.gateway.answers import ItemsAnswer, WrittenCall
from skydraft.gateway.items import (
    BY_KIND,
    IN_PARTS,
    CalledTool,
    Checked,
    NamedTool,
    Other,
    Result,
    Some,
    TextPart,
    ToolChoice,
    Tools,
    Turn,
    calling_of,
)
from skydraft.gateway.refusals import Refusal
from skydraft.gateway.schema import Ask, Body, Effort, ResponseFormat, Stops
from skydraft.prompts.tool_calls import Piece

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
_TOLD = {"name", "description", "parameters"}  # a tool's fields for the model; others are for Anthropic's server
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_SIGNATURE = "skydraft"  # marks our thoughts; not checked when a client sends it back
_MOST = sys.float_info.max  # JSON has no infinity
# Claude Code's first line, which changes with each request and would defeat caches. A proxy may append text to it.
_BILL = re.compile(r"\A\s*x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*;?)*[^\S\n]*\n*")

_Block = Annotated[TextPart | Other | CalledTool | Result, Field(discriminator="type"), BY_KIND]


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Some[_Block], Field(max_length=256), IN_PARTS]


class _Choice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def meant(self) -> ToolChoice:
        if self.type != "tool":
            return "required" if self.type == "any" else self.type
        return NamedTool(type="function", name=self.name or "")


class _Output(Checked):
    format: Annotated[ResponseFormat | None, BeforeValidator(lambda given: given or None)] = None
    effort: Effort | None = None


class MessagesRequest(Body):
    """The answer continues a last message of the assistant, unless `continue_final_message` is false."""

    of_others = frozenset(("stop", "max_completion_tokens", "response_format"))

    messages: Some[_Message]
    system: Annotated[Some[Annotated[TextPart, BY_KIND]], Field(max_length=256), IN_PARTS] | None = None
    stop: Stops | None = Field(None, alias="stop_sequences")
    tools: Tools | None = None
    tool_choice: _Choice | None = None
    output_config: _Output | None = None
    n: Literal[1] | None = None
    continue_final_message: bool | None = None

    @property
    def effort(self) -> str | None:
        return super().effort or (self.output_config.effort if self.output_config else None)

    def to_ask(self) -> Ask:
        turns: list[Turn] = []
        told = _Message.model_construct(role="system", content=self.system or [])
        for each in (each for message in (told, *self.messages) for each in _turns(message)):
            # Put a system message before the user's last message: models expect to answer the user.
            is_after = each.role == "system" and bool(turns) and turns[-1].role == "user"
            turns.insert(len(turns) - is_after, each)
        is_begun = bool(turns) and turns[-1].role == "assistant" and not turns[-1].tool_calls
        chosen, output = self.tool_choice or _Choice(type="auto"), self.output_config or _Output()
        return Ask(
            self, turns, max_tokens=self.max_new_tokens, schema=output.format.schema_ if output.format else None,
            calling=calling_of(self.tools, chosen.meant, not chosen.disable_parallel_tool_use, _TOLD),
            goes_on=is_begun if self.continue_final_message is None else self.continue_final_message,
        )  # fmt: skip


def _turns(message: _Message) -> Iterator[Turn]:
    """Split one of Anthropic's messages into turns: first the tool results, then the rest."""
    yield from (block.turn() for block in message.content if isinstance(block, Result))
    calls = [block for block in message.content if isinstance(block, CalledTool)]
    content: list[Any] = [block for block in message.content if isinstance(block, TextPart | Other)]
    if message.role == "system":
        content = [TextPart(text=text) for block in content if (text := _BILL.sub("", block.text))]
    turn = Turn(message.role, content, calls)
    if calls or turn.thought or any(isinstance(block, TextPart) or message.role == "user" for block in content):
        yield turn


class MessagesAnswer(ItemsAnswer):
    reads = MessagesRequest

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        kind = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._frame = {**kind, "model": self._body.model}

    def first(self) -> Iterator[dict[str, Any]]:
        usage = {"input_tokens": self.choices[0].began.num_prompt_tokens, "output_tokens": 0}
        ending = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": self._frame | {"content": [], **ending, "usage": usage}}

    def _add(self, kind: Literal["text", "thinking"], text: str) -> Iterator[dict[str, Any]]:
        if not self._items or self._items[-1]["type"] != kind:
            yield from self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._items[-1][kind] += text
        yield self._event("delta", delta={"type": f"{kind}_delta", kind: text})

    def _call(self, call: WrittenCall, piece: Piece) -> Iterator[dict[str, Any]]:
        if not call.is_whole:  # SDKs complete partial JSON, and agents would run the call with it
            return
        yield from self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        given = json.loads(call.arguments, parse_float=lambda said: max(min(float(said), _MOST), -_MOST))
        self._items[-1]["input"] = given
        yield self._event("delta", delta={"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._items.append(block)
        yield self._event("start", content_block=dict(block))

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._items:
            return
        if self._items[-1]["type"] == "thinking":  # clients drop a block without a signature
            self._items[-1]["signature"] = _SIGNATURE
            yield self._event("delta", delta={"type": "signature_delta", "signature": _SIGNATURE})
        yield self._event("stop")

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{name}", "index": len(self._items) - 1, **fields}

    def last(self) -> Iterator[dict[str, Any]]:
        yield from self._close()
        yield {"type": "message_delta", "delta": self._ending(), "usage": self._used()}
        yield {"type": "message_stop"}

    def _ending(self) -> dict[str, Any]:
        (choice,) = self.choices
        reason = _REASONS.get(choice.finish_reason or "", "end_turn")
        stop = choice.ended.stop if choice.ended and choice.finish == "stop_string" and reason == "end_turn" else None
        return {"stop_reason": reason if stop is None else "stop_sequence", "stop_sequence": stop}

    def _used(self) -> dict[str, Any]:
        num_read, cached, written = self.usage
        read = {"input_tokens": num_read - cached, "cache_read_input_tokens": cached}
        details = {"output_tokens_details": {"thinking_tokens": self.num_reasoning}}
        return read | {"cache_creation_input_tokens": 0, "output_tokens": written} | details

    def whole(self) -> dict[str, Any]:
        *_, _ = self.last()
        return self._frame | {"content": self._items, **self._ending(), "usage": self._used()}

    def ping(self) -> bytes:
        return self.as_event({"type": "ping"})

    @staticmethod
    def refused(refusal: Refusal) -> dict[str, Any]:
        kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}}
