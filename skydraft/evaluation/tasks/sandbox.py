"""Runs code that a model wrote: in a process of its own that sees no network, no other process and no file of yours.

It keeps the machine from harm. It does not keep a program from cheating: one that reads its own source finds the word
that says that all tests were passed.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from skydraft.errors import OptionError

_JAIL = Path(__file__).with_name("jail.py")
SECONDS = 10  # of a program, where its task says no other
_LIMITS = {"memory": 512 << 20, "files": 16 << 20, "processes": 8}  # bytes a process, bytes of all files together
_START_S = 20  # most that making the namespaces may take on a busy machine; the jail keeps the time of the program


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended: whether it came to its end, and the last line of its output, or why it was stopped."""

    passed: bool
    note: str


def run(program: str, seconds: int = SECONDS) -> Outcome:
    """Run a Python program, with the standard library alone. Raises OptionError where this machine cannot isolate it.
    An outcome is passed only if the last statement was reached, so that an early exit fails whatever its status."""
    word = secrets.token_hex(16)
    found = _start(f"{program}\nprint('\\n{word}')\n", seconds)
    if "failed" in found:
        raise OptionError(
            f"This machine does not let a program be isolated ({found['failed']}).",
            hint="Code runs only on Linux 5.14 or later, as root or where users may make namespaces.",
        )
    *said, last = [line for line in str(found["tail"]).splitlines() if line.strip()] or [""]
    passed = found["status"] == 0 and last == word
    if passed:
        return Outcome(True, "")
    note = last if last != word else (said or [""])[-1]
    return Outcome(False, note[:200] or f"ended with status {found['status']}")


def _start(program: str, seconds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="skydraft-code-") as root:
        asked = json.dumps({**_LIMITS, "seconds": seconds, "root": root})
        command = [sys.executable, "-P", "-I", "-S", str(_JAIL), asked]
        command[0] = os.path.realpath(command[0])  # the jail has no virtual environment
        # Its own session, so that no terminal is there; whatever is left dies with the namespace.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={}, start_new_session=True, cwd="/",
        )  # fmt: skip
        try:
            said, _ = process.communicate(program.encode(errors="replace"), timeout=seconds + _START_S)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            process.kill()  # and with it the namespace
            process.communicate()
    try:
        found: dict[str, object] = json.loads(said)
    except ValueError:  # process 1 did not live to say anything
        return {"status": -9, "tail": "stopped from outside"}
    return found


@cache
def isolation() -> str:
    """What isolation this machine gives, tried out once. Raises OptionError if it gives none."""
    if not run("").passed:
        raise OptionError("A program that does nothing fails in isolation here.", hint="Leave out --run-code.")
    return (
        "Code runs in namespaces of its own: no network, no other process, no files except Python's and the system's, "
        f"read-only; at most {SECONDS} s, {_LIMITS['processes']} processes, {_LIMITS['memory'] >> 20} MiB a process "
        f"and {_LIMITS['files'] >> 20} MiB of files."
    )
