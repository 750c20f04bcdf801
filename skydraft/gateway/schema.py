"""Request bodies: the fields that all interfaces share, limits on size, and the resulting `Ask`.

Known fields are checked. Unknown ones are ignored, but an error under `skydraft`.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, create_model

from skydraft.config import MAX_K, STYLES, DecodingParams
from skydraft.gateway.items import AudioPart, Calling, Checked, Json, Some, Turn, flat
from skydraft.gateway.refusals import NEUTRAL, NOT_SERVED, TOO_LONG, Refusal, invalid
from skydraft.prompts import tool_calls
from skydraft.prompts.thinking import Think

MAX_CHOICES = 8
MAX_TURNS = 4096
MAX_BIASES = 1024  # also the limit of stop tokens
MAX_LOGPROBS = 20  # for each token
_MAX_CALLS = 256  # in each turn
_MAX_TEXT = 2 * 1024 * 1024  # bytes without recordings: each choice encodes all text before it can be refused
_MAX_ITEMS = 200_000  # brackets and commas: each can become an object
_RECORDING = re.compile(rb'"data"\s*:\s*"')

Stop = Annotated[str, Field(max_length=256)]
Stops = Annotated[Some[Stop], Field(max_length=16)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
TokenIds = Annotated[Some[TokenId], Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
# Some clients write -1 for no limit.
MaxTokens = Annotated[Count | None, BeforeValidator(lambda value: None if value == -1 else value)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def at_most(num_items: int) -> BeforeValidator:
    """Refuse larger objects before checking their items: each item could cause an error. Null means empty."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_items:
            raise ValueError(f"at most {num_items} items")
        return {} if value is None else value

    return BeforeValidator(check)


class _Format(Checked, extra="allow"):  # a response repeats all its fields
    type: Literal["text", "json_object", "json_schema"]
    given: Json | None = Field(None, alias="schema")

    @property
    def schema_(self) -> Json | None:
        """The schema to follow, with or without `strict`; None for a text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.given is None else self.given


ResponseFormat = Annotated[_Format, BeforeValidator(flat)]


class _Thinking(Checked):
    """Anthropic's field for thinking."""

    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: Count | None = None


class _Reasoning(Checked):
    effort: Effort | None = None


class _Choice(Checked, extra="forbid"):
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


# Options that are fields of the body, or set by the chat template.
_NOT_OURS = {"max_new_tokens", "stop", "stop_token_ids", "logit_bias", "think_start", "think_end"}
_OPTIONS: Json = {
    known.name: (type(known.default) | None, None) for known in fields(DecodingParams)
    if known.name not in _NOT_OURS
}  # fmt: skip
Extension: type[_Choice] = create_model("Extension", __base__=_Choice, **_OPTIONS)
_Ours = Annotated[Any, BeforeValidator(Extension.model_validate), at_most(64)]


class Body(Checked, extra="allow"):
    """The fields that all interfaces share, under our names where theirs differ. Unknown fields are ignored, but those
    in `NOT_SERVED` and `of_others` are refused."""

    of_others: ClassVar[frozenset[str]] = frozenset()  # other interfaces' fields that have another name here
    prompt_field: ClassVar[str] = "messages"

    model: str = Field(max_length=256)
    stream: bool | None = None
    stream_options: Annotated[Json, at_most(64)] = Field({})
    max_new_tokens: MaxTokens = Field(None, alias="max_tokens")
    min_new_tokens: int | None = Field(None, ge=0, le=2**31 - 1, alias="min_tokens")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: Stop | Stops | None = None  # "" is ignored
    stop_token_ids: Annotated[Some[TokenId], Field(max_length=MAX_BIASES)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    repetition_penalty: float | None = Field(None, gt=0, le=1e6)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_BIASES)] = Field({})
    cache_salt: str | None = Field(None, max_length=1024)  # only requests with the same salt share cached prompts
    chat_template_kwargs: Annotated[Json, at_most(64)] = Field({})
    reasoning_effort: Effort | None = None
    reasoning: _Reasoning | None = None
    thinking: _Thinking | None = None
    enable_thinking: bool | None = None  # the name at hosts of Qwen
    choice: _Ours = Field(Extension(), alias="skydraft")

    def model_post_init(self, context: object) -> None:
        extra = self.model_extra or {}
        for name in (NOT_SERVED.keys() | self.of_others) & extra.keys():
            if extra[name] and extra[name] not in NEUTRAL:
                why = NOT_SERVED.get(name, "This interface has another field for it.")
                raise Refusal(400, f"{name}: {why}", param=name)
        if "local_only" in str(extra):  # ignoring it would send the text to the cloud
            raise Refusal(400, 'Write it as "skydraft": {"local_only": true}.', param="local_only")
        extra.clear()  # frees fields that are not read

    def decoding(self) -> Json:
        """Return the decoding parameters that the client set, by our names."""
        given: Json = {name: getattr(self, name) for name in _DECODING}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given["stop"] = [text for text in stops if text] or None
        given["top_p"] = None if self.top_p is None else max(self.top_p, 1e-9)
        given["top_k"] = None if self.top_k is None else max(self.top_k, 0)  # -1 is off for some clients
        given["logit_bias"] = [*self.logit_bias.items()] or None
        given |= self.choice.model_dump(include={*_OPTIONS}, exclude_none=True)
        return {name: value for name, value in given.items() if value is not None}

    @abstractmethod
    def to_ask(self) -> "Ask":
        """Return the body's Ask. Raises Refusal for contradictory fields."""

    @property
    def effort(self) -> str | None:
        """How much the model should think."""
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)


_DECODING = sorted({known.name for known in fields(DecodingParams)} & Body.model_fields.keys())


@dataclass(frozen=True, slots=True)
class Ask:
    """A client's request, independent of the interface; the shared fields are in `body`.

    A completion has `prompts` (texts or token ids) instead of turns. Raises Refusal.
    """

    body: Body
    turns: Seq[Turn] = ()
    prompts: Seq[str | list[int]] = ()
    max_tokens: int | None = None  # 0: write no tokens
    num_best: int | None = None
    calling: Calling = field(default_factory=Calling)
    schema: Json | None = None  # of the answer
    goes_on: bool = False  # continue the last turn
    echoes: bool = False
    prediction: str | None = None

    def __post_init__(self) -> None:
        field, most_calls = self.body.prompt_field, max((len(turn.tool_calls) for turn in self.turns), default=0)
        if not (self.turns or self.prompts):
            raise Refusal(400, f"{field}: It is empty.", param=field)
        if len(self.turns) > MAX_TURNS or most_calls > _MAX_CALLS:
            says = f"{field}: At most {MAX_TURNS} turns with {_MAX_CALLS} calls each are allowed."
            raise Refusal(400, says, param=field)

    @property
    def recordings(self) -> list[AudioPart]:
        return [part for turn in self.turns for part in turn.content or () if isinstance(part, AudioPart)]

    def reader(self) -> tool_calls.Reader:
        """Return a parser that finds the calls in one choice."""
        calling = self.calling
        if not calling.functions:
            return tool_calls.Reader()
        if calling.must or self.schema is not None:
            return tool_calls.EnforcedReader(single=not calling.parallel)
        tools = {each["name"]: each.get("parameters") for each in calling.functions}
        return tool_calls.CallReader(tools, single=not calling.parallel)


def read_ask(data: bytes | bytearray, kind: type[Body]) -> Ask:
    """Parse and check a body, and return its Ask. Raises Refusal.

    Parsing holds the GIL, so the sizes that cost time are limited. Possible recordings are counted again after parsing,
    when they are known.
    """
    _check_text(len(data) - (_num_recorded(data) if len(data) > _MAX_TEXT else 0))
    if sum(map(data.count, (b"[", b"{", b","))) > _MAX_ITEMS:
        raise Refusal(413, f"The body has more than {_MAX_ITEMS} brackets and commas.", code="body_too_long")
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise invalid(error) from None
    ask = body.to_ask()
    _check_text(len(data) - sum(4 * (len(each.input_audio.data) // 3) for each in ask.recordings))
    return ask


def _num_recorded(data: bytes | bytearray) -> int:
    """Count the bytes of possible recordings, which are cheap to parse."""
    places = ((found.end(), data.find(b'"', found.end())) for found in _RECORDING.finditer(data))
    return sum(end - start for start, end in places if data[start:end].isascii())


def _check_text(num_bytes: int) -> None:
    if num_bytes > _MAX_TEXT:
        message = f"The body has {num_bytes} bytes without recordings; at most {_MAX_TEXT} are allowed."
        raise Refusal(400, message, code=TOO_LONG)
