"""The certificate of a server, read again when its files change: a renewed one needs no restart."""

import logging
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from skydraft.errors import OptionError
from skydraft.files import read_file, warn_if_shared

log = logging.getLogger("skydraft.access")


class Certificate:
    """A certificate chain and its key. Two files that do not belong together are logged, and the pair before stays.

    Raises OptionError for a first pair that cannot be used. Any thread may call it.
    """

    def __init__(self, cert: Path, key: Path | None) -> None:
        self._cert, self._key = cert, key or cert
        self._lock = threading.Lock()
        self._stamps = self._found()
        self._read()
        warn_if_shared(self._key)

    def _found(self) -> list[tuple[int, ...]]:
        stats = list[tuple[int, ...]]()
        for path in (self._cert, self._key):
            with suppress(OSError):  # what cannot be looked at cannot be read either, which says why
                stat = path.stat()
                stats.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return stats

    def _read(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            pair = read_file(self._key), read_file(self._cert)  # not a pipe that nobody writes to
            context.load_cert_chain(self._cert, self._key)
        except OSError as error:  # or the library's own, which is one
            reason = getattr(error, "reason", None) or error.strerror or "it is not a PEM file"
            raise OptionError(
                f"The certificate {self._cert} and the key {self._key} cannot be used: "
                f"{reason.replace('_', ' ').lower()}.",
                hint="Give two files that belong together.",
            ) from error
        self.pair, self._context = pair, context  # (key, certificate) as PEM

    def renew(self) -> None:
        """Read the files if they have changed since the last time."""
        with self._lock:
            if (stamps := self._found()) != self._stamps:
                self._stamps = stamps
                try:
                    self._read()
                except OptionError as error:
                    log.error("certificate kept as it was: %s", error)

    def context(self) -> ssl.SSLContext:
        """For a server. It renews the pair before each connection."""

        def newest(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            self.renew()
            connection.context = self._context

        self._context.sni_callback = newest
        return self._context
