"""The folder of a comparison, which one process writes to at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from skydraft.errors import OptionError

_LOCK = ".lock"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other comparisons out of `folder`, which is made where it is missing and removed again if it stays empty.

    The system lets go of the lock when a process ends, however it ends. Raises OptionError where another one has it, or
    the folder cannot be written.
    """
    lock = FileLock(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        hint = "Give another --out, or wait until that one is done."
        raise OptionError(f"Another comparison is writing to {folder}.", hint=hint) from error
    except OSError as error:
        hint = "Choose another folder."
        raise OptionError(f"--out {folder} cannot be written: {error.strerror}.", hint=hint) from error
    try:
        yield
    finally:
        with suppress(OSError):
            if [path.name for path in folder.iterdir()] == [_LOCK]:
                folder.joinpath(_LOCK).unlink()
        lock.release()
        with suppress(OSError):
            folder.rmdir()  # which fails, and should, where anything is in it
