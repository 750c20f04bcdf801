"""Message parts, calls and tools in the bodies of all interfaces. One table lists the kinds of parts that are read."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import AliasChoices, Base64Bytes, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from skydraft.gateway.refusals import Refusal
from skydraft.prompts.messages import Role

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]
MAX_TOOLS = 512  # OpenAI takes 128, but agents with many tool servers have more
Some = Annotated[list[T], Field(fail_fast=True)]  # stops at a list's first error: each takes a kilobyte

# The kinds that are read, with all their names. Any other kind is `Other`.
_KINDS = {
    "message": "message", "text": "text input_text output_text", "input_audio": "input_audio",
    "function_call": "function_call custom_tool_call tool_use",
    "function_call_output": "function_call_output custom_tool_call_output tool_result",
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def _by_kind(item: Any) -> Any:
    """Set an item's type to its kind. Unknown items that may hold a client's text stay as they are."""
    name = item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
    if not isinstance(name, str) or name == "item_reference" or (name not in _KIND_OF and "role" in item):
        return item
    if name in _KIND_OF:
        return {**item, "type": _KIND_OF[name]}
    parts = item["content"] if isinstance(item.get("content"), list) else ()
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "reasoning_text"]
    return {"type": "other", "thought": lines(item.get("thinking"), *texts)}


def lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if text and isinstance(text, str))


BY_KIND = BeforeValidator(_by_kind)


class Checked(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


def flat(item: Any) -> Any:
    """Flatten a tool, a call, a tool choice or a format from the shape of chat completions to that of responses."""
    kind = item.get("type", "function") if isinstance(item, dict) else ""
    given = item.get(kind) if kind in ("function", "custom", "json_schema") else None
    return {**{key: item[key] for key in item if key != kind}, **given} if isinstance(given, dict) else item


class TextPart(Checked):
    type: Literal["text"] = "text"
    text: str


class InputAudio(Checked):
    data: Base64Bytes  # the bytes of a file
    format: Literal["wav", "mp3", "flac", "ogg"] = "wav"


class AudioPart(Checked):
    type: Literal["input_audio"]
    input_audio: InputAudio
    text: ClassVar[str] = "(a recording, which cannot be heard here)"


class Other(Checked):
    """A picture, a file, a model's thoughts, or another server's own item. Thoughts of the assistant are read. For the
    rest a placeholder is read, not refused: agents send their history with each request."""

    type: Literal["other"]
    thought: str
    text: ClassVar[str] = "(an attachment, which cannot be read here)"


# The content of a message is a list of parts. A string becomes one part.
IN_PARTS = BeforeValidator(lambda said: [{"type": "text", "text": said}] if isinstance(said, str) else said)
Part = Annotated[TextPart | AudioPart | Other, Field(discriminator="type"), BY_KIND]
Content = Annotated[Some[Part], Field(max_length=256), IN_PARTS]


class CalledTool(Checked):
    """A tool call. `arguments` is JSON or plain text; some clients send an object, or null for none."""

    type: Literal["function_call"] = "function_call"
    call_id: str | None = Field(None, validation_alias=AliasChoices("call_id", "id"))
    name: str
    namespace: str | None = None
    arguments: str | Json | None = Field(None, validation_alias=AliasChoices("arguments", "input"))

    def as_chat(self) -> Json:
        """Return the call in the shape that chat templates read."""
        return {"type": "function", "id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}


class Result(Checked):
    type: Literal["function_call_output"]
    call_id: str | None = Field(None, validation_alias=AliasChoices("call_id", "tool_use_id", "id"))
    output: Content | None = Field(None, validation_alias=AliasChoices("output", "content"))

    def turn(self) -> "Turn":
        return Turn("tool", self.output or [], tool_call_id=self.call_id)


AS_ROLE = BeforeValidator(lambda given: "system" if given == "developer" else given)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message or a tool's result. A turn that only calls tools has no content."""

    role: Role
    content: list[Any] = field(default_factory=list)  # of parts
    tool_calls: list[CalledTool] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None  # thoughts given beside the content

    @property
    def thought(self) -> str | None:
        return self.reasoning or lines(*(part.thought for part in self.content if isinstance(part, Other))) or None


_ToolName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]


class Function(Checked, extra="allow"):
    """A function tool. The chat template gets these fields and the client's other ones."""

    type: Literal["function", "custom"] | None = "function"  # Anthropic calls it "custom"
    name: _ToolName
    description: Any = None
    parameters: Json | None = Field(None, validation_alias=AliasChoices("parameters", "input_schema"))


class Namespace(Checked, extra="allow"):
    """A group of functions, as Codex sends them. A model reads names as NAMESPACE.FUNCTION."""

    type: Literal["namespace"]
    name: _ToolName
    tools: "Tools"


class OtherTool(Checked, extra="allow"):
    """A tool that only its provider's server can run, or that takes no JSON. It is left out."""

    type: str = Field(max_length=64)


def _kind_of(tool: Any) -> str:
    given = tool if isinstance(tool, dict) else getattr(tool, "__dict__", {})
    kind, has_schema = given.get("type"), bool(given.keys() & {"parameters", "input_schema"})
    if not isinstance(kind, str) or kind == "function" or (kind == "custom" and has_schema):
        return "a function"
    return "a namespace" if kind == "namespace" else "another"


def _unnested(tool: Any) -> Any:
    """Convert a function of chat completions to the shape of the other interfaces."""
    given = tool.get("function") if isinstance(tool, dict) else None
    return given if isinstance(given, dict) else tool


_Tool = Annotated[
    Annotated[Function, BeforeValidator(_unnested), Tag("a function")]
    | Annotated[Namespace, Tag("a namespace")]
    | Annotated[OtherTool, Tag("another")],
    Discriminator(_kind_of),
]
Tools = Annotated[Some[_Tool], Field(max_length=MAX_TOOLS)]


class NamedTool(Checked):
    type: Literal["function"]
    name: str


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(flat)]


@dataclass(frozen=True, slots=True)
class Calling:
    """The functions that a model may or must call, and the kinds of other tools."""

    functions: Seq[Json] = ()
    must: bool = False
    parallel: bool = True
    others: Seq[str] = ()


def calling_of(tools: Seq[Any] | None, choice: Any, parallel: bool | None, fields: set[str] | None = None) -> Calling:
    """Return the functions among `tools` that a ToolChoice allows, with these `fields`. A named function is called
    once. Raises Refusal.
    """
    functions, others = list[Json](), list[str]()
    for prefix, tool in _with_prefix(tools or ()):
        if isinstance(tool, Function):
            shown = tool.model_dump(exclude={"type"}, include=fields, exclude_unset=True)
            functions.append(shown | {"name": f"{prefix}{tool.name}"})
        else:
            others.append(tool.type)
    is_named = isinstance(choice, NamedTool)
    allowed = [each for each in functions if choice != "none" and (not is_named or each["name"] == choice.name)]
    must = is_named or choice == "required"
    if must and not allowed:
        raise Refusal(400, "tool_choice: There is no such function. Other tools are not run here.", param="tool_choice")
    return Calling(allowed, must, parallel is not False and not is_named, others)


def _with_prefix(tools: Seq[Any]) -> Iterator[tuple[str, Any]]:
    for tool in tools:
        inner = tool.tools if isinstance(tool, Namespace) else [tool]
        yield from ((f"{tool.name}." if isinstance(tool, Namespace) else "", each) for each in inner)
