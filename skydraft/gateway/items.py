"""Parts of turns, calls and tools, in requests of all interfaces. One table says what becomes of each kind of part."""

import json
import re
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

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
    """An item with its kind as its type. Words are text, whatever their type; of thoughts only words are left."""
    name = item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
    if not isinstance(name, str):
        return item
    kind = _KIND_OF.get(name) or ("thinking" if _LEFT_OUT.fullmatch(name) else name)
    if (words := _words_in(item, name)) is not None:
        return {"type": "text", "text": words}
    if kind == "thinking":
        parts = item["content"] if isinstance(item.get("content"), list) else ()
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "reasoning_text"]
        return {"type": kind, "thought": _lines(item.get("thinking"), *texts)}
    # A tool that has no name is called by its type.
    own = {"name": name.removesuffix("_call")} if item.keys() & {"action", "operation"} else {}
    return {**own, **item, "type": kind}


def _words_in(item: Json, name: str) -> Any:
    """What an item of this type says, if it is words; else None."""
    source = item.get("source") if name == "document" else {}
    source = source if isinstance(source, dict) else {}
    kind = source.get("type")
    if kind == "text":
        return _lines(item.get("title"), item.get("context"), source.get("data"))
    if kind == "content" or name == "search_result":
        return json.dumps(item, ensure_ascii=False)
    return item.get(_SAID_IN[name]) if name in _SAID_IN else None


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if text and isinstance(text, str))


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
    thought: str


# The content of a message is a list of parts; a text is one.
IN_PARTS = BeforeValidator(lambda said: [{"type": "text", "text": said}] if isinstance(said, str) else said)
Part = Annotated[TextPart | AudioPart | Unread | Skipped, Field(discriminator="type"), BY_KIND]
Content = Annotated[Some[Part], Field(max_length=256), IN_PARTS]


class CalledTool(Checked):
    """`arguments` are JSON, or a text for the tool; some clients send an object, or null for none."""

    type: Literal["function_call"] = "function_call"
    call_id: str | None = Field(None, validation_alias=AliasChoices("call_id", "id"))
    name: str
    namespace: str | None = None
    arguments: str | Json | None = Field(
        None, validation_alias=AliasChoices("arguments", "input", "action", "operation")
    )
    output: Content | None = None  # of a server's own tool

    def as_chat(self) -> Json:
        """As templates read it."""
        return {"type": "function", "id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}


def _as_words(output: Any) -> Any:
    """What is neither text nor parts of a message, as JSON."""
    parts = output if isinstance(output, list) and output else [None]
    is_words = isinstance(output, str) or all(isinstance(part, dict) and "type" in part for part in parts)
    return output if is_words or output is None else json.dumps(output, ensure_ascii=False)


class Result(Checked):
    type: Literal["function_call_output"]
    call_id: str | None = Field(None, validation_alias=AliasChoices("call_id", "tool_use_id", "id"))
    output: Annotated[Content | None, BeforeValidator(_as_words)] = Field(
        None, validation_alias=AliasChoices("output", "content")
    )


AS_ROLE = BeforeValidator(lambda given: "system" if given == "developer" else given)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says, or has of a tool. One that only calls tools has no content."""

    role: Role
    content: list[Any] = field(default_factory=list)  # of parts
    tool_calls: list[CalledTool] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None  # where it stands beside the content

    @property
    def thought(self) -> str | None:
        return self.reasoning or _lines(*(part.thought for part in self.content if isinstance(part, Skipped))) or None


ToolName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]


class Function(Checked, extra="allow"):
    """The chat template is given all fields, these first."""

    name: ToolName
    description: Any = None
    parameters: Json | None = None


class OtherTool(Checked, extra="allow"):
    """A tool that only its maker's server can run, or that takes no JSON. It is left out."""

    type: str = Field(max_length=64)


def by_kind(*known: str) -> Discriminator:
    """A tool of another kind than these is `another`; one without a kind is read as the first."""

    def tag(tool: Any) -> str:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        return "another" if isinstance(kind, str) and kind not in known else f"a {kind if kind in known else known[0]}"

    return Discriminator(tag)


class NamedTool(Checked):
    type: Literal["function"]
    name: str


class AllowedTools(Checked):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Some[Json], Field(max_length=MAX_TOOLS)]  # those that are no functions are passed over


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
    known = {each["name"] for each in functions}
    names, is_named = set[str]() if choice == "none" else known, isinstance(choice, NamedTool)
    if is_named:
        names = {choice.name}
    elif isinstance(choice, AllowedTools):
        names = {str(flat(tool).get("name")) for tool in choice.tools if tool.get("type") == "function"}
    if unknown := sorted(names - known):
        says = f"tool_choice: no function is called '{unknown[0][:64]}', and other tools are not run here"
        raise Refusal(400, says, param="tool_choice")
    allowed = [each for each in functions if each["name"] in names]
    must = is_named or "required" in (choice, getattr(choice, "mode", None))
    if must and not allowed:
        raise Refusal(400, "tool_choice: there are no tools", param="tool_choice")
    described = allowed if isinstance(choice, AllowedTools) else functions
    return Calling(described, allowed, must, parallel is not False and not is_named, others)
