"""Bodies of OpenAI's requests. Known fields are checked, and unknown ones passed over (an error under `skydraft`)."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, create_model, field_validator

from skydraft.config import MAX_K, STYLES, DecodingParams
from skydraft.gateway.items import AudioPart, ChatCall, Content, Skipped, TextPart
from skydraft.gateway.refusals import NEUTRAL, NOT_SERVED, OWN_FIELDS, Refusal
from skydraft.gateway.tools import (
    MAX_TOOLS,
    AllowedTools,
    AnyTool,
    Checked,
    Function,
    NamedTool,
    Some,
    Tool,
    ToolChoice,
    flat,
)
from skydraft.prompts.messages import Role
from skydraft.prompts.thinking import Think

MAX_CHOICES = 8
MAX_STOPS = 16
MAX_BIASES = 1024  # and stop tokens
MAX_LOGPROBS = 20  # of one place

Stop = Annotated[str, Field(max_length=256)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def at_most(num_items: int) -> BeforeValidator:
    """Refuse longer objects before their items are checked: each item could cause an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_items:
            raise ValueError(f"at most {num_items} items")
        return value

    return BeforeValidator(check)


# What clients send back as they got it, in whatever form others write it.
Thought = Annotated[str | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)]


class ChatMessage(Checked):
    """A turn that only called tools has no content."""

    role: Annotated[Role, BeforeValidator(lambda role: "system" if role == "developer" else role)]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[Some[ChatCall], Field(max_length=256)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Thought = None
    reasoning: Thought = None  # the same, as others call it

    @property
    def thought(self) -> str | None:
        skipped = (part for part in self.content or () if isinstance(part, Skipped))
        told = "\n".join(part.thought for part in skipped if part.thought)
        return self.reasoning_content or self.reasoning or told or None


class StreamOptions(Checked):
    include_usage: bool | None = None


class TextFormat(Checked):
    type: Literal["text"]


class ObjectFormat(Checked):
    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # otherwise any object


class SchemaFormat(Checked):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")  # it is followed with `strict` or without


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type"), BeforeValidator(flat)]


class _Choice(Checked):
    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: str | None = None
    gate: str | None = None
    k: Annotated[int, Field(strict=True, ge=1, le=MAX_K)] | Literal["auto"] | None = None
    hand_back: str | Annotated[int, Field(strict=True)] | None = None
    style: Literal[tuple(STYLES)] | None = None  # type: ignore[valid-type]
    think: Think | None = None
    extension: bool = True
    token_ids: bool = False
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    continue_ids: Annotated[Some[TokenId], Field(max_length=2**18)] | None = None
    continue_as_prompt: bool = False
    local_only: bool = False
    break_loops: bool = True

    def decoding(self) -> dict[str, Any]:
        options = self.model_fields_set & {known.name for known in fields(DecodingParams)}
        return {name: getattr(self, name) for name in options}


_OPTIONS: dict[str, Any] = {
    known.name: (type(known.default) | None, None) for known in fields(DecodingParams)
    if known.name not in {*OWN_FIELDS, "think_start", "think_end"}
}  # fmt: skip
Extension: type[_Choice] = create_model("Extension", __base__=_Choice, **_OPTIONS)


_MEANT_IF_FALSE = ("prompt_logprobs", "skip_special_tokens")
TokenIds = Annotated[Some[TokenId], Field(min_length=1)]
# Some clients write -1 for no limit.
MaxTokens = Annotated[Count | None, BeforeValidator(lambda value: None if value == -1 else value)]


def check_served(fields: Mapping[str, Any], not_served: Mapping[str, str]) -> None:
    """Raise Refusal for a field that is not served, unless it asks for nothing."""
    for name in not_served.keys() & fields.keys():
        value = fields[name]
        is_empty = value in NEUTRAL.get(name, ()) or (not value and name not in _MEANT_IF_FALSE)
        if value is not None and not is_empty:
            raise Refusal(400, f"{name}: {not_served[name]}", param=name)


class AnyRequest(Checked):
    """Fields of all interfaces. Those that are `not_served` are refused, and other unknown ones passed over."""

    model_config = ConfigDict(extra="allow", frozen=True)
    not_served: ClassVar[Mapping[str, str]] = NOT_SERVED
    names: ClassVar[Mapping[str, str]] = {}  # of fields, where those of chat completions are called otherwise

    model: str = Field(max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens = None
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: Stop | Annotated[Some[Stop], Field(max_length=MAX_STOPS)] | None = None  # "" is none
    stop_token_ids: Annotated[Some[TokenId], Field(max_length=MAX_BIASES)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    repetition_penalty: float | None = Field(None, gt=0, le=1e6)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]] | None, at_most(MAX_BIASES)] = None
    cache_salt: str | None = Field(None, max_length=1024)  # what is kept is shared by requests of one salt alone
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(64)] = None
    reasoning_effort: Effort | None = None
    reasoning: Any = None
    thinking: Any = None
    enable_thinking: bool | None = None  # as hosts of Qwen call it, and with `thinking_budget`
    think: bool | Effort | None = None  # as Ollama does
    thinking_budget: Any = None
    thinking_token_budget: int | None = Field(None, ge=-1, le=2**31 - 1)  # -1 is none
    skydraft: Annotated[Extension | None, at_most(64)] = None  # type: ignore[valid-type]

    def model_post_init(self, context: object) -> None:
        extra = self.model_extra or {}
        check_served(dict(self) | extra, self.not_served)
        extra.clear()  # a body can hold much that is not read

    @property
    def choice(self) -> Any:
        """Our extension, an empty one if there is none."""
        return self.skydraft or Extension()

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Prediction(Checked):
    """What the answer may repeat. Its parts are texts."""

    type: Literal["content"]
    content: str | Annotated[Some[TextPart], Field(max_length=4096)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(AnyRequest):
    messages: Annotated[Some[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: MaxTokens = None
    tools: Annotated[Some[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    continue_final_message: bool | None = None
    prediction: Prediction | None = None

    def model_post_init(self, context: object) -> None:
        """Raises Refusal for fields that do not fit each other."""
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs: it needs logprobs: true", param="top_logprobs")
        asked = self.tool_choice.names() if isinstance(self.tool_choice, NamedTool | AllowedTools) else []
        names = [tool.function.name for tool in self.tools or () if isinstance(tool, Tool)]
        if unknown := [name for name in asked if name not in names]:
            says = f"no function is called '{unknown[0][:64]}', and other tools are not run here"
            raise Refusal(400, f"tool_choice: {says}", param="tool_choice")
        if self.must_call and not self.callable_tools:
            raise Refusal(400, "tool_choice: there are no tools", param="tool_choice")
        super().model_post_init(context)

    @property
    def recordings(self) -> list[AudioPart]:
        parts = (part for message in self.messages for part in message.content or ())
        return [part for part in parts if isinstance(part, AudioPart)]

    @property
    def num_best(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def described_tools(self) -> list[Tool]:
        tools = [tool for tool in self.tools or () if isinstance(tool, Tool)]
        if not isinstance(self.tool_choice, AllowedTools):
            return tools
        names = self.tool_choice.names()
        return [tool for tool in tools if tool.function.name in names]

    @property
    def callable_tools(self) -> list[Function]:
        functions = [tool.function for tool in self.described_tools]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function.name == self.tool_choice.name]
        return functions if self.tool_choice != "none" else []

    @property
    def calls_in_parallel(self) -> bool:
        """A named tool is called once."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if isinstance(wanted, ObjectFormat):
            return {"type": "object"} if wanted.schema_ is None else wanted.schema_
        return wanted.schema_ if isinstance(wanted, SchemaFormat) else None

    @property
    def grammar_field(self) -> str:
        if self.must_call:
            return "tools"
        return "skydraft.grammar" if self.response_format is None else "response_format"

    @property
    def must_call(self) -> bool:
        return "required" in (self.tool_choice, getattr(self.tool_choice, "mode", None))


class TextRequest(AnyRequest):
    not_served: ClassVar[Mapping[str, str]] = NOT_SERVED | {
        "response_format": "Use skydraft.grammar instead.", "top_logprobs": "Use logprobs instead.",
    }  # fmt: skip
    names: ClassVar[Mapping[str, str]] = {"messages": "prompt"}
    # What only chats have.
    recordings: ClassVar[list[AudioPart]] = []
    grammar_field: ClassVar[str] = "skydraft.grammar"

    prompt: Annotated[Some[Annotated[str, Field(strict=True)] | TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    max_tokens: MaxTokens | Literal[0] = None
    echo: bool | None = None
    # False asks for none; 0 asks for those of the chosen tokens.
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None,
        BeforeValidator(lambda value: None if value is False else value),
    ] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        """One prompt, a text or token ids, is a list of one."""
        if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if len(prompt) > MAX_CHOICES:
            raise ValueError(f"1 to {MAX_CHOICES} prompts at once")
        return prompt

    @property
    def num_best(self) -> int | None:
        return self.logprobs


class Translated(AnyRequest):
    """A body of another interface, which is answered as a chat completion. Fields of chats mean the same in it."""

    n: Literal[1] | None = None
    continue_final_message: bool | None = None

    def as_chat(self) -> ChatRequest:
        """Raises ValidationError."""
        return ChatRequest.model_validate(
            {name: getattr(self, name) for name in Translated.model_fields} | self.chat_fields()
        )

    def chat_fields(self) -> dict[str, Any]:
        raise NotImplementedError


Sent: TypeAlias = ChatRequest | TextRequest | Translated  # a body as its client wrote it
