"""The jail of one program: started by `sandbox` as a script of its own, in Python's standard library alone.

    python -I -S jail.py LIMITS < PROGRAM

New namespaces take away the network, all other processes and all files: the program sees Python, the system's libraries
(both read-only) and a folder of its own in memory. Process 1 of the new namespace waits for the program, and with it
everything that the program started dies. It prints a line of JSON: the exit status and the end of the output.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path

_NEW_FILES, _NEW_NAMES, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV = 0x1000, 0x4000, 0x40000, 2, 4
_MOUNT_SETATTR = 442  # the same number on every architecture; since Linux 5.12
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_READ_ONLY = 0x1 | 0x2 | 0x4  # and no set-uid programs, no devices
_AT_RECURSIVE, _DETACH = 0x8000, 2
_DIE_WITH_PARENT, _FILTER_CALLS, _KEEP_NO_CAPABILITY, _NO_NEW_PRIVILEGES = 1, 22, 24, 38
# The calls that a program may make, by what the kernel calls the machine: its number, then those of clone, fcntl,
# ioctl and socketpair, then ranges: of open files, paths, memory of the process, threads and children, pairs of
# sockets, signals and clocks. Any other is refused: kernels add calls that make files or memory outside of every limit,
# or tell of other programs (memfd_create, memfd_secret, inotify, cachestat, ...).
CALLS: dict[str, tuple[int, tuple[int, int, int, int], str]] = {
    "x86_64": (
        0xC000003E, (56, 72, 16, 53),
        "0-15 17-26 28 32-40 44-48 51-52 55 57-63 74-91 95-100 102 104 107-112 115 118 120-121 124 127-128 130-132 "
        "137-138 140 158 160 186 191-196 200-202 204 213 217-219 228-235 247 257-258 261-271 273-274 280-281 285 "
        "291-293 295-296 302 309 316 318 326 332 334 436 439 441",
    ),
    "aarch64": (
        0xC00000B7, (220, 25, 29, 199),
        "8-13 17 20-24 34-38 43-50 52-53 56-57 59 61-73 78-80 82-83 88 93-96 98-103 113-115 123-124 128-137 139 "
        "141 148 150 153-158 160 163-166 168-169 172-179 204-207 209-212 214-216 221-222 226-227 233 260-261 276 278 "
        "285 291 293 436 439 441",
    ),
}  # fmt: skip
_NAMESPACES = 0x7E020000  # flags of clone
_OTHER_FILES, _COPY_AND_CLOSE = 1024, 1030  # commands of fcntl: from when on they are Linux's own, and one of these
_TERMINAL = 0x5400, 0x54FF  # commands of ioctl that any open file may get
_UNIX = 1
_FIRST_UID, _NUM_UIDS = 60_000, 5_000  # nobody's, so that processes are counted for this program alone
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
_INSIDE, _WORK = "/inside", "/work"
_TAIL = 400  # bytes of the output that are passed on

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _check(
        _libc.mount(
            source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data and data.encode()
        ),
        f"mount {target}",
    )


def _leave_namespaces() -> None:
    """Enter new namespaces. Root may; anyone else needs a user namespace, in which he is root."""
    flags, uid, gid = _NEW_FILES | _NEW_NAMES | _NEW_IPC | _NEW_PIDS | _NEW_NET, os.geteuid(), os.getegid()
    _check(_libc.unshare(flags | (_NEW_USER if uid else 0)), "unshare")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    # Memory of System V outside of any process is bounded by no limit of a process.
    for name, most in (("shmall", "0"), ("sem", "0 0 0 0"), ("msgmni", "0")):
        Path("/proc/sys/kernel", name).write_text(most)


def _build_root(root: str, python: str, num_bytes: int) -> None:
    """Make `root` a file system in memory that shows Python and the system's libraries, and move into it."""
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, f"size={num_bytes},nr_inodes=4096,mode=755")
    os.mkdir(root + _INSIDE)
    for path in dict.fromkeys((*_SYSTEM, python)):
        inside = root + _INSIDE + path
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
        elif os.path.isdir(path) and not os.path.exists(inside):
            os.makedirs(inside)
            _mount(path, inside, None, _BIND | _RECURSIVE)
            attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
            result = _libc.syscall(_MOUNT_SETATTR, -100, inside.encode(), _AT_RECURSIVE, attributes, 32)
            _check(result, "mount_setattr")
    os.mkdir(root + _INSIDE + _WORK)
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount")
    os.chroot(_INSIDE)  # below the root of the namespace: from there nobody may make user namespaces
    os.chdir(_WORK)


def _confine(limits: dict[str, int], uid: int | None) -> None:
    for capability in range(64):
        _libc.prctl(_KEEP_NO_CAPABILITY, capability, 0, 0, 0)
    if uid is not None:
        os.chown(_WORK, uid, uid)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _refuse_calls()
    of = {
        resource.RLIMIT_AS: limits["memory"], resource.RLIMIT_CPU: limits["seconds"], resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits["files"], resource.RLIMIT_NOFILE: 32, resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
    }  # fmt: skip
    for limit, value in of.items():
        resource.setrlimit(limit, (value, value))


def allowed_calls(machine: str) -> list[range]:
    parts = (part.partition("-") for part in CALLS[machine][2].split())
    return [range(int(first), int(last or first) + 1) for first, _, last in parts]


def _refuse_calls() -> None:
    """Let the kernel answer any call that is not allowed as one that it does not know, so that libraries do without."""
    machine = os.uname().machine
    name, (clone, fcntl, ioctl, socketpair), _ = CALLS[machine]
    load, equal, at_least, above, has_any, give = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
    refuse, allow, kill = (give, 0, 0, 0x00050000 | errno.ENOSYS), (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x80000000)
    first_argument, second_argument = (load, 0, 0, 16), (load, 0, 0, 24)
    steps = [
        (load, 0, 0, 4), (equal, 1, 0, name), kill, (load, 0, 0, 0),
        (equal, 0, 4, clone), first_argument, (has_any, 0, 1, _NAMESPACES), refuse, allow,
        (equal, 0, 4, socketpair), first_argument, (equal, 1, 0, _UNIX), refuse, allow,
        (equal, 0, 5, fcntl), second_argument, (at_least, 0, 2, _OTHER_FILES), (equal, 1, 0, _COPY_AND_CLOSE), refuse,
        allow,
        (equal, 0, 5, ioctl), second_argument, (at_least, 0, 1, _TERMINAL[0]), (above, 0, 1, _TERMINAL[1]), refuse,
        allow,
    ]  # fmt: skip
    for calls in allowed_calls(machine):
        steps += [(at_least, 0, 2, calls.start), (above, 1, 0, calls.stop - 1), allow]
    steps.append(refuse)
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    at = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program)))
    _check(_libc.prctl(_FILTER_CALLS, 2, at, 0, 0), "seccomp")


def _run(program: bytes, limits: dict[str, int], uid: int | None) -> dict[str, object]:
    Path("program.py").write_bytes(program)
    os.chmod("program.py", 0o644)
    output, nothing = os.open("output", os.O_CREAT | os.O_RDWR, 0o600), os.open("empty", os.O_CREAT | os.O_RDWR)
    pid = os.fork()
    if not pid:
        try:
            for ours, theirs in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(ours, theirs)
            _confine(limits, uid)
            command = [sys.executable, "-P", "-I", "-S", "-B", "program.py"]
            os.execve(command[0], command, {"HOME": _WORK})
        finally:
            os._exit(127)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(limits["seconds"])
    try:
        status = next(status for ended, status in iter(os.wait, None) if ended == pid)
        signal.alarm(0)  # or it could go off below, as a failure of this machine
    except TimeoutError:
        return {"status": -signal.SIGKILL, "tail": f"stopped after {limits['seconds']} s"}
    size = os.fstat(output).st_size
    tail = os.pread(output, _TAIL, max(size - _TAIL, 0)).decode(errors="replace")
    return {"status": os.waitstatus_to_exitcode(status), "tail": tail}


def _stop(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    limits = json.loads(sys.argv[1])
    program = sys.stdin.buffer.read()
    uid = None if os.geteuid() else _FIRST_UID + os.getpid() % _NUM_UIDS
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    _leave_namespaces()
    if not os.fork():
        try:
            _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            _build_root(limits["root"], sys.base_prefix, limits["files"])
            print(json.dumps(_run(program, limits, uid)), flush=True)
        except OSError as error:
            print(json.dumps({"failed": str(error)}), flush=True)
        finally:
            os._exit(0)  # and with process 1 the whole namespace
    os.wait()


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(json.dumps({"failed": str(error)}))
