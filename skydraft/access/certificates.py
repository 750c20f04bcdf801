"""The certificate of a server, read again when its files change: a renewed one needs no restart."""

import ssl
import threading
from pathlib import Path
from typing import Any

from skydraft.access.keys import FromFiles
from skydraft.errors import OptionError
from skydraft.files import read_file, warn_if_shared


class Certificate(FromFiles):
    """A certificate chain and its key. Two files that do not belong together are logged, and the pair before stays.

    Raises OptionError for a first pair that cannot be used. Any thread may call it.
    """

    def __init__(self, cert: Path, key: Path | None) -> None:
        self._cert, self._key = cert, key or cert
        self.pair = b"", b""  # key and certificate, as PEM
        self._lock = threading.Lock()
        self._context = self._read()
        warn_if_shared(self._key)

    def _read(self) -> ssl.SSLContext:
        try:
            pair = read_file(self._key), read_file(self._cert)  # not a pipe that nobody writes to
            if pair == self.pair:
                return self._context
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key)
            self.pair = pair
            return context
        except OSError as error:  # or the library's own, which is one
            reason = getattr(error, "reason", None) or error.strerror or "it is not a PEM file"
            reason = reason.replace("_", " ").lower()
            message = f"The certificate {self._cert} and the key {self._key} cannot be used: {reason}."
            raise OptionError(message, hint="Give two files that belong together.") from error

    def renew(self) -> None:
        with self._lock:
            self._context = self._renewed(self._read, self._context, "certificate kept as it was")

    def context(self) -> ssl.SSLContext:
        """For a server. It renews the pair before each connection."""

        def newest(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            self.renew()
            connection.context = self._context

        self._context.sni_callback = newest
        return self._context
