"""Namespaces, mounts and signals by system call, for the programs that build a test's machine. Linux only, root only."""

import ctypes
import os
from collections.abc import Iterable

NEWNS = 0x00020000
NEWCGROUP = 0x02000000
NEWUTS = 0x04000000
NEWIPC = 0x08000000
NEWPID = 0x20000000
NEWNET = 0x40000000
BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 0x40000
SHARED = 0x100000
NOSUID_NODEV_NOEXEC = 0x2 | 0x4 | 0x8

_NODES = (("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0))
_LINKS = (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"))
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """unshare(2); with NEWPID the next child is PID 1 of the new namespace."""
    _check(_LIBC.unshare(flags), f"unshare {flags:#x}")


def enter(pid: int, flags: int) -> None:
    """setns(2) into the namespaces of `pid`; with NEWPID the next child is in that PID namespace."""
    pidfd = os.pidfd_open(pid)
    _check(_LIBC.setns(pidfd, flags), f"enter the namespaces of pid {pid}")
    os.close(pidfd)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    kind_bytes = kind.encode() if kind else None
    result = _LIBC.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), data.encode())
    _check(result, f"mount {kind or source} on {target}")


def own_mounts() -> None:
    """Keeps every later mount of this mount namespace from spreading to another."""
    mount("none", "/", None, RECURSIVE | PRIVATE)


def cover(directory: str, keep: Iterable[str], *, mode: str = "755") -> None:
    """Mounts an empty tmpfs on `directory`; what lies at the paths in `keep` stays visible there."""
    kept = {path: os.open(path, os.O_PATH) for path in keep if path.startswith(directory + "/")}
    mount("tmpfs", directory, "tmpfs", 0, f"mode={mode}")
    for path, descriptor in kept.items():
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, None, BIND | RECURSIVE)
        os.close(descriptor)


def own_devices() -> None:
    """Covers /dev with one of this mount namespace's own: the nodes that every program expects, pts and shm."""
    cover("/dev", ())
    os.umask(0)
    for name, major, minor in _NODES:
        os.mknod(f"/dev/{name}", 0o020666, os.makedev(major, minor))
    for name, target in _LINKS:
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.mkdir("/dev/pts")
    mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", "/dev/ptmx")
    os.mkdir("/dev/shm")
    mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777")
    os.umask(0o022)


def die_with_parent(signal_number: int) -> None:
    """Asks the kernel for `signal_number` when the parent dies."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "set the parent-death signal")


def set_comm(name: str) -> None:
    """Sets this process's comm, cut to 15 bytes by the kernel."""
    _check(_LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0), "set the comm")
