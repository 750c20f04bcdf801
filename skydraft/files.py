"""Files: small files are read without waiting, and state files are written whole."""

import errno
import logging
import os
import re
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from secrets import token_hex

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict

ADAPTER = "adapter.gguf"
_NAME = re.compile(r"[\w-][\w.-]{0,63}")
log = logging.getLogger("skydraft")  # without configured logging, a warning is a line on stderr


class Stored(BaseModel):
    """The JSON of a file, frozen. Unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file so that no process ever sees a part of it, even after a power cut. Raises OSError.

    A new file gets the permissions `mode`, less the umask. Hold a lock to read, change and write a file.
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
    """Read a file or a shell pipe (/dev/fd/63). Raises OSError, also for other pipes and devices."""
    if path.exists() and not path.is_file() and not str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/")):
        raise OSError(errno.EISDIR if path.is_dir() else errno.EINVAL, "it is not a file", str(path))
    return path.read_bytes()


def is_adapter_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and name not in ("auto", "none") and not name.endswith(".gguf")


def adapters_in(folder: Path) -> list[str]:
    """List the adapters in a folder, each at NAME/adapter.gguf. Names that no request can use are left out."""
    found = [path.parent.name for path in folder.glob(f"*/{ADAPTER}") if path.is_file()]
    return sorted(filter(is_adapter_name, found))


def lock_file(path: Path, busy: Exception, timeout_s: float = 0.0) -> AbstractContextManager[object]:
    """Return a lock for `with`; it ends with the process at the latest. A missing folder is created. Raises `busy` if
    another process holds the lock for `timeout_s`."""
    try:
        return FileLock(path, mode=0o600).acquire(timeout=timeout_s)
    except Timeout as error:
        raise busy from error


def warn_if_shared(path: Path) -> None:
    """Log a warning if users other than the owner can read a file with a secret."""
    with suppress(OSError):
        if path.stat().st_mode & 0o077:
            log.warning("skydraft: others can read the secrets in %s; run: chmod 600 %s", path, path)
