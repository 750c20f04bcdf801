"""What a conversation is made of, in requests of all interfaces. One table says what becomes of each kind."""

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, field_validator

from skydraft.gateway.tools import Checked, Some, flat

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
_LEFT_OUT = re.compile(r"(.+_)?compaction|.+_(call|output|snapshot|tools|trigger|update|tool_result)|mcp_approval_.+")


def _by_kind(item: Any) -> Any:
    """An item with its kind as its type; what is text, though its type is another, as text."""
    if not isinstance(item, dict):
        return item
    name, source = item.get("type", "message" if "role" in item else None), item.get("source")
    source = source if isinstance(source, dict) and name == "document" else {}
    if not isinstance(name, str):
        return item
    told: Any = None
    if source.get("type") == "text":
        said = (item.get("title"), item.get("context"), source.get("data"))
        told = "\n".join(text for text in said if text and isinstance(text, str))
    elif source.get("type") == "content" or name == "search_result":
        told = json.dumps(item, ensure_ascii=False)
    elif name in ("tool_reference", "compaction"):  # a tool that a search has found; all that is left of earlier turns
        told = item.get("tool_name", item.get("content"))
    if told is not None:
        return {"type": "text", "text": told}
    # A tool that has no name is called by its type.
    own = {"name": name.removesuffix("_call")} if item.keys() & {"action", "operation"} else {}
    return {**own, **item, "type": _KIND_OF.get(name) or ("thinking" if _LEFT_OUT.fullmatch(name) else name)}


BY_KIND = BeforeValidator(_by_kind)


class TextPart(Checked):
    type: Literal["text"] = "text"
    text: str


class RefusalPart(Checked):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


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
Part = Annotated[TextPart | RefusalPart | AudioPart | Unread | Skipped, Field(discriminator="type"), BY_KIND]
Content = Annotated[Some[Part], Field(max_length=256), IN_PARTS]


class CalledTool(Checked):
    """`arguments` are JSON, or a text for the tool; some clients send an object, or null for none."""

    type: Literal["function_call"] = "function_call"
    call_id: str | None = Field(None, validation_alias=AliasChoices("call_id", "id"))
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = Field(
        None, validation_alias=AliasChoices("arguments", "input", "action", "operation")
    )
    output: str | None = None  # of a server's own tool

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}


def _as_call(call: Any) -> Any:
    return {**flat(call), "type": "function_call"} if isinstance(call, dict) else call


ChatCall = Annotated[CalledTool, BeforeValidator(_as_call)]


class Result(Checked):
    type: Literal["function_call_output"]
    call_id: str | None = Field(None, validation_alias=AliasChoices("call_id", "tool_use_id", "id"))
    output: Content | None = Field(None, validation_alias=AliasChoices("output", "content"))

    @field_validator("output", mode="before")
    @classmethod
    def _as_words(cls, output: Any) -> Any:
        """What is neither text nor parts of a message, as JSON."""
        parts = output if isinstance(output, list) and output else [None]
        is_words = isinstance(output, str) or all(isinstance(part, dict) and "type" in part for part in parts)
        return output if is_words or output is None else json.dumps(output, ensure_ascii=False)
