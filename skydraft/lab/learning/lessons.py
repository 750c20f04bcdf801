"""Lessons and the folder that keeps them. A lesson is a finished generation with both models' opinion of its tokens.

A lesson has one mark for each token of its text:

    a   both models would have written this token, whichever wrote it
    c   the target wrote this token; the draft model would have written another
    t   the target wrote this token; the draft model was not asked
    w   the draft model wrote this token; the target would have written another, which is unknown
    -   the target did not judge this token, so nothing can be learned from it

A lesson is one line of JSON in `lessons.jsonl`, which only the user can read. A long file becomes
`lessons-before.jsonl` and replaces an older one. Any number of processes append to it, each under a lock.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from skydraft.config import DecodingParams, decoding_params
from skydraft.errors import OptionError, RecordsError, SkydraftError, telling_of_disk
from skydraft.files import Stored, lock_file

AGREED, CORRECTED, TAUGHT, WRONG, UNJUDGED = "actw-"
KNOWN = frozenset(AGREED + CORRECTED + TAUGHT)  # the text has the target's token
MAX_BYTES = 256 << 20
_LOCK, _FILES = "lessons.lock", ("lessons-before.jsonl", "lessons.jsonl")
_LOCK_S = 10.0  # timeout; other processes hold the lock for milliseconds

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Lesson(Stored):
    """One finished generation. `marks` has one mark for each token of the text.

    `draft` and `target` identify weights, `vocab` the vocabulary. `draft` is "" if no draft model was used. `target` is
    from `named_weights` if the server reports no fingerprint. `params` has the decoding parameters that differ from the
    default. The prompt is the draft model's.
    """

    model_config = ConfigDict(strict=True)

    schema_number: Literal[1] = Field(default=1, alias="schema")
    draft: str
    target: str = Field(min_length=1)
    vocab: str
    prompt_ids: tuple[TokenId, ...] = Field(min_length=1)
    token_ids: tuple[TokenId, ...] = Field(min_length=1)
    marks: str
    params: dict[str, Any] = Field(default_factory=dict)

    def model_post_init(self, context: object) -> None:
        if len(self.marks) != len(self.token_ids) or set(self.marks) - {*KNOWN, WRONG, UNJUDGED}:
            raise ValueError("there is not one mark for each token")
        try:
            _ = self.decoding
        except (SkydraftError, TypeError, ValueError) as error:
            raise ValueError(str(error)) from error

    @cached_property
    def decoding(self) -> DecodingParams:
        return decoding_params(None, **self.params)

    @property
    def known(self) -> tuple[int, ...]:
        """Positions where the text has the target's token."""
        return tuple(index for index, mark in enumerate(self.marks) if mark in KNOWN)


def params_entry(params: DecodingParams) -> dict[str, Any]:
    values, off = asdict(params), asdict(DecodingParams())
    return {name: json.loads(json.dumps(value)) for name, value in values.items() if value != off[name]}


def encode(lesson: Lesson) -> bytes:
    """Encode a lesson as a line."""
    return lesson.model_dump_json(by_alias=True, exclude_defaults=True).encode() + b"\n"


class Store:
    """The lessons in a folder. `add` makes the folder."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self._max_bytes = folder, max_bytes

    def files(self) -> list[Path]:
        """Return the store's files, the older first. Links and pipes do not count."""
        return [path for name in _FILES if (path := self.folder / name).is_file() and not path.is_symlink()]

    def size(self) -> tuple[int, int]:
        """Return (number of files, bytes)."""
        sizes = [path.stat().st_size for path in self.files()]
        return len(sizes), sum(sizes)

    def prepare(self) -> None:
        """Make the folder, and check that it can be written. Raises OptionError or NotEnoughDisk."""
        with self._locked():
            pass

    def add(self, lesson: Lesson) -> None:
        """Append a whole lesson, or nothing. Raises OptionError or NotEnoughDisk, RecordsError if the folder is in
        use."""
        line = encode(lesson)
        with self._locked():
            before, path = (self.folder / name for name in _FILES)
            with _errors_named(self.folder):
                if path.is_file() and path.stat().st_size + len(line) > self._max_bytes // 2:
                    os.replace(path, before)
                _append(path, line)

    def lessons(self, skipped: Counter[str]) -> Iterator[Lesson]:
        """Yield all lessons, the oldest first. Raises OptionError. `skipped` counts the lines without a lesson, by
        reason."""
        for path in self.files():
            with _errors_named(self.folder):
                try:
                    file = path.open("rb")
                except FileNotFoundError:  # replaced or deleted meanwhile
                    continue
            with file:
                for line in file:
                    try:
                        yield Lesson.model_validate_json(line)
                    except ValidationError:
                        skipped["cut, damaged or of another version"] += 1

    def forget(self) -> tuple[int, int]:
        """Delete all lessons, and return their size. Other files in the folder stay."""
        if not self.folder.is_dir() or not self.files():
            return 0, 0
        with self._locked(), _errors_named(self.folder):
            size = self.size()
            for path in self.files():
                path.unlink(missing_ok=True)
        return size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        what = f"Another process has held {self.folder} for {_LOCK_S:g} s."
        busy = RecordsError(what, hint="Try again when it has ended.")
        with _errors_named(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = lock_file(self.folder / _LOCK, busy, _LOCK_S)
        with lock:
            yield


def _append(path: Path, line: bytes) -> None:
    """Append a line to a file, on a new line even if the file's last line is incomplete."""
    with open(path, "a+b", buffering=0, opener=partial(os.open, mode=0o600)) as file:
        size = file.tell()
        is_whole = not size or os.pread(file.fileno(), 1, size - 1) == b"\n"
        data = memoryview(line if is_whole else b"\n" + line)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)  # half a line is useless
            raise


def _errors_named(folder: Path) -> AbstractContextManager[None]:
    hint = "Give --learn a folder that you can write to and that has room, or run: skydraft learn forget."
    return telling_of_disk(OptionError, f"Lessons cannot be kept in {folder}", hint)
