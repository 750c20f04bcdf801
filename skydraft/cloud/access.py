"""Access: bearer tokens from a file. Logs name each token by its label; each token has a budget of rows."""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from skydraft.errors import NotAuthorized, OptionError, RateLimited
from skydraft.files import warn_if_shared

log = logging.getLogger("skydraft.cloud")
ANONYMOUS = "anonymous"
_MIN_TOKEN_CHARS = 16
_LINE = re.compile(r"(?P<label>[\w.@-]{1,64})\s+(?P<token>[\x21-\x7e]+)")
_RELOAD_S = 1.0
_BURST_S = 2.0  # seconds of its rate that a token may use at once
_MIN_BURST_ROWS = 64.0  # but always a whole block


class Keyring:
    """The tokens of a file with lines `LABEL TOKEN`; `#` begins a comment. Changes are seen within a second.

    Without a file every client is "anonymous". Raises OptionError for a file that is unreadable, wrong or empty.
    If the file becomes unreadable or wrong later, an error is logged and the old tokens stay. An empty one refuses all.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked_at = clock()
        self._stamp = _stamp(path) if path else None
        self._labels = _read(path) if path else {}
        if path and not self._labels:
            raise OptionError(
                f"The token file {path} holds no tokens, so every client would be refused.",
                hint="Write lines: LABEL TOKEN.",
            )
        if path:
            warn_if_shared(path)

    @property
    def has_tokens(self) -> bool:
        """Whether tokens distinguish the callers."""
        return self._path is not None

    def label(self, authorization: str | None) -> str:
        """The label of the token in an authorization header. Raises NotAuthorized."""
        if self._path is None:
            return ANONYMOUS
        self._reload(self._path)
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise NotAuthorized("This server requires a token.", hint="Give one with --cloud-token-file.")
        given = token.strip().encode()
        # Every token is compared, each in constant time, so the duration reveals nothing.
        labels = [label for known, label in self._labels.items() if hmac.compare_digest(known.encode(), given)]
        if not labels:
            raise NotAuthorized("This server does not know this token.", hint="Ask the operator of the server.")
        return labels[0]

    def _reload(self, path: Path) -> None:
        now = self._clock()
        if now - self._looked_at < _RELOAD_S:
            return
        self._looked_at = now
        stamp = _stamp(path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._labels = _read(path)
                log.info("tokens read", extra={"tokens": len(self._labels)})
            except OptionError as error:
                log.error("tokens kept as they were: %s", error)


def _stamp(path: Path) -> bytes | None:
    """The content of the file: a replaced token need not change the file's time or size."""
    try:
        return hashlib.sha256(_content(path)).digest()
    except OSError:
        return None


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file")  # a pipe would be waited for, and is empty the next time
    return path.read_bytes()


def _read(path: Path) -> dict[str, str]:
    """Label by token."""
    try:
        lines = _content(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise OptionError(
            f"The token file {path} cannot be read: {reason}.", hint="Check its name and its permissions."
        ) from error
    labels: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not (text := re.sub(r"(^|\s)#.*", "", line).strip()):
            continue
        match = _LINE.fullmatch(text)
        if match is None or len(match["token"]) < _MIN_TOKEN_CHARS:
            raise OptionError(
                f"Line {number} of the token file {path} must be LABEL TOKEN, with a token of at least "
                f"{_MIN_TOKEN_CHARS} characters.",
                hint="Make one with: openssl rand -hex 24.",
            )
        if match["token"] in labels:
            raise OptionError(
                f"Line {number} of the token file {path} has the same token as a line before it.",
                hint="Give each label a token of its own.",
            )
        labels[match["token"]] = match["label"]
    return labels


class RowBudget:
    """Target rows per second for each label: a bucket that fills at `rows_per_s` and holds two seconds of it."""

    def __init__(self, rows_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rows_per_s
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()  # requests are charged where they arrive, streams where they are computed

    def spend(self, label: str, num_rows: int) -> None:
        """Take rows from the bucket; it may go below zero once. Raises RateLimited while it is empty."""
        if wait_s := self._take(label, num_rows, refuse=True):
            raise RateLimited(f"The token {label} has used up its {self._rate:g} rows a second.", retry_after_s=wait_s)

    def charge(self, label: str, num_rows: int) -> float:
        """Take rows even from an empty bucket; returns the seconds until it holds a row again."""
        return self._take(label, num_rows, refuse=False)

    def _take(self, label: str, num_rows: int, *, refuse: bool) -> float:
        """Seconds until the bucket holds a row again, or 0. With `refuse` nothing is taken from an empty bucket."""
        if not self._rate:
            return 0.0
        with self._lock:
            burst, now = max(_BURST_S * self._rate, _MIN_BURST_ROWS), self._clock()
            left, before = self._left.get(label, (burst, now))
            left = min(left + (now - before) * self._rate, burst)
            is_refused = refuse and left <= 0
            after = left if is_refused else left - num_rows
            self._left[label] = after, now
        return (1 - after) / self._rate if is_refused or (not refuse and after <= 0) else 0.0
