"""Code in isolation: the argument lists, and, where bubblewrap works, hostile programs that change nothing outside."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skydraft.errors import OptionError
from skydraft.lab.tasks import sandbox
from skydraft.lab.tasks.checks import Python
from skydraft.lab.tasks.sandbox import command, isolation, run

from ..serving import Serving


@pytest.fixture
def isolated() -> None:
    try:
        if not isolation().startswith("Code runs in bwrap"):
            pytest.skip("only bubblewrap is tried out")
    except OptionError as error:
        pytest.skip(str(error))


SECONDS = 2
PROGRAM = ["python3", "-I", "-S", "-B", "-"]
_C = "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
_TOUCH = "try:\n  open({path!r}, 'w').write('x')\nexcept OSError: pass\n"


def test_bubblewrap_shows_the_system_alone_and_no_network() -> None:
    given = command("bwrap", 7, is_root=False)
    assert given[0] == "bwrap" and command("bwrap", 7, is_root=True)[-len(given) :] == given
    assert command("bwrap", 7, is_root=True)[0] == "setpriv"  # the kernel does not count what root starts
    flags = {"--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"}
    assert flags < set(given) and not {"--bind", "--dev-bind", "--share-net"} & set(given)
    mounts = [given[index + 1] for index, part in enumerate(given) if part.startswith("--ro-bind")]
    assert mounts == ["/usr", "/bin", "/lib", "/lib64"]
    own = "--size 16777216 --tmpfs /work --chdir /work --remount-ro / "  # last, or the root could be written
    limits = "prlimit --as=536870912 --nproc=12 --fsize=16777216 --nofile=64 --core=0 timeout -s KILL 7 "
    assert own + limits in " ".join(given)


def test_docker_has_the_same_limits() -> None:
    given, inside = command("docker", 7, is_root=True), command("bwrap", 7, is_root=False)
    image = given.index("python:3.12-slim")
    assert given[:3] == ["docker", "run", "--rm"] and given[image + 1 :] == inside[inside.index("timeout") :]
    assert set(given[3:image]) == {
        "--interactive", "--network=none", "--ipc=none", "--read-only", "--tmpfs=/work:size=16777216,mode=1777",
        "--workdir=/work", "--memory=536870912", "--memory-swap=536870912", "--pids-limit=12", "--ulimit=core=0",
        "--ulimit=nofile=64", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=65534:65534",
        "--log-driver=none",
    }  # fmt: skip


def test_without_isolation_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'docker: Cannot connect to the daemon.' >&2; exit 125\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox._tool.cache_clear()
    with pytest.raises(OptionError) as error:
        run("x = 1")
    assert "docker: Cannot connect to the daemon.). Install one" in error.value.line and "\n" not in error.value.line


@pytest.fixture
def outside(isolated: None, tmp_path: Path) -> Iterator[Path]:
    """A folder of the parent that anyone may write to, with a secret in it; it must stay as it is."""
    tmp_path.chmod(0o777)
    (tmp_path / "secret").write_text("hidden")
    before = {p.pid for p in psutil.process_iter()}
    yield tmp_path
    assert os.listdir(tmp_path) == ["secret"] and (tmp_path / "secret").read_text() == "hidden"
    assert not [name for name in os.listdir("/tmp") if name.startswith("escaped")]
    new = (each for each in psutil.process_iter(["cmdline"]) if each.pid not in before)
    left = [each for each in new if each.info["cmdline"] == PROGRAM]
    assert not psutil.wait_procs(left, timeout=30)[1]  # the kernel ends the last after bubblewrap has ended


# {tmp} is the folder outside, {pid} the process that runs the tests, {port} one that it listens to. Where a program
# passes over what it was refused, it ends without reaching its last line: `raise SystemExit(0)`.
HOSTILE = {
    "a fork bomb that goes on": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "10 GB": "x = bytearray(10 << 30)",
    "sleep": "import time; time.sleep(1000)",
    "a write outside": _TOUCH.format(path="{tmp}/escaped") + "raise SystemExit(0)",
    "deletion of everything": "import shutil; shutil.rmtree('/', ignore_errors=True); open('{tmp}/secret')",
    "this machine's own network": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "a signal to the parent": "import os, signal; os.kill({pid}, signal.SIGKILL)",
    "secrets of the environment": "import os\nos.environ['SKYDRAFT_SECRET']",
    "secrets of the parent": "open('/proc/{pid}/environ')",
    "secrets of files": "open('{tmp}/secret')",
    "output without end": "while True: print('x' * 100_000)",
    "a file without end": "with open('big', 'wb') as f:\n  while True: f.write(bytes(1 << 20))",
    "a daemon that outlives it": "import os, time\nif os.fork() == 0:\n  os.setsid(); os.fork()\n  time.sleep(60)\n"
    "raise SystemExit(0)",
    "a namespace of its own": f"{_C}assert c.unshare(0x10000000) == 0",
    "a mount": f"{_C}assert c.mount(b'none', b'/usr', b'tmpfs', 0, 0) == 0",
    "an early end": "raise SystemExit(0)",
    "a crash": "import ctypes; ctypes.string_at(0)",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_does_nothing_outside(name: str, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a failed task, and nothing happens outside."""
    monkeypatch.setenv("SKYDRAFT_SECRET", "hidden")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        program = HOSTILE[name].replace("{tmp}", str(outside)).replace("{pid}", str(os.getpid()))
        program = program.replace("{port}", str(server.getsockname()[1]))
        began, free = time.perf_counter(), psutil.virtual_memory().available
        fault = run(program, SECONDS)
        assert fault and "hidden" not in fault
        assert time.perf_counter() - began < 20
        assert psutil.virtual_memory().available > free - (3 << 30)
        with pytest.raises(TimeoutError):
            server.accept()


def test_threads_children_and_files_are_there_and_what_is_printed_does_not_pass(isolated: None) -> None:
    program = """
import subprocess, sys, threading
thread = threading.Thread(target=lambda: open("a", "w").write("x" * 100_000))
thread.start(); thread.join()
child = subprocess.run([sys.executable, "-S", "-c", "print(6 * 7)"], capture_output=True, text=True)
assert len(open("a").read()) == 100_000 and child.stdout == "42\\n"
"""
    assert run(program) == ""
    assert run("import numpy", SECONDS)  # the standard library alone
    assert run("print('0' * 32); raise SystemExit(0)", SECONDS) == "0" * 32
    assert run("raise ValueError('so')", SECONDS) == "ValueError: so"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_dies_with_the_process_that_started_it(isolated: None, how: int) -> None:
    code = "from skydraft.lab.tasks.sandbox import _run; _run('bwrap', 'import time; time.sleep(60)', 50)"
    found: list[psutil.Process] = []

    def is_running() -> bool:
        found[:] = psutil.Process(process.pid).children(recursive=True)
        return PROGRAM in [each.info["cmdline"] for each in psutil.process_iter(["cmdline"]) if each in found]

    with subprocess.Popen([sys.executable, "-c", code]) as process:
        Serving.wait_until(is_running)
        process.send_signal(how)
        process.wait()
        assert not psutil.wait_procs(found, timeout=30)[1]


def test_code_of_an_answer_is_found_and_run(isolated: None) -> None:
    asks = {"tests": "assert add(1, 2) == 3", "entry": "add", "prompt": "def add(a, b):\n", "before": "import os"}
    check, whole = Python(kind="python", **asks), "def add(a, b):\n    assert os\n    return a + b"
    in_second = f"Here:\n```python\nx = 1\n```\n```python\n{whole}\n```"
    for text in (in_second, whole, f"```python\n{whole}", "    return a + b"):
        assert check.judge(text).score == 1, text
    wrong = check.judge(in_second.replace("+", "-"))
    assert wrong.score == 0 and wrong.note == "AssertionError" and wrong.answer.startswith("def add")
    assert check.judge("I cannot.").score == 0
