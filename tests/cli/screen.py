"""A command on a terminal: what it writes to the screen, byte for byte."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path

COMMAND = (sys.executable, "-m", "skydraft.cli.main")
_WAIT_S = 60.0


def on_screen(home: Path, *args: str, command: Seq[str] = COMMAND, piped: str = "", **env: str) -> tuple[int, str]:
    """(Exit status, the screen) of a command; `piped` names the streams, out or err, that are no terminal."""
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    main, screen = pty.openpty()
    with subprocess.Popen(
        [*command, *args],
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
