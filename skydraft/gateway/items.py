"""Items and tools in requests of OpenAI's `/v1/responses`."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator

from skydraft.gateway.tools import MAX_TOOLS, Content, Function, OtherTool, Result, Some, is_other


class MessageItem(BaseModel):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(BaseModel):
    call_id: str = Field(validation_alias=AliasChoices("call_id", "id"))
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = Field(None, validation_alias=AliasChoices("arguments", "input"))
    output: str | None = None  # of a server's own tool


class ActItem(CallItem):
    """A call of a tool that has no name but its type."""

    name: Annotated[str, BeforeValidator(lambda kind: kind.removesuffix("_call"))] = Field(validation_alias="type")
    arguments: dict[str, Any] = Field(validation_alias=AliasChoices("action", "operation"))


class ResultItem(BaseModel):
    call_id: str = Field(validation_alias=AliasChoices("call_id", "id"))
    output: Result

    @field_validator("output", mode="before")
    @classmethod
    def _as_text(cls, output: Any) -> Any:
        """What is neither text nor parts of a message, as JSON."""
        parts = output if isinstance(output, list) and output else [None]
        is_words = isinstance(output, str) or all(isinstance(part, dict) and "type" in part for part in parts)
        return output if is_words else json.dumps(output, ensure_ascii=False)


class SkippedItem(BaseModel):
    """What a model thought, or another server did; of this the model reads nothing."""

    content: Any = None

    @property
    def thought(self) -> str:
        parts = [part for part in self.content if isinstance(part, dict)] if isinstance(self.content, list) else []
        texts = (part.get("text") for part in parts if part.get("type") == "reasoning_text")
        return "\n".join(text for text in texts if isinstance(text, str))


_ITEMS = {
    "custom_tool_call": "function_call", "mcp_call": "function_call",
    "custom_tool_call_output": "function_call_output", "local_shell_call_output": "function_call_output",
    "shell_call_output": "function_call_output", "apply_patch_call_output": "function_call_output",
    "shell_call": "local_shell_call", "apply_patch_call": "local_shell_call",
}  # fmt: skip
_SKIPPED = re.compile(
    r"reasoning|compaction(_trigger)?|.+_compaction|.+_(call|output|snapshot|tools|update)|mcp_approval_.+|program"
)


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind in ("message", "function_call", "function_call_output", "local_shell_call") or not isinstance(kind, str):
        return kind
    return _ITEMS.get(kind) or ("reasoning" if _SKIPPED.fullmatch(kind) else kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ActItem, Tag("local_shell_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[SkippedItem, Tag("reasoning")],
    Discriminator(_kind),
]


def _flat(tool: Any) -> Any:
    given = tool.get("function") if isinstance(tool, dict) else None  # the shape of chat completions
    return {"type": tool.get("type"), **given} if isinstance(given, dict) else tool


class FunctionTool(Function):
    type: Literal["function"]


class Namespace(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["namespace"]
    name: str
    tools: Annotated[Some[AnyTool], Field(max_length=MAX_TOOLS)]


def _tool_kind(tool: Any) -> str:
    kind = "a namespace" if is_other(tool, "function") else "a function"
    return "another" if is_other(tool, "function", "namespace") else kind


AnyTool = Annotated[
    Annotated[FunctionTool, BeforeValidator(_flat), Tag("a function")]
    | Annotated[Namespace, Tag("a namespace")]
    | Annotated[OtherTool, Tag("another")],
    Discriminator(_tool_kind),
]
