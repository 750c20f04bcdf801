"""The jail of one program: started by `sandbox` as a script of its own, in Python's standard library alone.

    python -I -S jail.py LIMITS < PROGRAM

New namespaces take away the network, all other processes and all files: the program sees Python, the system's libraries
(both read-only) and a folder of its own in memory. Process 1 of the new namespace waits for the program, and with it
everything that the program started dies. It prints a line of JSON: the exit status and the end of the output.
"""

from __future__ import annotations

import ctypes
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
# What the kernel calls the machine; the numbers of socket, add_key (two before keyctl) and io_uring_setup.
_CALLS = {"x86_64": (0xC000003E, 41, 248, 425), "aarch64": (0xC00000B7, 198, 217, 425)}
_LAST_FAMILY = 10  # IPv6: what comes after, as VSOCK, may know no namespaces
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
    """Give up every right, and set the limits."""
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


def _refuse_calls() -> None:
    """Refuse what namespaces leave open: other kinds of sockets, the keys of the caller's session, io_uring."""
    machine, socket, add_key, io_uring = _CALLS[os.uname().machine]
    load, equal, at_least, above, give = 0x20, 0x15, 0x35, 0x25, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    steps = (
        (load, 0, 0, 4), (equal, 0, 10, machine), (load, 0, 0, 0), (at_least, 8, 0, 1 << 30),  # x32
        (equal, 5, 0, io_uring), (equal, 2, 0, socket), (at_least, 0, 4, add_key), (above, 3, 2, add_key + 2),
        (load, 0, 0, 16), (above, 0, 1, _LAST_FAMILY), (give, 0, 0, refuse), (give, 0, 0, allow), (give, 0, 0, kill),
    )  # fmt: skip
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    at = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program)))
    _check(_libc.prctl(_FILTER_CALLS, 2, at, 0, 0), "seccomp")


def _run(program: bytes, limits: dict[str, int], uid: int | None) -> dict[str, object]:
    """Run the program as a child of this process, the first of its namespace; returns what is to be told."""
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
