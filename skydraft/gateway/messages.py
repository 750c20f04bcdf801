"""Anthropic's `/v1/messages` over chat completions: text and tools."""

import json
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, Tag

from skydraft.gateway.answers import ItemsAnswer, WrittenCall
from skydraft.gateway.refusals import NOT_SERVED, Refusal
from skydraft.gateway.schema import MAX_STOPS, Translated, check_served
from skydraft.gateway.tools import MAX_TOOLS, OtherTool, Result, Some, TextPart, ToolName, by_kind
from skydraft.prompts.tool_calls import CallText

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_FORMAT = "Use skydraft.grammar instead: json_schema:{...}."
_SIGNATURE = "skydraft"  # it says who thought; nothing is checked when it comes back
_MOST = sys.float_info.max  # JSON has no infinity
# Claude Code's first words; parts of the line change with each request. A proxy may join other words to it.
_BILL = re.compile(r"\A\s*x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*;?)*[^\S\n]*\n*")
_NO_PLACE = "A message has no place for it; use chat completions."
_OUTPUT = {"output_config.format": _FORMAT, "skydraft.logprobs": _NO_PLACE, "skydraft.token_ids": _NO_PLACE}


class _Use(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _Result(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Result | None = None


class _Thought(BaseModel):
    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


_Blocks = Annotated[
    Some[Annotated[TextPart | _Use | _Result | _Thought, Field(discriminator="type")]], Field(max_length=256)
]


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | _Blocks


class _Tool(BaseModel):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]


_AnyTool = Annotated[Annotated[_Tool, Tag("a function")] | Annotated[OtherTool, Tag("another")], by_kind("custom")]


class _Choice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(Translated):
    """An answer goes on from a last message of the assistant, unless the body says that it begins a new one."""

    not_served: ClassVar[Mapping[str, str]] = NOT_SERVED | {
        "stop": "Use stop_sequences instead.",
        "max_completion_tokens": "Use max_tokens instead.",
        "response_format": _FORMAT,
        "output_format": _FORMAT,
        "logprobs": _NO_PLACE,
        "top_logprobs": _NO_PLACE,
    }
    names: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences", "reasoning_effort": "output_config.effort"}

    messages: Annotated[Some[_Message], Field(min_length=1, max_length=4096)]
    system: str | Annotated[Some[TextPart], Field(max_length=256)] | None = None
    stop_sequences: Annotated[Some[str], Field(max_length=MAX_STOPS)] | None = None
    tools: Annotated[Some[_AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: _Choice | None = None
    output_config: dict[str, Any] | None = None

    def chat_fields(self) -> dict[str, Any]:
        ours = {f"skydraft.{name}": getattr(self.choice, name) for name in ("logprobs", "token_ids")}
        output = self.output_config or {}
        check_served(ours | {f"output_config.{name}": value for name, value in output.items()}, _OUTPUT)
        chosen = self.tool_choice or _Choice(type="auto")
        choice = {"any": "required", "tool": {"type": "function", "function": {"name": chosen.name}}}
        turns: list[dict[str, Any]] = []
        told = _Message.model_validate({"role": "system", "content": self.system or []})
        for each in (each for message in (told, *self.messages) for each in _turns(message)):
            # A system message after the user's words holds for their answer; models expect to answer these words.
            is_after = each["role"] == "system" and bool(turns) and turns[-1]["role"] == "user"
            turns.insert(len(turns) - is_after, each)
        is_begun = bool(turns) and turns[-1]["role"] == "assistant" and not turns[-1]["tool_calls"]
        goes_on = is_begun if self.continue_final_message is None else self.continue_final_message
        return {
            "messages": turns,
            "reasoning_effort": self.reasoning_effort or output.get("effort"),
            "continue_final_message": goes_on,
            "stop": self.stop_sequences,
            "tools": self.tools and [_as_chats(tool) for tool in self.tools],
            "tool_choice": choice.get(chosen.type, chosen.type),
            "parallel_tool_calls": not chosen.disable_parallel_tool_use,
        }


def _as_chats(tool: _Tool | OtherTool) -> dict[str, Any]:
    if isinstance(tool, OtherTool):
        return {"type": tool.type}
    said = {"description": tool.description} if tool.description is not None else {}
    return {"type": "function", "function": {"name": tool.name, **said, "parameters": tool.input_schema}}


def _turns(message: _Message) -> Iterator[dict[str, Any]]:
    """One of Anthropic's messages as OpenAI's: results are messages of their own, before the words."""
    blocks = [TextPart(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    for result in (block for block in blocks if isinstance(block, _Result)):
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": result.content}
    texts = [block for block in blocks if isinstance(block, TextPart)]
    if message.role == "system":
        texts = [TextPart(type="text", text=words) for part in texts if (words := _BILL.sub("", part.text))]
    uses = [block for block in blocks if isinstance(block, _Use)]
    calls = [{"id": use.id, "function": {"name": use.name, "arguments": use.input}} for use in uses]
    thought = "\n".join(block.thinking for block in blocks if isinstance(block, _Thought)) or None
    if texts or calls or (thought and message.role == "assistant"):
        yield {
            "role": message.role, "content": texts, "tool_calls": calls or None, "reasoning_content": thought,
        }  # fmt: skip


class MessagesAnswer(ItemsAnswer):
    reads = MessagesRequest

    def __init__(self, own: MessagesRequest, *given: Any) -> None:
        super().__init__(own, *given)
        self._frame = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": own.model}

    def first(self) -> Iterator[dict[str, Any]]:
        usage = {"input_tokens": self.choices[0].num_prompt_tokens, "output_tokens": 0}
        ending = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": self._frame | {"content": [], **ending, "usage": usage}}

    def _add(self, kind: Literal["text", "thinking"], text: str) -> Iterator[dict[str, Any]]:
        if not self._items or self._items[-1]["type"] != kind:
            yield from self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._items[-1][kind] += text
        yield self._event("delta", delta={"type": f"{kind}_delta", kind: text})

    def _call(self, call: WrittenCall, piece: CallText) -> Iterator[dict[str, Any]]:
        if not call.is_whole:  # SDKs make an object of what there is, and agents would run the call with it
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
        if self._items[-1]["type"] == "thinking":  # clients keep no block without one
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
        stops = choice.finish == "stop_string" and reason == "end_turn"
        return {"stop_reason": "stop_sequence" if stops else reason, "stop_sequence": choice.stop if stops else None}

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
