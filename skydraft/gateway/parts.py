"""The parts of a chat's body: messages, tools and formats, as pydantic models. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from skydraft.prompts.messages import Role

T = TypeVar("T")
Some = Annotated[list[T], Field(fail_fast=True)]  # an error takes a kilobyte: a list ends with its first one


def at_most(num_items: int) -> BeforeValidator:
    """Refuse longer objects before their items are checked, since each item could cause an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_items:
            raise ValueError(f"at most {num_items} items")
        return value

    return BeforeValidator(check)


class Checked(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TextPart(Checked):
    type: Literal["text"]
    text: str


class RefusalPart(Checked):
    """What an assistant refused; a text like any other."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class InputAudio(Checked):
    """A recording, as the bytes of a file in base64. A name of one in the context of the validation stands for it."""

    data: bytes
    format: Literal["wav", "mp3", "flac", "ogg"] = "wav"

    @field_validator("data")
    @classmethod
    def _find(cls, data: bytes, info: ValidationInfo) -> bytes:
        recordings: dict[bytes, bytes] = info.context or {}
        return recordings.pop(data, data)


class AudioPart(Checked):
    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | RefusalPart | AudioPart, Field(discriminator="type")]


class CalledFunction(Checked):
    """A function that an earlier turn called. Arguments are JSON; some clients send them as an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Checked):
    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction


class Function(Checked):
    """A function that the model may call. Other keys are passed on to the chat template."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(pattern=r"^[\w.:/-]{1,64}$")
    parameters: dict[str, Any] | None = None


class Tool(Checked):
    """`given` is for the chat template: the same with all keys in the client's order."""

    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, check: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = check(data)
        tool._given = {key: value for key, value in data.items() if key in cls.model_fields}
        return tool

    @property
    def given(self) -> dict[str, Any]:
        return self._given


class FunctionName(Checked):
    name: str


class NamedTool(Checked):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


_ROLES = {"developer": "system", "function": "tool"}


class ChatMessage(Checked):
    """One message. Some roles are read as others; a turn that only called tools has no content."""

    role: Annotated[Role, BeforeValidator(lambda role: _ROLES.get(role, role) if isinstance(role, str) else role)]
    content: str | Annotated[Some[Part], Field(max_length=256)] | None = None
    name: str | None = None
    tool_calls: Annotated[Some[ToolCall], Field(max_length=256)] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None


class StreamOptions(Checked):
    include_usage: bool | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedTool | None


class TextFormat(Checked):
    type: Literal["text"]


class ObjectFormat(Checked):
    """A JSON object: any, or one that fits a schema."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class NamedSchema(Checked):
    """A JSON schema. It is always followed, with `strict` or without."""

    schema_: dict[str, Any] = Field(alias="schema")


class SchemaFormat(Checked):
    """An answer that fits a JSON schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
