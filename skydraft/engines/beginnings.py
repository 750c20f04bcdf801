"""KV of long fixed beginnings of prompts, in files: what a system prompt and its tools cost to read, a restart keeps.

A file is named by its owner and by a digest of all that its bits depend on: owner, model, library and tokens. It holds
no text, and is read only where its own digest is right.
"""

import hashlib
import hmac
import logging
import os
from collections import defaultdict
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path

import numpy as np

from skydraft.engines.vocab import TokenIds
from skydraft.files import read_file, write_whole

MIN_LEN = 512  # tokens; a shorter beginning is read soon
_DIGEST_BYTES = 32
_SUFFIX = ".kv"
log = logging.getLogger("skydraft")


class Beginnings:
    """The files in `folder`, at most `max_bytes` together. Where they are more, who has most loses the oldest."""

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    @staticmethod
    def key(owner: str, engine: str, token_ids: Seq[int] | TokenIds) -> str:
        """The name of a file. `engine` says all but the tokens that decides the bits of the KV."""
        whose = hashlib.sha256(owner.encode()).hexdigest()[:16]
        what = hashlib.sha256(f"{owner}\0{engine}\0".encode() + np.asarray(token_ids, np.int32).tobytes())
        return f"{whose}-{what.hexdigest()[:32]}"

    def read(self, key: str) -> memoryview | None:
        """The KV, None where there is none. A file that is damaged, cut or another's is deleted, with a line."""
        path = self._path(key)
        try:
            data = memoryview(read_file(path))
        except OSError:
            return None
        if not hmac.compare_digest(data[:_DIGEST_BYTES], _digest(key, data[_DIGEST_BYTES:])):
            log.warning("skydraft: %s is damaged: it is deleted, and its prompt read again.", path)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # the latest used goes last
        return data[_DIGEST_BYTES:]

    def write(self, key: str, kv: memoryview) -> None:
        """Where it cannot be written, a line says so, and nothing is lost but time."""
        if _DIGEST_BYTES + len(kv) > self._max_bytes:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._path(key), b"".join((_digest(key, kv), kv)), 0o600)
            self._make_room()
        except OSError as error:
            log.warning("skydraft: a prompt's beginning is not kept in %s: %s.", self._folder, error.strerror)

    def _make_room(self) -> None:
        of_owners = defaultdict[str, list[tuple[float, int, Path]]](list)
        for path in self._folder.glob(f"*{_SUFFIX}*"):  # also what a killed process has left half written
            with suppress(FileNotFoundError):  # another process has deleted it
                stat = path.stat()
                of_owners[path.name.lstrip(".").partition("-")[0]].append((stat.st_mtime, stat.st_size, path))
        sums = {owner: sum(size for _, size, _ in files) for owner, files in of_owners.items()}
        while sum(sums.values()) > self._max_bytes:
            owner = max(sums, key=lambda each: sums[each])
            oldest = min(of_owners[owner])
            of_owners[owner].remove(oldest)
            oldest[2].unlink(missing_ok=True)
            sums[owner] -= oldest[1]

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"


def _digest(key: str, kv: memoryview) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(kv)
    return digest.digest()
