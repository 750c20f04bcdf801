"""Run code that a model wrote, isolated by bubblewrap or Docker.

This protects the machine. It does not prevent cheating: a program that reads its own source finds the secret word that
marks passed tests.
"""

import os
import secrets
import subprocess
from functools import cache

from skydraft.errors import OptionError

SECONDS = 10  # default time limit of a program
_MEMORY, _FILES, _PROCESSES = 512 << 20, 16 << 20, 12  # bytes, bytes of files; we need half of the processes
_START_S = 120.0  # time to start the isolation on a busy machine; Docker may fetch its image first
_NOBODY = "65534"
_IMAGE = "python:3.12-slim"
_TOOLS = ("bwrap", "docker")
_OWN_WORDS = ("bwrap:", "docker:", "setpriv:")  # beginnings of a tool's errors on stderr, where no program can write
# The program is read from stdin. The result is the end of its output, then its exit status.
_INSIDE = '{ python3 -I -S -B - 2>&1; echo "ended with status $?"; } | tail -c 400'
_DONE = "ended with status 0"


def command(tool: str, seconds: int, *, is_root: bool) -> list[str]:
    """Return the command line that isolates a Python program with `tool`, and kills all its processes after
    `seconds`."""
    inside = ["timeout", "-s", "KILL", str(seconds), "sh", "-c", _INSIDE]
    if tool == "docker":
        return [
            "docker", "run", "--rm", "--interactive", "--network=none", "--ipc=none", "--read-only",
            f"--tmpfs=/work:size={_FILES},mode=1777", "--workdir=/work", f"--memory={_MEMORY}",
            f"--memory-swap={_MEMORY}", f"--pids-limit={_PROCESSES}", "--ulimit=core=0", "--ulimit=nofile=64",
            "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={_NOBODY}:{_NOBODY}", "--log-driver=none",
            _IMAGE, *inside,
        ]  # fmt: skip
    # The kernel does not limit root's processes, whichever user they have inside.
    drop = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"] if is_root else []
    return [
        *drop, "bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session",
        "--clearenv", "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--ro-bind", "/usr", "/usr",
        *(part for path in ("/bin", "/lib", "/lib64") for part in ("--ro-bind-try", path, path)),
        "--size", str(_FILES), "--tmpfs", "/work", "--chdir", "/work", "--remount-ro", "/",
        "prlimit", f"--as={_MEMORY}", f"--nproc={_PROCESSES}", f"--fsize={_FILES}", "--nofile=64", "--core=0", *inside,
    ]  # fmt: skip


def run(program: str, seconds: int = SECONDS) -> str:
    """Run a Python program with only the standard library. Return "" if it reached its last statement and exited
    normally, else its last line of output or why it was stopped. Raises OptionError without isolation."""
    return _run(_tool(), program, seconds)


def _run(tool: str, program: str, seconds: int) -> str:
    word = secrets.token_hex(16)
    try:
        done = subprocess.run(
            command(tool, seconds, is_root=os.geteuid() == 0), input=f"{program}\nprint('\\n{word}')\n",
            encoding="utf-8", errors="replace", capture_output=True, timeout=seconds + _START_S, cwd="/",
        )  # fmt: skip
        faults = [line for line in done.stderr.splitlines() if line.startswith(_OWN_WORDS)]
    except OSError as error:
        faults = [f"{tool}: {error.strerror}"]
    except subprocess.TimeoutExpired:
        faults = [f"{tool}: no answer"]
    if faults:
        raise OptionError(faults[0], hint="Code that a model wrote runs only in isolation; see docs/tasks.md.")
    *said, status = [line for line in done.stdout.splitlines() if line.strip()] or [f"stopped within {seconds} s"]
    if said[-1:] == [word] and status == _DONE:
        return ""
    return ([line for line in said if line != word] or [status])[-1][:200]


@cache
def _tool() -> str:
    """Return the tool that isolates programs here, tried once. Raises OptionError."""
    faults = []
    for tool in _TOOLS:
        try:
            fault = _run(tool, "", SECONDS)
            if not fault:
                return tool
            faults.append(f"{tool}: {fault}")
        except OptionError as error:
            faults.append(error.args[0])
    message = f"--run-code needs bubblewrap 0.8 (bwrap) or Docker, but neither works here ({'; '.join(faults)})."
    raise OptionError(message, hint="Install one, for example with: apt install bubblewrap.")


def isolation() -> str:
    """Describe the isolation of code on this machine. Raises OptionError if there is none."""
    return (
        f"Code runs in {_tool()}: no network, no files except the system's, read-only; at most {SECONDS} s, "
        f"{_MEMORY >> 20} MiB of memory, {_FILES >> 20} MiB of files and {_PROCESSES} processes."
    )
