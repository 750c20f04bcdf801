"""What OpenAI's clients send, as pydantic models: what is known is checked, what is not is ignored.

Ours stands under the key `skydraft`, where nothing unknown is ignored. What a client asks for and cannot get is refused
with the name of the field; what changes nothing (`user`, `store`, `metadata`, ...) is accepted.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, create_model, field_validator

from skydraft.config import MAX_K, STYLES, DecodingParams
from skydraft.prompts.messages import Role

MAX_CHOICES = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
_CALLER_FIELDS = {"max_new_tokens", "stop", "logit_bias"}  # as OpenAI names them, or not by this key

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Choice(_Model):
    """What our extension may ask for besides decoding options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: str | None = None
    gate: str | None = None
    k: Annotated[int, Field(strict=True, ge=1, le=MAX_K)] | Literal["auto"] | None = None
    accept: str | None = None
    eager: bool = False
    style: Literal[tuple(STYLES)] | None = None  # type: ignore[valid-type]
    extension: bool = True
    token_ids: bool = False

    def decoding(self) -> dict[str, Any]:
        """The decoding options that were given."""
        names = {known.name for known in fields(DecodingParams)}
        return {name: getattr(self, name) for name in self.model_fields_set & names}


_OPTIONS: dict[str, Any] = {
    known.name: (type(known.default) | None, None)
    for known in fields(DecodingParams)
    if known.name not in _CALLER_FIELDS
}
Extension: type[_Choice] = create_model("Extension", __base__=_Choice, **_OPTIONS)


class TextPart(_Model):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class InputAudio(_Model):
    """A recording, as the bytes of a file in base64."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg"] = "wav"


class AudioPart(_Model):
    """A part of a message that is speech."""

    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | AudioPart, Field(discriminator="type")]


def at_most(num_items: int) -> BeforeValidator:
    """No longer lists or objects are looked at: of nonsense, each item would make an error of its own."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > num_items:
            raise ValueError(f"at most {num_items} items")
        return value

    return BeforeValidator(check)


class CalledFunction(_Model):
    """What an earlier turn called. Arguments are JSON; some clients send them as an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(_Model):
    """A call in an earlier turn."""

    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction


class Function(_Model):
    """A function that the model may call; the chat template reads what else it has."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(pattern=r"^[\w.:/-]{1,64}$")
    parameters: dict[str, Any] | None = None


class Tool(_Model):
    """A tool, of the only kind that there is here."""

    type: Literal["function"]
    function: Function


class _Name(_Model):
    name: str


class NamedTool(_Model):
    """The tool that has to be called."""

    type: Literal["function"]
    function: _Name


def _no_logprobs(value: Any) -> Any:
    if value not in (None, False) or (value == 0 and value is not False):
        raise ValueError("not available")
    return value


NoLogprobs = Annotated[bool | None, BeforeValidator(_no_logprobs)]


class ChatMessage(_Model):
    """One message. A developer is a system; a turn that only called tools has no content."""

    role: Annotated[Role, BeforeValidator(lambda role: "system" if role == "developer" else role)]
    content: Annotated[str | list[Part] | None, at_most(256)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, at_most(256)] = None
    tool_call_id: str | None = None


class StreamOptions(_Model):
    """What a stream holds besides text."""

    include_usage: bool | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedTool | None


class AnyFormat(_Model):
    """An answer in text, or in some JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(_Model):
    """A JSON schema; its name and whether it is `strict` change nothing: it is always followed."""

    schema_: dict[str, Any] = Field(alias="schema")


class SchemaFormat(_Model):
    """An answer that fits a JSON schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[AnyFormat | SchemaFormat, Field(discriminator="type")]


def _without_max(value: Any) -> Any:
    """Some clients write -1 for no limit."""
    return None if value == -1 else value


MaxTokens = Annotated[Count | None, BeforeValidator(_without_max)]


class _Request(_Model):
    """What both kinds of completions have."""

    model: str = Field(max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: Annotated[str | list[str] | None, at_most(MAX_STOPS)] = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    repetition_penalty: float | None = Field(None, gt=0, le=1e6)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]] | None, at_most(MAX_BIASES)] = None
    skydraft: Extension | None = None  # type: ignore[valid-type]

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARS for text in stops):
            raise ValueError(f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters")
        return stop

    @property
    def choice(self) -> Any:
        """Our extension, with nothing asked for where there is none."""
        return self.skydraft or Extension()

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], at_most(4096), Field(min_length=1)]
    max_completion_tokens: MaxTokens = None
    tools: Annotated[list[Tool] | None, at_most(128)] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: NoLogprobs = None
    top_logprobs: Literal[0] | None = None
    functions: list[Any] | None = Field(None, max_length=0)
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two tools are called '{twice[0]}'")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _check_choice(cls, choice: ToolChoice, info: ValidationInfo) -> ToolChoice:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"there is no tool '{choice.function.name[:64]}'")
        if choice == "required" and not names:
            raise ValueError("there are no tools")
        return choice

    @property
    def callable_tools(self) -> list[Function]:
        """The functions that the answer may call."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool.function for tool in self.tools or () if tool.function.name == self.tool_choice.function.name]
        return [tool.function for tool in self.tools or ()] if self.tool_choice != "none" else []

    @property
    def calls_in_parallel(self) -> bool:
        """Whether there may be several calls; one that is named is called once."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    @property
    def calls_are_certain(self) -> bool:
        """Whether a grammar makes the calls, if there are any."""
        return self.must_call or (self.response_format is not None and self.response_format.type != "text")

    @property
    def grammar_field(self) -> str:
        """What the answer's grammar comes from, if it has one."""
        if self.must_call:
            return "tools"
        return "skydraft.grammar" if self.response_format is None else "response_format"

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls and nothing else."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


class TextRequest(_Request):
    """`POST /v1/completions`."""

    prompt: Annotated[str | list[str], at_most(MAX_CHOICES)]
    echo: bool | None = None
    logprobs: NoLogprobs = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        is_ids = isinstance(prompt, list) and any(isinstance(item, int | list) for item in prompt)
        if is_ids:
            raise ValueError("token ids are not taken; give text")
        return prompt

    @field_validator("prompt")
    @classmethod
    def _check_number(cls, prompt: str | list[str]) -> str | list[str]:
        if isinstance(prompt, list) and not 1 <= len(prompt) <= MAX_CHOICES:
            raise ValueError(f"1 to {MAX_CHOICES} prompts at once")
        return prompt
