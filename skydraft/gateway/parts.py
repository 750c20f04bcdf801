"""Parts of the messages in requests."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

T = TypeVar("T")
Some = Annotated[list[T], Field(fail_fast=True)]  # an error takes a kilobyte: a list ends with its first one


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
