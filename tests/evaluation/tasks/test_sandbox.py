"""Hostile programs: nothing happens outside, and each is a failed task."""

import os
import re
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
from skydraft.evaluation.tasks import jail, sandbox
from skydraft.evaluation.tasks.checks import Python
from skydraft.evaluation.tasks.sandbox import run

try:
    sandbox.isolation()
except OptionError as error:
    pytest.skip(str(error), allow_module_level=True)

SECONDS = 2
_C = "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
_TOUCH = "try:\n  open({path!r}, 'w').write('x')\nexcept OSError: pass\n"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of the parent that anyone may write to, with a secret in it; it must stay as it is."""
    tmp_path.chmod(0o777)
    (tmp_path / "secret").write_text("hidden")
    before, there = {p.pid for p in psutil.process_iter()}, os.listdir("/tmp")
    yield tmp_path
    assert os.listdir(tmp_path) == ["secret"] and (tmp_path / "secret").read_text() == "hidden"
    deadline = time.monotonic() + 30  # a test beside this one may have a folder, too, but not for long
    while new := {name for name in os.listdir("/tmp") if name.startswith(("skydraft-code", "escaped"))} - set(there):
        assert time.monotonic() < deadline, new
        time.sleep(0.1)
    new_processes = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert not [process for process in new_processes if "program.py" in (process.info["cmdline"] or [])]


# {tmp} is the folder outside, {pid} the process that runs the tests, {port} one that it listens to. Where a program
# passes over what it was refused, it ends without reaching its last line: `raise SystemExit(0)`.
HOSTILE = {
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a fork bomb that goes on": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "threads without end": "import threading\nwhile True: threading.Thread(target=threading.Event().wait).start()",
    "10 GB": "x = bytearray(10 << 30)",
    "memory in small pieces": "x = []\nwhile True: x.append(bytes(1 << 20))",
    "memory of several processes": "import os\nos.fork(); os.fork()\nx = []\nwhile True: x.append(b'x' * (8 << 20))",
    "a socket that knows no namespace": "import socket; socket.socket(40, socket.SOCK_STREAM)",  # VSOCK, to the host
    "news of files that are opened": "import fcntl, os; fcntl.fcntl(os.open('/usr/bin', os.O_RDONLY), 1026, 1)",
    "a command for the file system": "import fcntl, os; fcntl.ioctl(os.open('/usr', 0), 0x80086601, bytes(8))",
    "an old kind of sockets": "import socket; socket.socket(9, socket.SOCK_SEQPACKET)",  # X.25, from a kernel module
    "an endless loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "a write outside": _TOUCH.format(path="{tmp}/escaped") + "raise SystemExit(0)",
    "a write to /tmp": "open('/tmp/escaped', 'w')",
    "a write to Python": "import os; open(os.__file__, 'a')",
    "deletion of everything": "import shutil; shutil.rmtree('/', ignore_errors=True); open('{tmp}/secret')",
    "a symlink that escapes": "import os\nos.symlink('{tmp}', 'link')\nopen('link/escaped', 'w')",
    "the way up": "import os\nfor _ in range(40): os.chdir('..')\nopen('.{tmp}/secret')",
    "a chroot that escapes": "import os\nos.mkdir('d'); os.chroot('d')",
    "the network": "import socket; socket.create_connection(('1.1.1.1', 53), 1)",
    "this machine's own network": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "names of hosts": "import socket; socket.gethostbyname('pypi.org')",
    "a signal to the parent": "import os, signal; os.kill({pid}, signal.SIGKILL)",
    "signals to everyone": "import os\nfor pid in (-1, 1, os.getppid()): os.kill(pid, 9)\nraise SystemExit(0)",
    "a signal to its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "secrets of the environment": "import os\nos.environ['SKYDRAFT_SECRET']",
    "secrets of the parent": "open('/proc/{pid}/environ')",
    "secrets of files": "open('{tmp}/secret')",
    "output without end": "while True: print('x' * 100_000)",
    "a file without end": "with open('big', 'wb') as f:\n  while True: f.write(bytes(1 << 20))",
    "files without end": "n = 0\nwhile True:\n  open(str(n), 'w').write('x' * 100_000); n += 1",
    "a daemon that outlives it": "import os, time\nif os.fork() == 0:\n  os.setsid(); os.fork()\n  time.sleep(60)\n"
    "raise SystemExit(0)",
    "a namespace of its own": _C + "assert c.unshare(0x10000000) == 0",
    "a mount": _C + "assert c.mount(b'none', b'/usr', b'tmpfs', 0, 0) == 0",
    "an early end": "raise SystemExit(0)",
    "an early end from C": "import os; os._exit(0)",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "no Python": "]",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_a_failed_task_and_nothing_happens_outside(
    name: str, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYDRAFT_SECRET", "hidden")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        values = {"{tmp}": str(outside), "{pid}": str(os.getpid()), "{port}": str(server.getsockname()[1])}
        program = HOSTILE[name]
        for key, value in values.items():
            program = program.replace(key, value)
        began, free = time.perf_counter(), psutil.virtual_memory().available
        outcome = run(program, SECONDS)
        assert not outcome.passed and outcome.note and "hidden" not in outcome.note
        assert time.perf_counter() - began < 8
        assert psutil.virtual_memory().available > free - (3 << 30)
        with pytest.raises(TimeoutError):
            server.accept()


def test_threads_children_pipes_and_event_loops_are_there() -> None:
    program = """
import asyncio, os, shutil, signal, subprocess, sys, tempfile, threading, time
with tempfile.TemporaryDirectory(dir=".") as folder:
    open(folder + "/a", "w").write("x" * 100_000)
    shutil.copy2(folder + "/a", folder + "/b")
    assert os.stat(folder + "/b").st_size == 100_000 and sorted(os.listdir(folder)) == ["a", "b"]
done = []
thread = threading.Thread(target=done.append, args=(1,))
thread.start(); thread.join()
assert done
assert subprocess.run([sys.executable, "-S", "-c", "print(6 * 7)"], capture_output=True, text=True).stdout == "42\\n"
async def main():
    await asyncio.sleep(0.01)
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "print(1)", stdout=-1)
    return (await process.communicate())[0] + (await asyncio.to_thread(lambda: b"2"))
assert asyncio.run(main()) == b"1\\n2"
signal.signal(signal.SIGALRM, lambda *_: done.append(2)); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)
assert done == [1, 2] and os.cpu_count() and time.process_time() and os.urandom(4)
"""
    outcome = run(program)
    assert outcome.passed, outcome.note
    assert not run("import numpy", SECONDS).passed  # the standard library alone


def test_every_call_that_is_not_named_is_refused() -> None:
    """Also those that this kernel has and the list's author did not know."""
    allowed = {number for calls in jail.allowed_calls(os.uname().machine) for number in calls}
    special = jail.CALLS[os.uname().machine][1]
    probes = (335, 336)  # these Linux lets through, and kills whoever makes them itself
    others = sorted(set(range(600)) - allowed - {*special, *probes})
    assert len(others) > 400
    for numbers, argument in ((others, "0"), ([special[0]] * 7, "1 << (17, 25, 26, 27, 28, 29, 30)[i] | 17")):
        program = f"""{_C}
for i, number in enumerate({numbers}):
    assert c.syscall(number, {argument}, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 38, (i, number)
"""
        assert run(program, SECONDS).passed, run(program, SECONDS)


CALLS = """
read write readv writev pread64 pwrite64 preadv pwritev lseek sendfile copy_file_range open openat creat close
close_range dup dup2 dup3 pipe pipe2 fcntl ioctl stat fstat lstat newfstatat statx statfs fstatfs access faccessat
faccessat2 readlink readlinkat getdents getdents64 mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link
linkat symlink symlinkat chmod fchmod fchmodat truncate ftruncate fallocate fsync fdatasync utime utimes utimensat
futimesat umask getcwd chdir fchdir getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr mmap munmap mremap
mprotect msync madvise brk poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
epoll_pwait2 socketpair sendto recvfrom sendmsg recvmsg shutdown getsockname getpeername getsockopt clone fork vfork
execve exit exit_group wait4 waitid kill tkill tgkill setsid setpgid set_tid_address set_robust_list get_robust_list
rseq arch_prctl futex sched_yield sched_getaffinity getcpu rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending
rt_sigtimedwait rt_sigsuspend sigaltstack restart_syscall pause alarm setitimer getitimer nanosleep clock_nanosleep
clock_gettime clock_getres gettimeofday time getpid getppid gettid getpgid getpgrp getsid getuid geteuid getgid getegid
getgroups getresuid getresgid getrlimit setrlimit prlimit64 getrusage times uname sysinfo getpriority getrandom
"""


@pytest.mark.parametrize(
    ("machine", "header"), [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")]
)
def test_the_numbers_are_those_of_the_calls_that_are_meant(machine: str, header: str) -> None:
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip("the kernel's headers are not here")
    defined = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text(), re.MULTILINE)
    numbers = {{"fstatat": "newfstatat"}.get(name, name): int(number) for name, number in defined}
    listed = {number for calls in jail.allowed_calls(machine) for number in calls}
    assert jail.CALLS[machine][1] == tuple(numbers[name] for name in ("clone", "fcntl", "ioctl", "socketpair"))
    assert listed | {*jail.CALLS[machine][1]} == {numbers[name] for name in CALLS.split() if name in numbers}


def test_a_word_that_a_program_prints_is_not_the_word_that_passes() -> None:
    assert not run("print('0' * 32); raise SystemExit(0)", SECONDS).passed
    assert run("raise ValueError('so')", SECONDS).note == "ValueError: so"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_dies_with_the_process_that_started_it(how: int) -> None:
    code = "from skydraft.evaluation.tasks.sandbox import *; run('import time; time.sleep(60)', 50)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        found: list[psutil.Process] = []
        for _ in range(1200):
            found = psutil.Process(process.pid).children(recursive=True)
            if any("program.py" in each.cmdline() for each in found if each.is_running()):
                break
            time.sleep(0.05)
        assert len(found) == 3  # the jail, process 1 of its namespace, the program
        process.send_signal(how)
        process.wait()
        _, alive = psutil.wait_procs(found, timeout=30)
        assert not alive


def test_code_of_an_answer_is_found_and_run() -> None:
    asks = {"tests": "assert add(1, 2) == 3", "entry": "add", "prompt": "def add(a, b):\n", "before": "import os"}
    check = Python(kind="python", **asks)
    whole = "def add(a, b):\n    assert os\n    return a + b"
    in_second = f"Here:\n```python\nx = 1\n```\n```python\n{whole}\n```"
    for text in (in_second, whole, f"```python\n{whole}", "    return a + b"):
        assert check.judge(text).score == 1, text
    wrong = check.judge(f"```python\n{whole.replace('+', '-')}\n```")
    assert wrong.score == 0 and wrong.note == "AssertionError" and wrong.answer.startswith("def add")
    assert check.judge("I cannot.").score == 0
