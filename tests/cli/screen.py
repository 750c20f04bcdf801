"""A command on a terminal: what it writes to the screen, byte for byte, and what is typed there."""

import fcntl
import io
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..starting import command as skydraft

_WAIT_S = 60.0


class Stream(io.StringIO):
    """What was written to a stream that is a terminal, or is none."""

    def __init__(self, is_terminal: bool = True) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@contextmanager
def terminal(
    home: Path, *args: str, command: Seq[str] = (), piped: str = "", **env: str
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """(The process of a command, its terminal); `piped` names the streams, out or err, that are no terminal."""
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    main, screen = pty.openpty()
    out, err = (subprocess.DEVNULL if name == piped else screen for name in ("out", "err"))
    with subprocess.Popen(
        [*(command or [skydraft()]), *args], stdin=screen, stdout=out, stderr=err, start_new_session=True,
        env=plain | {"SKYDRAFT_HOME": str(home), "TERM": "xterm-256color"} | env,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
    ) as child:  # fmt: skip
        os.close(screen)
        yield child, main
        os.close(main)


def read(main: int, until: str = "") -> str:
    """What comes to the screen from now on, to its end, or until there is this pattern."""
    raw, written, end = b"", "", time.monotonic() + _WAIT_S
    while not (until and re.search(until, written, re.DOTALL)):
        assert time.monotonic() < end, written[-500:]
        try:
            if select.select([main], [], [], 0.1)[0]:
                raw += os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        written = raw.decode(errors="replace").replace("\r\n", "\n")
    return written


def on_screen(home: Path, *args: str, **how: Any) -> tuple[int, str]:
    """(Exit status, the screen) of a command."""
    with terminal(home, *args, **how) as (child, main):
        screen = read(main)
        return child.wait(_WAIT_S), screen
