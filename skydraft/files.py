"""Files: small ones are read without waiting, state files are written whole, and damaged ones are set aside."""

import errno
import io
import logging
import os
import re
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TextIO

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict

ADAPTER = "adapter.gguf"
_NAME = re.compile(r"[\w-][\w.-]{0,63}")
log = logging.getLogger("skydraft")  # where nobody configures logging, a warning is a line on stderr


class Stored(BaseModel):
    """What a file holds as JSON, never changed: fields that are known, and finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """No process ever sees a part of the file, not even after a power cut. Raises OSError.

    A new file gets the permissions `mode`, less the umask. Who reads it first to change it holds a lock meanwhile.
    """
    scratch = path.with_name(f".{path.name}-{token_hex(6)}")
    try:
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def read_file(path: Path) -> bytes:
    """Raises OSError, also for a pipe or a device, which might never end; pipes of the shell (/dev/fd/63) are read."""
    if path.exists() and not path.is_file() and not str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/")):
        raise OSError(errno.EISDIR if path.is_dir() else errno.EINVAL, "it is not a file", str(path))
    return path.read_bytes()


def is_adapter_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and name not in ("auto", "none") and not name.endswith(".gguf")


def adapters_in(folder: Path) -> list[str]:
    """The names of the adapters in a folder, each at NAME/adapter.gguf. What no request could name is left out."""
    found = [path.parent.name for path in folder.glob(f"*/{ADAPTER}") if path.is_file()]
    return sorted(filter(is_adapter_name, found))


def open_named(path: Path, mode: Literal["w", "a"], permissions: int = 0o666) -> TextIO:
    """Open a text file whose errors in writing name it; a new one gets `permissions`. Raises OSError."""
    raw = _Named(path, mode, opener=lambda name, flags: os.open(name, flags, permissions))
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", newline="")


class _Named(io.FileIO):
    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.name)) from error


def lock_file(path: Path, busy: Exception, timeout_s: float = 0.0) -> AbstractContextManager[object]:
    """A lock for `with`, until the process ends at the latest; its folder is made if missing. Raises `busy` if another
    process keeps it so long."""
    try:
        return FileLock(path, mode=0o600).acquire(timeout=timeout_s)
    except Timeout as error:
        raise busy from error


def warn_if_shared(path: Path) -> None:
    """Say so in a line if others than its owner can read a file with a secret."""
    with suppress(OSError):
        if path.stat().st_mode & 0o077:
            log.warning("skydraft: others can read the secrets in %s; run: chmod 600 %s", path, path)
