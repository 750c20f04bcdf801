"""Parts of messages, tools, the calls of earlier turns, and which tools an answer may call."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

T = TypeVar("T")
MAX_TOOLS = 512  # agents with many servers of tools have more than the 128 that OpenAI takes
Some = Annotated[list[T], Field(fail_fast=True)]  # an error takes a kilobyte: a list ends with its first one


class Checked(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TextPart(Checked):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Checked):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class InputAudio(Checked):
    data: bytes  # of a file, in base64
    format: Literal["wav", "mp3", "flac", "ogg"] = "wav"


class AudioPart(Checked):
    type: Literal["input_audio"]
    input_audio: InputAudio


_MEDIA = {"image": "picture", "input_image": "picture", "image_url": "picture"}
_MEDIA |= dict.fromkeys(("document", "file", "input_file"), "document")


def as_text(part: Any) -> Any:
    """A part of a tool's result. What cannot be read becomes words: an agent sends its history again and again."""
    kind, source = (part.get("type"), part.get("source")) if isinstance(part, dict) else ("", None)
    if kind == "tool_reference":  # a tool that a search for tools has found
        return {"type": "text", "text": part.get("tool_name")}
    if kind == "search_result" or (isinstance(source, dict) and source.get("type") in ("text", "content")):
        return {"type": "text", "text": json.dumps(part, ensure_ascii=False)}
    what = _MEDIA.get(str(kind))
    return {"type": "text", "text": f"(a {what}, which cannot be read here)"} if what else part


Part = Annotated[TextPart | RefusalPart | AudioPart, Field(discriminator="type")]
Content = str | Annotated[Some[Part], Field(max_length=256)]
Result = str | Annotated[Some[Annotated[Part, BeforeValidator(as_text)]], Field(max_length=256)]


class CalledFunction(Checked):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON; some clients send an object, or null for none


class ToolCall(Checked):
    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction


ToolName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]


class Function(Checked):
    model_config = ConfigDict(extra="allow", frozen=True)  # the chat template is given all, these first

    name: ToolName
    description: Any = None
    parameters: dict[str, Any] | None = None


class Tool(Checked):
    type: Literal["function"]
    function: Function


class OtherTool(Checked):
    """A tool that only its maker's server can run, or that takes no JSON. It is left out."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(max_length=64)


def is_other(tool: Any, *kinds: str) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return isinstance(kind, str) and kind not in kinds


def by_kind(known: str) -> Discriminator:
    return Discriminator(lambda tool: "another" if is_other(tool, known) else "a function")


AnyTool = Annotated[Annotated[Tool, Tag("a function")] | Annotated[OtherTool, Tag("another")], by_kind("function")]


class NamedTool(Checked):
    type: Literal["function"]
    function: CalledFunction


class Allowed(Checked):
    mode: Literal["auto", "required"]
    tools: Annotated[Some[dict[str, Any]], Field(max_length=MAX_TOOLS)]  # those that are no functions are passed over

    def names(self) -> list[str]:
        functions = [tool for tool in self.tools if tool.get("type") == "function"]
        return [str((tool.get("function") or tool).get("name")) for tool in functions]


class AllowedTools(Checked):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def _as_word(choice: Any) -> Any:
    """Some clients write a word as the type of an object."""
    return choice["type"] if isinstance(choice, dict) and choice.keys() == {"type"} else choice


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None,
    BeforeValidator(_as_word),
]
