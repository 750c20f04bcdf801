"""A lesson: one finished generation with all that was said about its tokens, as one line of a file.

At each position of the text one mark says who judged it, and how:

    a   the target would have written this token, and the draft model did
    c   the target wrote this token; the draft model had written another
    t   the target wrote this token; nobody asked the draft model
    w   the draft model wrote this token; the target would have written another, which is not known
    -   nobody judged it: it says nothing

A line is eight hex digits, the CRC of the rest, a space, and JSON. The CRC finds lines that were cut or damaged; it is
no protection against somebody who forges them.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skydraft.config import DecodingParams, decoding_params
from skydraft.errors import RecordsError, SkydraftError
from skydraft.types import Media, Prompt, Signals

SCHEMA = 1
MAX_LINE_BYTES = 16 << 20  # ten minutes of speech; what is longer was not written by us
AGREED, CORRECTED, TAUGHT, WRONG, UNJUDGED = "actw-"
KNOWN = frozenset(AGREED + CORRECTED + TAUGHT)  # the target's token is that of the text
OPINIONS = frozenset(AGREED + CORRECTED + WRONG)  # and the draft model's choice is known to be it or not
_DIGITS = 5  # of a signal that are kept

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Fingerprint = Annotated[str, Field(max_length=128)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class StoredMedia(_Line):
    """Features of speech in half precision: `num_mels` rows, little-endian, in base64."""

    num_mels: int = Field(ge=1, le=1024)
    features: str

    @classmethod
    def of(cls, media: Media) -> StoredMedia:
        """What is kept of one."""
        import base64

        half = np.ascontiguousarray(media.features, "<f2")
        return cls(num_mels=len(half), features=base64.b64encode(half.tobytes()).decode())

    def media(self) -> Media:
        """The features again. Raises ValueError."""
        import base64

        half = np.frombuffer(base64.b64decode(self.features, validate=True), "<f2")
        return Media(half.reshape(self.num_mels, -1).astype(np.float32))


class Lesson(_Line):
    """`marks` has one mark for each token of the text, `signals` one entry or None, where the draft model spoke.

    `ranks` has one number for each mark w: how many tokens the target put before that one. `draft` and `target` name
    weights, `vocab` the vocabulary; `draft` is "" where the target wrote alone. `params` are the decoding parameters
    that were not the default. The prompt is what the draft model reads.
    """

    schema_number: Literal[1] = Field(default=1, alias="schema")
    draft: Fingerprint
    target: Fingerprint
    vocab: Fingerprint
    prompt_ids: tuple[TokenId, ...] = Field(min_length=1)
    media: tuple[StoredMedia, ...] = ()
    token_ids: tuple[TokenId, ...] = Field(min_length=1)
    marks: str
    ranks: tuple[int, ...] = ()
    signals: tuple[tuple[float, float, float] | None, ...] = ()
    params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Lesson:
        if len(self.marks) != len(self.token_ids) or set(self.marks) - set("actw-"):
            raise ValueError("there is not one mark for each token")
        if self.signals and len(self.signals) != len(self.token_ids):
            raise ValueError("there is not one entry of signals for each token")
        if len(self.ranks) != self.marks.count(WRONG) or min(self.ranks, default=0) < 0:
            raise ValueError("there is not one rank for each token that the target would not have written")
        try:
            _ = self.decoding
            if self.media:
                _ = self.prompt
        except (SkydraftError, TypeError, ValueError) as error:
            raise ValueError(str(error)) from error
        return self

    @cached_property
    def decoding(self) -> DecodingParams:
        """The parameters that it was written with."""
        return decoding_params(None, **self.params)

    @property
    def prompt(self) -> Prompt:
        """What the draft model read."""
        return Prompt(self.prompt_ids, tuple(each.media() for each in self.media))

    @property
    def known(self) -> tuple[int, ...]:
        """Positions where the text has the target's token."""
        return tuple(index for index, mark in enumerate(self.marks) if mark in KNOWN)

    @property
    def num_agreed(self) -> int:
        """Tokens that the draft model and the target would both have written."""
        return self.marks.count(AGREED)

    @property
    def num_opinions(self) -> int:
        """Tokens at which both are known to agree, or not to."""
        return sum(mark in OPINIONS for mark in self.marks)

    def signals_at(self, index: int) -> Signals | None:
        """How sure the draft model was at a position, where that was measured."""
        found = self.signals[index] if self.signals else None
        return None if found is None else Signals(*found)


def signals_entry(signals: Signals | None) -> tuple[float, float, float] | None:
    """Signals as a lesson keeps them."""
    if signals is None:
        return None
    return round(signals.entropy, _DIGITS), round(signals.margin, _DIGITS), round(signals.top_prob, _DIGITS)


def params_entry(params: DecodingParams) -> dict[str, Any]:
    """What of the parameters is not the default, as JSON has it."""
    off = DecodingParams()
    return {
        field.name: json.loads(json.dumps(value))
        for field in fields(params)
        if (value := getattr(params, field.name)) != getattr(off, field.name)
    }


def encode(lesson: Lesson) -> bytes:
    """A lesson as its line."""
    data = lesson.model_dump_json(by_alias=True, exclude_defaults=True).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def decode(line: bytes) -> Lesson:
    """The lesson of a line. Raises RecordsError, whose message says in a few words what the line is."""
    checksum, _, data = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(data):
        raise RecordsError("cut or damaged")
    try:
        return Lesson.model_validate_json(data)
    except ValidationError as error:
        raise RecordsError("not a lesson of this version") from error
