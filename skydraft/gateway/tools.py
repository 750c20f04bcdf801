"""Tools, and which of them an answer may call."""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

T = TypeVar("T")
MAX_TOOLS = 512  # agents with many servers of tools have more than the 128 that OpenAI takes
Some = Annotated[list[T], Field(fail_fast=True)]  # an error takes a kilobyte: a list ends with its first one


class Checked(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


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


def flat(item: Any) -> Any:
    """A tool, a call or choice of one, or a format, in the shape of chat completions as in that of responses."""
    kind = item.get("type", "function") if isinstance(item, dict) else ""
    given = item.get(kind) if kind in ("function", "custom", "json_schema", "allowed_tools") else None
    return {**{key: item[key] for key in item if key != kind}, **given} if isinstance(given, dict) else item


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
    mode: ClassVar[str] = "required"

    def names(self) -> list[str]:
        return [self.name]


class AllowedTools(Checked):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Some[dict[str, Any]], Field(max_length=MAX_TOOLS)]  # those that are no functions are passed over

    def names(self) -> list[str]:
        return [str(flat(tool).get("name")) for tool in self.tools if tool.get("type") == "function"]


def _as_choice(choice: Any) -> Any:
    """Some clients write a word as the type of an object."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in (*_WORDS, "function", "allowed_tools"):
        raise ValueError(f"the tool '{kind[:64]}' is not run here; only functions can be called")
    return kind if kind in _WORDS else flat(choice)


_WORDS = ("none", "auto", "required")


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None,
    BeforeValidator(_as_choice),
]
