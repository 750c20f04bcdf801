"""`skydraft` in a process of its own that starts in a twentieth of a second.

A process imports the package once and forks for each start. `command()` is a program that asks it to: it takes the
arguments, streams, folder and environment that `skydraft` would take, passes signals on and ends as that ended. Tests
of the start itself use `sys.executable`.
"""

import atexit
import gc
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Runs without site-packages, which it does not need: 15 ms. A `python` beside it runs the program on its stdin.
_CLIENT = """#!{python} -IS
import marshal, os, signal, socket, sys

def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False

streams = [number for number in range(3) if is_open(number)]
starter = socket.socket(socket.AF_UNIX)
starter.connect({path!r})
arguments = [os.fsencode(word) for word in sys.argv]
asked = marshal.dumps((os.getcwdb(), dict(os.environb), arguments, streams))
socket.send_fds(starter, [len(asked).to_bytes(8, "big")], streams)
starter.sendall(asked)
started = int(starter.recv(16, socket.MSG_WAITALL))
with open({path!r} + f".{{os.getpid()}}", "w") as file:
    file.write(str(started))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(started, number))
status = int(starter.recv(16, socket.MSG_WAITALL) or 70)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@cache
def command(name: str = "skydraft") -> str:
    """The path of a program that is used as `skydraft` is, or as `python` is with a program on its stdin."""
    path = _folder() / name
    path.write_text(_CLIENT.format(python=sys.executable, path=str(_folder() / "starter")), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


class Started(subprocess.Popen[str]):
    """`skydraft` with these arguments. Signals go to the process itself, so that it can be stopped and killed, too."""

    def __init__(self, *arguments: str, **streams: Any) -> None:
        super().__init__([command(), *arguments], text=True, **streams)

    def child(self) -> int:
        """The id of the process itself; 0 when it has ended before it was known."""
        told = _folder() / f"starter.{self.pid}"
        while self.poll() is None and not (told.exists() and told.read_text()):
            time.sleep(0.001)
        return int(told.read_text()) if self.poll() is None else 0

    def send_signal(self, sig: int) -> None:
        if child := self.child():
            os.kill(child, sig)


@cache
def _folder() -> Path:
    """The folder of the programs, with the process that forks; it ends when this one does."""
    folder = tempfile.TemporaryDirectory(prefix="skydraft-")
    starter = subprocess.Popen(
        [sys.executable, "-m", "tests.starting", f"{folder.name}/starter"], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert starter.stdin and starter.stdout
    assert starter.stdout.readline() == b"ready\n"

    def end() -> None:
        starter.communicate()
        folder.cleanup()

    atexit.register(end)
    return Path(folder.name)


def _fork_for_each(path: str) -> None:
    """Answer programs at `path` until stdin closes. Returns in a process that a program asked for, and nowhere else."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes that `_start` runs in
    gc.freeze()
    os.write(1, b"ready\n")
    while True:
        if 0 in select.select([listener, 0], [], [])[0]:
            os._exit(0)
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _start(asked)
        asked.close()


def _start(asked: socket.socket) -> None:
    """Fork what was asked for and tell how it ends; when the asking program ends first, it is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, *_ = socket.recv_fds(asked, 8, 3)
    request = b""
    while len(request) < int.from_bytes(length, "big"):
        request += asked.recv(1 << 20)
    child = os.fork()
    if child == 0:
        asked.close()
        return _become(streams, *marshal.loads(request))
    for stream in streams:
        os.close(stream)
    asked.sendall(b"%16d" % child)
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, asked], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        asked.sendall(b"%16d" % status)
    os._exit(0)


def _become(fds: list[int], folder: bytes, environ: dict[bytes, bytes], words: list[bytes], kept: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):  # `nohup` and background jobs ignore some of them
        signal.signal(number, signal.SIG_DFL)
    for number, fd in zip(kept, fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for number in {0, 1, 2} - set(kept):
        os.close(number)
    os.chdir(folder)
    os.environb.clear()
    os.environb.update(environ)
    sys.argv = [os.fsdecode(word) for word in words]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        how: Any = {"mode": "w" if number else "r", "encoding": "utf-8", "closefd": False}
        how |= {"buffering": 1, "errors": "backslashreplace"} if number == 2 else {}
        setattr(sys, name, os.fdopen(number, **how) if number in kept else None)


if __name__ == "__main__":
    import skydraft_command
    from skydraft.cli import main as _imported  # noqa: F401
    from skydraft.engines.toy import open_toy

    open_toy("toy")  # what it has drawn stays for each start
    _fork_for_each(sys.argv[1])
    if Path(sys.argv[0]).name == "python":
        sys.argv[:] = ["-"]
        exec(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    else:
        skydraft_command.main()
