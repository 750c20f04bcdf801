"""The folder of lessons: appended to by any number of processes, read as a stream, bounded, and easy to forget.

`lessons-00000001.jsonl` and the like hold lines; the oldest file goes when there is too much. Whoever changes the
folder holds its lock. Nobody but the user can read it.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from skydraft.errors import NotEnoughDisk, OptionError, RecordsError
from skydraft.learning.lesson import MAX_LINE_BYTES, Lesson, decode, encode

MAX_BYTES = 256 << 20
_NUM_FILES = 16  # so that a sixteenth is lost when the oldest goes
_LOCK, _FILES = "lessons.lock", "lessons-*.jsonl"
_LOCK_S = 10.0  # others hold it for milliseconds


@dataclass(frozen=True, slots=True)
class StoreSize:
    """What lies there."""

    num_files: int
    num_bytes: int


class Store:
    """The lessons in a folder, which need not exist before something is added. Raises OptionError for a file."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        if folder.exists() and not folder.is_dir():
            raise OptionError(f"{folder} is a file, and lessons lie in a folder.", hint="Give --learn another name.")
        self.folder = folder
        self._max_bytes = max_bytes

    def files(self) -> list[Path]:
        """The files of the store, the oldest first."""
        return sorted(self.folder.glob(_FILES))

    def size(self) -> StoreSize:
        """How much lies there; files that vanish meanwhile are not counted."""
        sizes = [size for path in self.files() if (size := _size(path)) is not None]
        return StoreSize(len(sizes), sum(sizes))

    def prepare(self) -> None:
        """Make the folder, and try to write. Raises OptionError or NotEnoughDisk."""
        with _errors_named(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            pass

    def add(self, lesson: Lesson) -> None:
        """Append a lesson whole, or nothing of it. Raises OptionError, NotEnoughDisk, or RecordsError where the folder
        is in use."""
        line = encode(lesson)
        if len(line) > MAX_LINE_BYTES:
            raise RecordsError(f"A lesson of {len(line) >> 20} MB is too long to be kept.")
        self.prepare()
        with self._locked():
            path = self._file_for(len(line))
            with _errors_named(self.folder):
                _append(path, line)
            self._drop_oldest()

    def _file_for(self, num_bytes: int) -> Path:
        """The file that the next line goes into."""
        files = self.files()
        number = int(files[-1].stem.rpartition("-")[2]) if files else 1
        if files and files[-1].stat().st_size + num_bytes > self._max_bytes // _NUM_FILES:
            number += 1
        return self.folder / f"lessons-{number:08d}.jsonl"

    def _drop_oldest(self) -> None:
        files = self.files()
        total = sum(path.stat().st_size for path in files)
        for path in files[:-1]:
            if total <= self._max_bytes:
                return
            total -= path.stat().st_size
            path.unlink()

    def lessons(self, skipped: Counter[str]) -> Iterator[Lesson]:
        """All lessons, the oldest first, one at a time; lines that are none are counted in `skipped`, by what they are.

        Raises OptionError where the folder cannot be read.
        """
        for path in self.files():
            with _errors_named(self.folder):
                try:
                    file = path.open("rb")
                except FileNotFoundError:  # it went meanwhile, as the oldest do
                    continue
            with file:
                yield from _lessons(file, skipped)

    def forget(self) -> StoreSize:
        """Delete all lessons; returns what there was. Nothing else in the folder is touched."""
        if not self.folder.is_dir():
            return StoreSize(0, 0)
        with self._locked(), _errors_named(self.folder):
            size = self.size()
            for path in self.files():
                path.unlink(missing_ok=True)
        return size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.folder / _LOCK, timeout=_LOCK_S, mode=0o600)
        with _errors_named(self.folder):
            try:
                lock.acquire()
            except Timeout as error:
                raise RecordsError(
                    f"Another process has held {self.folder} for {_LOCK_S:g} s.", hint="Try again when it has ended."
                ) from error
        try:
            yield
        finally:
            lock.release()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _append(path: Path, line: bytes) -> None:
    """Write a line at the end of a file. A line that was cut there before stays one of its own."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(file).st_size
        is_whole = not size or os.pread(file, 1, size - 1) == b"\n"
        data = memoryview(line if is_whole else b"\n" + line)
        try:
            while data:
                data = data[os.write(file, data) :]
        except OSError:
            os.ftruncate(file, size)  # half a line is of no use
            raise
    finally:
        os.close(file)


def _lessons(file: BinaryIO, skipped: Counter[str]) -> Iterator[Lesson]:
    """The lessons of a file. No more than one line is in memory, however long what lies there."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            skipped["too long"] += 1
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            continue
        try:
            lesson = decode(line)
        except RecordsError as error:
            skipped[error.message] += 1
        else:
            yield lesson


@contextmanager
def _errors_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NotEnoughDisk(
                f"{folder} has no room for another lesson: {reason}.",
                hint="Free some space, or run: skydraft learn forget.",
            ) from error
        raise OptionError(
            f"Lessons cannot be kept in {folder}: {reason}.", hint="Give --learn a folder that you can write to."
        ) from error
