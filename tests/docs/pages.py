"""What a page shows in blocks: fenced ones, and indented ones after an empty line; the commands of a block; and a
reader who follows a page in a folder of its own: commands one by one, servers in the background.

Replaced, so that no model is downloaded and nothing leaves this machine:

- `skydraft` and `.venv/bin/skydraft` are a script that puts toys in the place of the demo pair, by name and by default,
  and, as `python` does, runs in a process that is forked from one that has imported skydraft;
- `cloud.example` is localhost, `--host 0.0.0.0` is `--host 127.0.0.1`;
- `scp` and `ssh` copy from, and run in, the folder that stands for the server;
- `data/*.jsonl` are the first two lines of ours, and of a set of tasks two are done.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from ..starting import ROOT
from ..starting import command as forked

_BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)\n```$|(?:\A|(?<=\n\n))((?:    [^\n]*\n|\s*\n)+)")
NAMES = {"qwen2.5-coder-0.5b": "toy:drift=0.2", "qwen2.5-coder-1.5b": "toy"}
REPLACED = {"cloud.example": "localhost", "--host 0.0.0.0": "--host 127.0.0.1", "--limit 20": "--limit 2"}
PORTS = {"serve": 7373, "gateway": 8137}
LIMIT_S = 120
READY = "Ctrl-C stops."
_SKYDRAFT = """#!{python} -IS
import os, sys

names, args = {names!r}, sys.argv[1:]
draft, target = names.values()
if args[0] != "models":
    args = [names.get(arg, arg) for arg in args]
if args[0] in ("generate", "chat", "gateway", "compare", "calibrate", "doctor") and "--edge-model" not in args:
    args += ["--edge-model", draft] if "--cloud" in args else ["--edge-model", draft, "--cloud-model", target]
if args[:2] == ["learn", "export"]:
    args += ["--edge-model", draft]
if args[0] == "serve" and "--model" not in args:
    args += ["--model", target]
os.execv({skydraft!r}, [{skydraft!r}, *args])
"""
_SHELL = """set -euo pipefail
scp() {{ cp "{server}/${{1#*:}}" "$2"; }}
ssh() {{ shift; (cd "{server}" && "$@"); }}
"""


class Block(NamedTuple):
    language: str  # of the fence, "" for an indented block
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]


def blocks_of(page: str) -> list[Block]:
    found = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [
        Block(language, fenced or re.sub("(?m)^    ", "", indented).strip("\n"))
        for language, fenced, indented in found
        if fenced or indented.strip()
    ]


def commands_of(block: Block) -> list[str]:
    """The commands of a block of shell: lines, joined where bash says that one alone is not complete."""
    commands: list[str] = []
    pending = ""
    for line in block.text.splitlines():
        pending += line
        if line.endswith("\\") or not _is_complete(pending):
            pending += "\n"
        elif pending.strip():
            commands.append(pending)
            pending = ""
    assert not pending, f"this is no whole command: {pending}"
    return commands


def _is_complete(text: str) -> bool:
    checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    return checked.returncode == 0 and "here-document" not in checked.stderr


class Reader:
    """Somebody at a shell, who has `folder` and everything that a page made so far."""

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "bin"
        self.server, self.device = folder / "server", folder / "device"
        self.here = self.server
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        for made in (self._bin, self.server, self.device, folder / "home"):
            made.mkdir(parents=True)
        skydraft = self._bin / "skydraft"
        skydraft.write_text(_SKYDRAFT.format(python=sys.executable, names=NAMES, skydraft=forked()), encoding="utf-8")
        skydraft.chmod(0o755)
        (self._bin / "python").symlink_to(forked("python"))
        for place in (self.server, self.device):
            self._furnish(place)
        kept = {name: value for name, value in os.environ.items() if name not in ("SKYDRAFT_HOME", "CLOUD")}
        self._environment = kept | {
            "PATH": f"{self._bin}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "HOME": str(folder / "home"), "SKYDRAFT_HOME": str(folder / "home" / "cache"), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip

    def _furnish(self, place: Path) -> None:
        (place / ".venv" / "bin").mkdir(parents=True)
        (place / ".venv" / "bin" / "skydraft").symlink_to(self._bin / "skydraft")
        (place / "data").mkdir()
        for entry in (ROOT / "data").iterdir():
            if entry.suffix == ".jsonl":
                lines = entry.read_text(encoding="utf-8").splitlines(keepends=True)
                (place / "data" / entry.name).write_text("".join(lines[:2]), encoding="utf-8")
            else:
                (place / "data" / entry.name).symlink_to(entry)

    def follow(self, block: Block, skip: tuple[str, ...]) -> str:
        """Run a block, less the commands that begin as one of `skip`; returns what it printed. Fails where one does."""
        if block.language == "python":
            code = block.text
            for name, toy in NAMES.items():
                code = code.replace(f'"{name}"', f'"{toy}"')
            return self.run(f"python - <<'PYTHON'\n{code}\nPYTHON")
        return "".join(self.run(each) for each in commands_of(block) if not f"{each}\n".startswith(skip))

    def run(self, command: str, *, fails: bool = False) -> str:
        """Run one command, in the background where it is a server; returns what it printed."""
        for said, done in REPLACED.items():
            command = command.replace(said, done)
        words = shlex.split(command, comments=True)
        if len(words) > 1 and words[0].endswith("skydraft") and words[1] in PORTS:
            return self._serve(command, words[1])
        state = self._bin / "environment"
        script = f"{_SHELL.format(server=self.server)}{command}\nenv -0 > {shlex.quote(str(state))}\n"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.here, env=self._environment, input=b"\xe4\xbd\xa0\xe5\xa5\xbd\n",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S,
        )  # fmt: skip
        printed = done.stdout.decode(errors="replace")
        assert (done.returncode != 0) == fails, f"{command}\n\n{printed}"
        if not fails:
            pairs = (entry.partition("=") for entry in state.read_text(encoding="utf-8").split("\0") if entry)
            self._environment = {name: value for name, _, value in pairs}
        return printed

    def _serve(self, command: str, what: str) -> str:
        self._stop(what)
        wait_for_port(PORTS[what])
        log = self._bin / f"{what}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.here, env=self._environment, stdout=out, stderr=out,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._servers[what] = child
        until = time.monotonic() + LIMIT_S
        while READY not in (printed := log.read_text(encoding="utf-8", errors="replace")):
            assert child.poll() is None and time.monotonic() < until, f"{command}\n\n{printed}"
            time.sleep(0.05)
        return printed

    def _stop(self, what: str) -> None:
        if (child := self._servers.pop(what, None)) and child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                assert child.wait(LIMIT_S) == 0, (self._bin / f"{what}.log").read_text(encoding="utf-8")
            finally:
                child.kill()

    def leave(self) -> None:
        with ExitStack() as stack:  # where one cannot be stopped, the others are, too
            for what in list(self._servers):
                stack.callback(self._stop, what)


def wait_for_port(port: int) -> None:
    """Wait a little for a port that the pages name; skips the test where somebody else keeps it."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    pytest.skip(f"port {port}, which the page names, is in use by something else on this machine")
