"""OpenAI's `/v1/responses`: its body, and its answers, whole or as server-sent events. Requests leave no state."""

import time
import uuid
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from skydraft.gateway.answers import ItemsAnswer, WrittenCall
from skydraft.gateway.items import (
    AS_ROLE,
    BY_KIND,
    CalledTool,
    Content,
    Namespace,
    Other,
    Result,
    Some,
    TextPart,
    ToolChoice,
    Tools,
    Turn,
    calling_of,
)
from skydraft.gateway.refusals import SPENT, TOO_LONG, Refusal
from skydraft.gateway.schema import Ask, Body, MaxTokens, ResponseFormat
from skydraft.prompts.tool_calls import Piece

_INCOMPLETE: dict[str | None, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
_COPIED = {"model", "instructions", "max_new_tokens", "temperature", "top_p", "tools", "tool_choice",
           "parallel_tool_calls", "metadata"}  # fmt: skip


class _Message(BaseModel):
    type: Literal["message"]
    role: Annotated[Literal["user", "assistant", "system"], AS_ROLE]
    content: Content


_ONE_MESSAGE = BeforeValidator(lambda said: [{"role": "user", "content": said}] if isinstance(said, str) else said)
_Item = Annotated[_Message | CalledTool | Result | Other, Field(discriminator="type"), BY_KIND]


class _TextOptions(BaseModel):
    format: ResponseFormat | None = None


class ResponsesRequest(Body):
    of_others = frozenset(("max_tokens", "max_completion_tokens", "response_format", "prompt"))
    prompt_field: ClassVar[str] = "input"

    input: Annotated[Some[_Item], _ONE_MESSAGE]
    instructions: str | None = None
    max_new_tokens: MaxTokens = Field(None, alias="max_output_tokens")
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    metadata: dict[str, Any] | None = None
    n: Literal[1] | None = None
    continue_final_message: bool | None = None

    def to_ask(self) -> Ask:
        return Ask(
            self, self._turns(), max_tokens=self.max_new_tokens, goes_on=bool(self.continue_final_message),
            calling=calling_of(self.tools, self.tool_choice, self.parallel_tool_calls),
            schema=self.text.format.schema_ if self.text and self.text.format else None,
        )  # fmt: skip

    def _turns(self) -> list[Turn]:
        """Make turns of the items. Calls join the assistant's turn before them, thoughts the one after them."""
        turns = [Turn("system", [TextPart(text=self.instructions)])] if self.instructions else []
        thoughts: list[Other] = []
        for item in self.input:
            if isinstance(item, Other):
                thoughts.append(item)
            elif isinstance(item, Result):
                turns.append(item.turn())
            elif isinstance(item, _Message):
                turns.append(Turn(item.role, [*thoughts, *item.content] if item.role == "assistant" else item.content))
                thoughts = []
            else:
                if not turns or turns[-1].role != "assistant":
                    turns.append(Turn("assistant"))
                name = f"{item.namespace}.{item.name}" if item.namespace else item.name
                turns[-1].tool_calls.append(item.model_copy(update={"name": name}))
                turns[-1].content.extend(thoughts)
                thoughts = []
        return turns


class ResponsesAnswer(ItemsAnswer):
    reads = ResponsesRequest
    tells_length_in_stream = True  # Codex shortens its context only after an error in the stream

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._namespaces = {tool.name for tool in self._body.tools or () if isinstance(tool, Namespace)}
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._numbers = count()

    def first(self) -> Iterator[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def _add(self, kind: Literal["text", "thinking"], text: str) -> Iterator[dict[str, Any]]:
        is_text = kind == "text"
        name, of, id_ = ("output_text", "message", "msg") if is_text else ("reasoning_text", "reasoning", "rs")
        if not self._items or self._items[-1]["type"] != of:
            part: Any = {"type": name, "text": ""} | ({"annotations": [], "logprobs": []} if is_text else {})
            more: Any = {"role": "assistant"} if is_text else {"summary": [], "encrypted_content": None}
            item = {"id": f"{id_}_{uuid.uuid4().hex}", "type": of, "status": "in_progress"}
            yield from self._open(item | more | {"content": []})
            self._items[-1]["content"] = [part]
            yield self._event("content_part.added", **self._place, content_index=0, part=dict(part))
        self._items[-1]["content"][0]["text"] += text
        scored: Any = {"logprobs": []} if is_text else {}
        yield self._event(f"{name}.delta", **self._place, content_index=0, delta=text, **scored)

    def _call(self, call: WrittenCall, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.name:
            namespace, _, name = call.name.rpartition(".")
            named = {"namespace": namespace, "name": name} if namespace in self._namespaces else {"name": call.name}
            item = {"id": f"fc_{uuid.uuid4().hex}", "call_id": call.id, "type": "function_call", "arguments": ""}
            yield from self._open(item | named | {"status": "in_progress"})
        self._items[-1]["arguments"] = call.arguments
        self._items[-1]["status"] = "completed" if call.is_whole else "incomplete"
        yield self._event("function_call_arguments.delta", **self._place, delta=piece.text)

    def _open(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._items.append(item)
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if not self._items:
            return
        item = self._items[-1]
        if item["type"] in ("message", "reasoning"):
            item["status"] = status
            (part,) = item["content"]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"{part['type']}.done", **self._place, content_index=0, **done)
            yield self._event("content_part.done", **self._place, content_index=0, part=part)
        elif item["status"] == "completed":  # a call that was cut off has no "done" event
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **self._place, **done)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    @staticmethod
    def _event(event: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{event}", **fields}

    def ping(self) -> bytes:
        """Return an event, not a comment: Codex gives up on a stream without events."""
        return self.as_event(self._event("in_progress", response=self._response("in_progress")))

    def as_event(self, chunk: dict[str, Any]) -> bytes:
        return super().as_event(chunk | {"sequence_number": next(self._numbers)})

    def last(self) -> Iterator[dict[str, Any]]:
        if not self._items or (self._items[-1]["type"] == "reasoning" and self.choices[0].finish not in _INCOMPLETE):
            yield from self._add("text", "")
        status = "incomplete" if self.choices[0].finish in _INCOMPLETE else "completed"
        yield from self._close(status)
        yield self._event(status, response=self._response(status))

    def whole(self) -> dict[str, Any]:
        *_, last = self.last()
        return dict(last["response"])

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        code = "server_error" if refusal.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if refusal.status == 429 else code
        code = refusal.code if refusal.code in (TOO_LONG, SPENT) else code  # Codex does not retry after these
        error = {"code": code, "message": refusal.message}
        return self._event("failed", response=self._response("failed") | {"error": error})

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body.model_dump(include=_COPIED, mode="json", by_alias=True)  # replaces NaN, which is not JSON
        form = self._body.text and self._body.text.format
        told = form.model_dump(mode="json", by_alias=True, exclude_unset=True) if form else {"type": "text"}
        num_read, cached, written = self.usage
        is_over = status in ("completed", "incomplete")
        used = {
            "input_tokens": num_read, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": written, "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": num_read + written,
        }  # fmt: skip
        response: dict[str, Any] = body | {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": {"reason": _INCOMPLETE[self.choices[0].finish]} if status == "incomplete" else None,
            "output": [] if status == "in_progress" else self._items, "usage": used if is_over else None,
            "text": {"format": told}, "tools": body["tools"] or [], "tool_choice": body["tool_choice"] or "auto",
            "parallel_tool_calls": body["parallel_tool_calls"] is not False, "metadata": body["metadata"] or {},
            "previous_response_id": None, "store": False, "truncation": "disabled",
        }  # fmt: skip
        return response | ({"skydraft": self._ours(self.choices[0])} if is_over and self._body.choice.extension else {})
