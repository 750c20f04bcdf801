"""Tools in requests, the calls of earlier turns, and which tools an answer may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from skydraft.gateway.parts import Checked, Some


class CalledFunction(Checked):
    """A function that an earlier turn called. Arguments are JSON; some clients send them as an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Checked):
    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction


ToolName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,64}$")]


class Function(Checked):
    """A function that the model may call. Other keys are passed on to the chat template."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: ToolName
    parameters: dict[str, Any] | None = None


class Tool(Checked):
    """`given` is for the chat template: the same with all keys in the client's order."""

    type: Literal["function"]
    function: Function
    given: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _keep(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {key: data[key] for key in data if key in ("type", "function")}
        return {**kept, "given": kept}


class OtherTool(Checked):
    """A tool that only its maker's server can run, or that takes no JSON. It is left out."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(max_length=64)


def is_other(tool: Any, *kinds: str) -> bool:
    """Whether a tool, as it came or checked, has a type, and none of `kinds`."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return isinstance(kind, str) and kind not in kinds


AnyTool = Annotated[
    Annotated[Tool, Tag("a function")] | Annotated[OtherTool, Tag("another")],
    Discriminator(lambda tool: "another" if is_other(tool, "function") else "a function"),
]


class NamedTool(Checked):
    type: Literal["function"]
    function: CalledFunction


class Allowed(Checked):
    """Which of the tools the answer may call, and whether it must. Entries of other types than function are ignored."""

    mode: Literal["auto", "required"]
    tools: Annotated[Some[dict[str, Any]], Field(max_length=128)]

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
