"""Parts of the messages in requests."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

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
    data: bytes  # of a file, in base64
    format: Literal["wav", "mp3", "flac", "ogg"] = "wav"


class AudioPart(Checked):
    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | RefusalPart | AudioPart, Field(discriminator="type")]
