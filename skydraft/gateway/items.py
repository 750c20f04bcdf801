"""Turns and tools, in requests of all interfaces. One table says what becomes of each kind of part."""

import json
import re
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from skydraft.gateway.refusals import Refusal
from skydraft.prompts.messages import Role

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]
MAX_TOOLS = 512  # agents with many servers of tools have more than the 128 that OpenAI takes
Some = Annotated[list[T], Field(fail_fast=True)]  # an error takes a kilobyte: a list ends with its first one

# Types by the kind that they are read as: words, calls and their results. Of those under "thinking" the thoughts are
# read, and nothing else.
_KINDS = {
    "text": "input_text output_text",
    "image": "input_image image_url",
    "document": "file input_file container_upload audio_url video_url input_video",
    "function_call": "custom_tool_call mcp_call local_shell_call shell_call apply_patch_call tool_use mcp_tool_use",
    "function_call_output": """custom_tool_call_output local_shell_call_output shell_call_output
        apply_patch_call_output tool_result mcp_tool_result""",
    "thinking": "redacted_thinking reasoning server_tool_use program fallback",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in (kind, *names.split())}
# Where others have their words: a tool that a search has found; all that is left of earlier turns.
_SAID_IN = {"tool_reference": "tool_name", "compaction": "content", "refusal": "refusal"}
_LEFT_OUT = re.compile(r"(.+_)?compaction|.+_(call|output|snapshot|tools|trigger|update|tool_result)|mcp_approval_.+")


def _by_kind(item: Any) -> Any:
    """An item with its kind as its type; what is text, though its type is another, as text."""
    name = item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
    if not isinstance(name, str):
        return item
    source = item.get("source") if name == "document" else {}
    source = source if isinstance(source, dict) else {}
    told: Any = None
    if source.get("type") == "text":
        said = (item.get("title"), item.get("context"), source.get("data"))
        told = "\n".join(text for text in said if text and isinstance(text, str))
    elif source.get("type") == "content" or name == "search_result":
        told = json.dumps(item, ensure_ascii=False)
    elif name in _SAID_IN:
        told = item.get(_SAID_IN[name])
    if told is not None:
        return {"type": "text", "text": told}
    # A tool that has no name is called by its type.
    own = {"name": name.removesuffix("_call")} if item.keys() & {"action", "operation"} else {}
    return {**own, **item, "type": _KIND_OF.get(name) or ("thinking" if _LEFT_OUT.fullmatch(name) else name)}


BY_KIND = BeforeValidator(_by_kind)


class Checked(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


def flat(item: Any) -> Any:
    """A tool, a call or choice of one, or a format, in the shape of chat completions as in that of responses."""
    kind = item.get("type", "function") if isinstance(item, dict) else ""
    given = item.get(kind) if kind in ("function", "custom", "json_schema", "allowed_tools") else None
    return {**{key: item[key] for key in item if key != kind}, **given} if isinstance(given, dict) else item


class TextPart(Checked):
    type: Literal["text"] = "text"
    text: str


class InputAudio(Checked):
    data: bytes  # of a file, in base64
    format: Literal["wav", "mp3", "flac", "ogg"] = "wav"


class AudioPart(Checked):
    type: Literal["input_audio"]
    input_audio: InputAudio
    text: ClassVar[str] = "(a recording, which cannot be heard here)"


class Unread(Checked):
    """Its words stand for it: an agent sends its history again and again."""

    type: Literal["image", "document"]

    @property
    def text(self) -> str:
        return f"(a {'picture' if self.type == 'image' else self.type}, which cannot be read here)"


class Skipped(Checked):
    """What a model thought, or another server did; of this the model reads the thoughts."""

    type: Literal["thinking"]
    thinking: Any = None
    content: Any = None

    @property
    def thought(self) -> str:
        parts = [part for part in self.content if isinstance(part, dict)] if isinstance(self.content, list) else []
        texts = (part.get("text") for part in parts if part.get("type") == "reasoning_text")
        return "\n".join(text for text in (self.thinking, *texts) if text and isinstance(text, str))


# The content of a message is a list of parts; a text is one.
IN_PARTS = BeforeValidator(lambda said: [{"type": "text", "text": said}] if isinstance(said, str) else said)
Part = Annotated[TextPart | AudioPart | Unread | Skipped, Field(discriminator="type"), BY_KIND]
Content = Annotated[Some[Part], Field(max_length=256), IN_PARTS]


_ARGUMENTS = AliasChoices("arguments", "input", "action", "operation")


class CalledTool(Checked):
    """`arguments` are JSON, or a text for the tool; some clients send an object, or null for none."""

    type: Literal["function_call"] = "function_call"
    call_id: str | None = Field(None, validation_alias=AliasChoices("call_id", "id"))
    name: str
    namespace: str | None = None
    arguments: str | Json | None = Field(None, validation_alias=_ARGUMENTS)
    output: Content | None = None  # of a server's own tool

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}


def _as_call(call: Any) -> Any:
    return {**flat(call), "type": "function_call"} if isinstance(call, dict) else call


def _as_words(output: Any) -> Any:
    """What is neither text nor parts of a message, as JSON."""
    parts = output if isinstance(output, list) and output else [None]
    is_words = isinstance(output, str) or all(isinstance(part, dict) and "type" in part for part in parts)
    return output if is_words or output is None else json.dumps(output, ensure_ascii=False)


_Output = Annotated[Content | None, BeforeValidator(_as_words)]


class Result(Checked):
    type: Literal["function_call_output"]
    call_id: str | None = Field(None, validation_alias=AliasChoices("call_id", "tool_use_id", "id"))
    output: _Output = Field(None, validation_alias=AliasChoices("output", "content"))


def as_role(given: Any) -> Any:
    return "system" if given == "developer" else given


# What clients send back as they got it, in whatever form others write it.
Thought = Annotated[str | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)]


class Turn(Checked):
    """A message, or what another interface has instead. One that only called tools has no content."""

    role: Annotated[Role, BeforeValidator(as_role)]
    content: Content | None = None
    name: str | None = None
    tool_calls: Some[Annotated[CalledTool, BeforeValidator(_as_call)]] | None = None
    tool_call_id: str | None = None
    reasoning_content: Thought = None
    reasoning: Thought = None  # the same, as others call it

    @property
    def thought(self) -> str | None:
        skipped = (part for part in self.content or () if isinstance(part, Skipped))
        told = "\n".join(part.thought for part in skipped if part.thought)
        return self.reasoning_content or self.reasoning or told or None


def said(role: str, *parts: Any, calls: Iterable[CalledTool] = (), call_id: str | None = None) -> Turn:
    """A turn of parts that were checked."""
    return Turn.model_construct(role=as_role(role), content=[*parts], tool_calls=[*calls], tool_call_id=call_id)


ToolName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]


class Function(Checked, extra="allow"):
    """The chat template is given all fields, these first."""

    name: ToolName
    description: Any = None
    parameters: dict[str, Any] | None = None


class Tool(Checked):
    type: Literal["function"]
    function: Function


class OtherTool(Checked, extra="allow"):
    """A tool that only its maker's server can run, or that takes no JSON. It is left out."""

    type: str = Field(max_length=64)


def by_kind(*known: str) -> Discriminator:
    """A tool of another kind than these is `another`; one without a kind is read as the first."""

    def tag(tool: Any) -> str:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        return "another" if isinstance(kind, str) and kind not in known else f"a {kind if kind in known else known[0]}"

    return Discriminator(tag)


AnyTool = Annotated[Annotated[Tool, Tag("a function")] | Annotated[OtherTool, Tag("another")], by_kind("function")]


class NamedTool(Checked):
    type: Literal["function"]
    name: str


class AllowedTools(Checked):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Some[dict[str, Any]], Field(max_length=MAX_TOOLS)]  # those that are no functions are passed over


def _as_choice(choice: Any) -> Any:
    """Some clients write a word as the type of an object."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in (*_WORDS, "function", "allowed_tools"):
        raise ValueError(f"the tool '{kind[:64]}' is not run here; only functions can be called")
    return kind if kind in _WORDS else flat(choice)


_Word = Literal["none", "auto", "required"]
_WORDS = get_args(_Word)
_SomeTools = Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
ToolChoice = Annotated[_Word | _SomeTools | None, BeforeValidator(_as_choice)]


@dataclass(frozen=True, slots=True)
class Calling:
    """The functions that a model reads about, and those that it may or must call; the kinds of other tools."""

    described: Seq[Json] = ()
    functions: Seq[Json] = ()
    must: bool = False
    parallel: bool = True
    others: Seq[str] = ()


def calling_of(functions: Seq[Json], tools: Iterable[Any], choice: Any, parallel: bool | None) -> Calling:
    """What a ToolChoice leaves of the functions among `tools`; a named one is called once. Raises Refusal."""
    others = [tool.type for tool in tools if isinstance(tool, OtherTool)]
    chosen, allowed, is_named = functions, functions if choice != "none" else (), isinstance(choice, NamedTool)
    if isinstance(choice, NamedTool | AllowedTools):
        known, listed = {each["name"] for each in functions}, getattr(choice, "tools", [choice.model_dump()])
        names = [str(flat(tool).get("name")) for tool in listed if tool.get("type") == "function"]
        if unknown := [name for name in names if name not in known]:
            says = f"no function is called '{unknown[0][:64]}', and other tools are not run here"
            raise Refusal(400, f"tool_choice: {says}", param="tool_choice")
        allowed = [each for each in functions if each["name"] in names]
        chosen = functions if is_named else allowed
    must = is_named or "required" in (choice, getattr(choice, "mode", None))
    if must and not allowed:
        raise Refusal(400, "tool_choice: there are no tools", param="tool_choice")
    return Calling(chosen, allowed, must, parallel is not False and not is_named, others)
