"""What was piped in beside a prompt: `git diff | skydraft generate "What changed?"`."""

from __future__ import annotations

import os
import select
import stat
import sys

from skydraft.cli.terminal import TERMINAL
from skydraft.errors import PromptError

_SILENT_S = 2.0


def with_piped(prompt: str | None, *, quiet: bool = False) -> str | None:
    """What was piped in, and `prompt` on the line after it; as `llm` does. Nothing is read from a terminal.

    Whether a pipe that is silent will ever say anything cannot be known. Two seconds are waited for its first byte;
    then it is left out, and that is said unless `quiet`. What has begun is read to its end. Raises PromptError for
    bytes that are no text.
    """
    text = _read(quiet)
    if not text.strip():
        return prompt
    return text if prompt is None else text.removesuffix("\n") + "\n" + prompt


def _read(quiet: bool) -> str:
    try:
        number = sys.stdin.fileno()
        kind = os.fstat(number).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or not there at all
        return ""
    if not stat.S_ISREG(kind) and not _is_talking(number, kind, quiet):
        return ""
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales, bytes that are not UTF-8 arrive as lone surrogates
        return text
    except UnicodeError as error:
        raise PromptError("What was piped in is not valid UTF-8.", hint="Convert it first, with iconv say.") from error
    except OSError:  # open for writing alone
        return ""


def _is_talking(number: int, kind: int, quiet: bool) -> bool:
    """Whether a pipe has something to read, or its end."""
    if not stat.S_ISFIFO(kind) and not stat.S_ISSOCK(kind):
        return False  # a terminal, or a device such as /dev/null
    try:
        if select.select([number], [], [], _SILENT_S)[0]:
            return True
    except OSError:  # Windows selects among sockets alone
        return False
    if not quiet:
        TERMINAL.say(f"nothing came from stdin for {_SILENT_S:g} s, so it is left out.")
    return False
