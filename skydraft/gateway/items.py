"""What a conversation is made of, in requests of all interfaces. One table says what becomes of each kind."""

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag, field_validator

from skydraft.gateway.tools import Checked, Some, flat

# Types by the kind that they are read as: words, calls and their results. Of those under "thinking" the thoughts are
# read, and nothing else.
_KINDS = {
    "text": "input_text output_text",
    "image": "input_image image_url",
    "document": "file input_file container_upload",
    "function_call": """custom_tool_call mcp_call local_shell_call shell_call apply_patch_call tool_use mcp_tool_use
        function custom""",
    "function_call_output": """custom_tool_call_output local_shell_call_output shell_call_output
        apply_patch_call_output tool_result mcp_tool_result""",
    "thinking": "redacted_thinking reasoning server_tool_use program fallback",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in (kind, *names.split())}
_LEFT_OUT = re.compile(r"(.+_)?compaction|.+_(call|output|snapshot|tools|trigger|update|tool_result)|mcp_approval_.+")


def _kind(name: str | None) -> str | None:
    return _KIND_OF.get(name or "", "thinking" if name and _LEFT_OUT.fullmatch(name) else name)


def by_table(*names: str) -> Discriminator:
    """Chooses among models that are tagged with these types: the one of the kind that a value has by the table."""
    tags = {_kind(name): name for name in names}

    def tag(item: Any) -> str | None:
        is_object = isinstance(item, dict)
        name = item.get("type", "message" if "role" in item else None) if is_object else getattr(item, "type", None)
        return tags.get(_kind(name), name) if isinstance(name, str) else None

    return Discriminator(tag)


class TextPart(Checked):
    type: Literal["text", "input_text", "output_text"]
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


class Picture(Checked):
    """It cannot be read. Its words stand for it: an agent sends its history again and again."""

    what: ClassVar[str] = "picture"
    type: str

    @property
    def text(self) -> str:
        return f"(a {self.what}, which cannot be read here)"


class Document(Picture):
    what: ClassVar[str] = "document"


def _as_text(part: Any) -> Any:
    """What is text, though its type is another, as text."""
    if not isinstance(part, dict):
        return part
    kind, source = part.get("type"), part.get("source")
    source = source if isinstance(source, dict) else {}
    told: Any = None
    if kind == "document" and source.get("type") == "text":
        told = "\n".join(text for text in (part.get("title"), part.get("context"), source.get("data")) if text)
    elif kind == "search_result" or (kind == "document" and source.get("type") == "content"):
        told = json.dumps(part, ensure_ascii=False)
    elif kind in ("tool_reference", "compaction"):  # a tool that a search has found; all that is left of earlier turns
        told = part.get("tool_name", part.get("content"))
    return part if told is None else {"type": "text", "text": told}


AS_TEXT = BeforeValidator(_as_text)
Part = Annotated[
    Annotated[
        Annotated[TextPart, Tag("text")]
        | Annotated[RefusalPart, Tag("refusal")]
        | Annotated[AudioPart, Tag("input_audio")]
        | Annotated[Picture, Tag("image")]
        | Annotated[Document, Tag("document")],
        by_table("text", "refusal", "input_audio", "image", "document"),
    ],
    AS_TEXT,
]
Content = str | Annotated[Some[Part], Field(max_length=256)]


def _as_call(call: Any) -> Any:
    """A tool that has no name is called by its type."""
    if isinstance(call, dict) and call.get("type") in ("local_shell_call", "shell_call", "apply_patch_call"):
        return {**call, "name": call["type"].removesuffix("_call")}
    return flat(call)


class CalledTool(Checked):
    """`arguments` are JSON, or a text for the tool; some clients send an object, or null for none."""

    type: str = "function"
    id: str | None = Field(None, validation_alias=AliasChoices("call_id", "id"))
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = Field(
        None, validation_alias=AliasChoices("arguments", "input", "action", "operation")
    )
    output: str | None = None  # of a server's own tool

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": self.arguments}}


Call = Annotated[CalledTool, BeforeValidator(_as_call)]


class Result(Checked):
    type: str
    call_id: str = Field(validation_alias=AliasChoices("call_id", "tool_use_id", "id"))
    output: Content | None = Field(None, validation_alias=AliasChoices("output", "content"))

    @field_validator("output", mode="before")
    @classmethod
    def _as_words(cls, output: Any) -> Any:
        """What is neither text nor parts of a message, as JSON."""
        parts = output if isinstance(output, list) and output else [None]
        is_words = isinstance(output, str) or all(isinstance(part, dict) and "type" in part for part in parts)
        return output if is_words or output is None else json.dumps(output, ensure_ascii=False)


class Skipped(Checked):
    """What a model thought, or another server did; of this the model reads the thoughts."""

    thinking: str = ""
    content: Any = None

    @property
    def thought(self) -> str:
        parts = [part for part in self.content if isinstance(part, dict)] if isinstance(self.content, list) else []
        texts = (part.get("text") for part in parts if part.get("type") == "reasoning_text")
        return "\n".join(filter(None, (self.thinking, *(text for text in texts if isinstance(text, str)))))
