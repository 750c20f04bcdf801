"""Messages of a conversation: each has one role."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from skydraft.characters import from_json, one_line
from skydraft.config import CAPTION_PROMPT
from skydraft.errors import PromptError
from skydraft.prompts.audio import Audio

Role = Literal["system", "user", "assistant", "tool"]
# Other fields of OpenAI's messages, for templates.
_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `more` has further fields for chat templates, under OpenAI's names.

    `audio` are the user's recordings, heard before the words. The answer continues a message that `is_open`: the last
    one, by the assistant. Raises PromptError.
    """

    role: Role
    content: str
    more: tuple[tuple[str, Any], ...] = ()
    audio: tuple[Audio, ...] = ()
    is_open: bool = False

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            said = one_line(str(self.role))[:80]
            raise PromptError(f"There is no role '{said}'.", hint=f"Use one of: {', '.join(get_args(Role))}.")
        if self.audio and self.role != "user":
            raise PromptError("Only a user message can have audio.", hint="Give the recording to a user message.")
        if self.is_open and (self.role != "assistant" or dict(self.more).get("tool_calls")):
            raise PromptError("Only text of the assistant can be continued.", hint="Give it as the last message.")


def asked(prompt: str | None, system: str | None = None, audio: Audio | None = None) -> tuple[Message, ...]:
    """Return the conversation of a single question; for a recording alone the question is about its speaker.

    Empty without prompt and recording. Raises PromptError if a text is empty.
    """
    if prompt is None and audio is None:
        return ()
    prompt = CAPTION_PROMPT if prompt is None else prompt
    for name, text in (("prompt", prompt), ("system message", system)):
        if text is not None and not text.strip():
            raise PromptError(f"The {name} is empty.", hint="Give at least one word.")
    question = Message("user", prompt, audio=(audio,) if audio else ())
    return ((Message("system", system),) if system is not None else ()) + (question,)


def spoken(messages: tuple[Message, ...], audio: Audio | None) -> tuple[Message, ...]:
    """Add a recording before the words of the last message. Raises PromptError."""
    if audio is None or not messages:
        return messages
    last = messages[-1]
    return (*messages[:-1], replace(last, audio=(*last.audio, audio)))


def conversation(messages: Iterable[Mapping[str, Any] | Message]) -> tuple[Message, ...]:
    """Read messages as in OpenAI's interface, {"role": ..., "content": ...}; "audio" may hold an Audio. Raises
    PromptError."""
    if isinstance(messages, Mapping | str | bytes):
        raise PromptError("A conversation is a list of messages.", hint='Write [{"role": "user", "content": "..."}].')
    return tuple(each if isinstance(each, Message) else _message(number, each) for number, each in enumerate(messages))


def _message(number: int, given: Any) -> Message:
    try:
        fields = dict(given)
        role, content, audio = fields.pop("role"), fields.pop("content", None), fields.pop("audio", None)
        if content is None and role in ("assistant", "tool"):
            content = ""  # a message that only calls a tool
        calls = as_objects(fields.get("tool_calls") or ())
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _no_message(number, f"it lacks {error}" if isinstance(error, KeyError) else "a part is none") from error
    if unknown := sorted(fields.keys() - _KEYS, key=str):
        raise _no_message(number, f"an unknown field: {one_line(str(unknown[0]))[:80]}")
    if not isinstance(content, str) or not isinstance(audio, Audio | None):
        raise _no_message(number, "content must be a text, and audio must come from skydraft.load_audio")
    fields["tool_calls"] = calls
    more = tuple((key, fields[key]) for key in _KEYS if fields.get(key) not in (None, []))
    return Message(role, content, more, (audio,) if audio else ())


def _no_message(number: int, why: str) -> PromptError:
    hint = 'Write {"role": "user", "content": "..."}.'
    return PromptError(f"Message {number} of the conversation cannot be read: {why}.", hint=hint)


def as_objects(tool_calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn the arguments of calls into objects, which templates write as JSON. Invalid JSON stays a string."""
    return [_formed(call, _as_object) for call in tool_calls]


def in_form(message: Message, form: Callable[[Any], Any]) -> Message:
    """Return the message with the arguments of its calls changed by `form`."""
    more = ((key, [_formed(each, form) for each in of] if key == "tool_calls" else of) for key, of in message.more)
    return replace(message, more=tuple(more))


def _formed(call: Mapping[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {"name": function["name"], **function, "arguments": form(function.get("arguments"))}}


def _as_object(given: Any) -> Any:
    given = given or "{}"  # some clients write no arguments as ""
    with suppress(AttributeError, ValueError):  # already an object, or invalid JSON
        value = from_json(given)
        return value if isinstance(value, dict) else given
    return given
