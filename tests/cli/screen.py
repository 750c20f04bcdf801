"""A command on a terminal: what it writes to the screen, byte for byte."""

import io
import os
import pty
import select
import subprocess
import time
from collections.abc import Sequence as Seq
from pathlib import Path

from ..starting import command as skydraft

_WAIT_S = 60.0


class Stream(io.StringIO):
    """What was written to a stream that is a terminal, or is none."""

    def __init__(self, is_terminal: bool = True) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


def on_screen(home: Path, *args: str, command: Seq[str] = (), piped: str = "", **env: str) -> tuple[int, str]:
    """(Exit status, the screen) of a command; `piped` names the streams, out or err, that are no terminal."""
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    main, screen = pty.openpty()
    with subprocess.Popen(
        [*(command or [skydraft()]), *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if piped == "out" else screen,
        stderr=subprocess.DEVNULL if piped == "err" else screen,
        env=plain | {"SKYDRAFT_HOME": str(home), "TERM": "xterm-256color"} | env,
    ) as child:
        os.close(screen)
        written, end = b"", time.monotonic() + _WAIT_S
        while time.monotonic() < end:
            try:
                if select.select([main], [], [], 0.1)[0]:
                    written += os.read(main, 65536)
            except OSError:  # the other end is closed
                break
        os.close(main)
        return child.wait(_WAIT_S), written.decode(errors="replace").replace("\r\n", "\n")
