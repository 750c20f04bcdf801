"""What tests of commands share: the command line in this process, what it printed, and servers to reach; and a command
on a terminal: what it writes to the screen, byte for byte, and what is typed there.
"""

import fcntl
import io
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skydraft.cli.main import run
from skydraft.engines.toy import open_toy

from ..serving import Serving, serving
from ..starting import command as skydraft

SMALL = "qwen2.5-coder-0.5b"
TOYS = ["--edge-model", "toy:drift=0.4", "--cloud-model", "toy"]
Invoke = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]
_WAIT_S = 60.0


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command; returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))

    def call(*args: str) -> tuple[int, str, str]:
        status = run(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def refused(invoke: Invoke) -> Refused:
    """Run a command that must print one line on stderr, which says this, and nothing on stdout."""

    def call(*args: str, says: str, status: int = 2) -> None:
        found, out, err = invoke(*args)
        assert (found, out) == (status, ""), err
        assert says in err and err.startswith("skydraft: ") and err.count("\n") == 1 and err.strip().isprintable()

    return call


@pytest.fixture(scope="package")
def server() -> Iterator[Serving]:
    with serving(open_toy("toy")) as running:
        yield running


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a server that wants a token, and a file with one."""
    token_file = tmp_path_factory.mktemp("guarded") / "tokens"
    token_file.write_text("phone a-token-of-24-characters\n")
    with serving(open_toy("toy"), token_file=token_file) as running:
        yield running.address, str(token_file)


@pytest.fixture(scope="package")
def foreign() -> Iterator[str]:
    """The address of a server with another vocabulary."""
    other = open_toy("toy")
    other.vocab = type(other.vocab)([b"a", b"<eos>"], lambda text: [0], special_ids=[1], end_ids=[1])
    with serving(other) as running:
        yield running.address


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


def read_screen(main: int, until: str = "") -> str:
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
        screen = read_screen(main)
        return child.wait(_WAIT_S), screen
