"""Keys: bearer tokens from a file, each with a label, by which its owner is known."""

import hmac
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from skydraft.errors import NotAuthorized, OptionError, telling
from skydraft.files import read_file, warn_if_shared

T = TypeVar("T")
log = logging.getLogger("skydraft.access")
ANONYMOUS = "anonymous"
_MIN_TOKEN_CHARS = 16
_LINE = re.compile(r"(?P<label>[\w.@-]{1,64})\s+(?P<token>[\x21-\x7e]+)")
_RELOAD_S = 1.0


class FromFiles:
    """What is read from files again and again. If they become wrong, an error is logged once and it stays as it was."""

    _fault = ""  # of the files as they were read last

    def _renewed(self, read: Callable[[], T], before: T, kept: str) -> T:
        """What is read now, or `before`."""
        fault, self._fault = self._fault, ""
        try:
            return read()
        except OptionError as error:
            self._fault = str(error)
            if self._fault != fault:
                log.error("%s: %s", kept, error)
            return before


class Keyring(FromFiles):
    """The tokens of a file with lines `LABEL TOKEN`; `#` begins a comment. Without a file every client is "anonymous".

    Changes are seen within a second. Raises OptionError for a file that is unreadable, wrong or empty. If it becomes
    unreadable or wrong later, an error is logged and the old tokens stay. An empty one refuses all.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self.has_tokens = path is not None  # else nothing distinguishes the callers
        self._clock = clock
        self._looked_at = clock()
        self._labels = _read(path) if path else {}
        self._had_several = False
        if path and not self._labels:
            message = f"The token file {path} holds no tokens, so every client would be refused."
            raise OptionError(message, hint="Write lines: LABEL TOKEN.")
        if path:
            warn_if_shared(path)

    def has_several(self) -> bool:
        self._had_several = self._had_several or len(set(self._labels.values())) > 1
        return self._had_several

    def label(self, authorization: str | None) -> str:
        """The label of the token in an authorization header. Raises NotAuthorized."""
        if (path := self._path) is None:
            return ANONYMOUS
        now = self._clock()
        if now - self._looked_at >= _RELOAD_S:
            self._looked_at = now
            self._labels = self._renewed(lambda: _read(path), self._labels, "tokens kept as they were")
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise NotAuthorized("This server requires a token.", hint="Give one with --cloud-token-file.")
        given = token.strip().encode()
        # Every token is compared, each in constant time, so the duration reveals nothing.
        labels = [label for known, label in self._labels.items() if hmac.compare_digest(known.encode(), given)]
        if not labels:
            raise NotAuthorized("This server does not know this token.", hint="Ask the operator of the server.")
        return labels[0]


def _read(path: Path) -> dict[str, str]:
    """Label by token."""
    with telling(OptionError, f"The token file {path} cannot be read", "Check its name and its permissions."):
        lines = read_file(path).decode().splitlines()
    labels = dict[str, str]()
    for number, line in enumerate(lines, 1):
        if not (text := re.sub(r"(^|\s)#.*", "", line).strip()):
            continue
        match = _LINE.fullmatch(text)
        if match is None or len(match["token"]) < _MIN_TOKEN_CHARS or match["token"] in labels:
            form = f"LABEL TOKEN, with a token of its own of at least {_MIN_TOKEN_CHARS} characters"
            hint = "Make one with: openssl rand -hex 24."
            raise OptionError(f"Line {number} of the token file {path} must be {form}.", hint=hint)
        labels[match["token"]] = match["label"]
    return labels
