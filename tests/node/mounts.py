"""Real filesystems in a mount namespace of the tests' own, and processes that use files in every way and namespace."""

import ctypes
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x00020000
_MS_NODEV = 4
_MS_BIND = 0x1000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_CHILD_LIMIT_S = 60

# Opens a file, and says so; then uses it only in the way that its first argument says, until its standard input ends.
_HOLDER = """
import ctypes, os, platform, socket, sys, threading
way, path = sys.argv[1], sys.argv[2]
fd = os.open(path, os.O_RDWR)
started = threading.Event()
libc = ctypes.CDLL(None, use_errno=True)
if way in ("mapped", "mapped by a thread"):
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    assert libc.mmap(None, 4096, 3, 1, fd, 0) not in (None, ctypes.c_void_p(-1).value)
    os.close(fd)
elif way == "in flight":
    ours, theirs = socket.socketpair()
    socket.send_fds(ours, [b"x"], [fd])
    os.close(fd)
def stay():
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
if way == "mapped by a thread":
    threading.Thread(target=lambda: (started.wait(), stay()), daemon=True).start()
    started.set()
    libc.syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2) ends the main thread alone
stay()
"""
NAMESPACES = {
    "the same namespaces": (),
    "another mount namespace": ("unshare", "--mount", "--propagation", "private"),
    "another PID namespace": ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
}


@contextmanager
def private_mounts() -> Iterator[None]:
    """A mount namespace of this thread's own, whose mounts vanish with it; back to the old one afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts filesystems of its own")
    home = os.getcwd()
    before = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    _call("unshare", _CLONE_NEWNS)
    try:
        _call("mount", b"none", b"/", None, _MS_REC_PRIVATE, None)
        yield
    finally:
        _call("setns", before, _CLONE_NEWNS)
        os.close(before)
        os.chdir(home)


def mount(kind: str, where: pathlib.Path, options: str = "", *, nodev: bool = True) -> pathlib.Path:
    """Mount a filesystem of this type on a directory, which is made if need be. Raises OSError."""
    where.mkdir(parents=True, exist_ok=True)
    _call("mount", kind.encode(), os.fsencode(where), kind.encode(), _MS_NODEV * nodev, options.encode() or None)
    return where


def bind(what: pathlib.Path, where: pathlib.Path) -> pathlib.Path:
    """Show a directory under another path too."""
    where.mkdir(parents=True, exist_ok=True)
    _call("mount", os.fsencode(what), os.fsencode(where), None, _MS_BIND, None)
    return where


def _call(name: str, *arguments: Any) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@contextmanager
def user_of(path: pathlib.Path, way: str, namespace: str = "the same namespaces") -> Iterator[subprocess.Popen[str]]:
    """A live process that uses a file.

    "open"; "mapped" through a descriptor that is closed; "mapped by a thread" that outlives its main thread; "in flight" in a
    socket.
    """
    command = [*NAMESPACES[namespace], sys.executable, "-c", _HOLDER, way, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.communicate(timeout=20)


def in_child(function: Callable[[], Any]) -> Any:
    """What a function gives in a process of its own, where it may change its user, its limits or its hooks."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(_CHILD_LIMIT_S)
        try:
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(function(), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert answer, f"the child said nothing, wait status {status}"
    return pickle.loads(answer)


def without_leases(folder: pathlib.Path) -> pathlib.Path:
    """A library to preload that makes every filesystem refuse leases, as some do. Raises FileNotFoundError without cc."""
    source, library = folder / "nolease.c", folder / "nolease.so"
    source.write_text(
        "#define _GNU_SOURCE\n"
        "#include <dlfcn.h>\n#include <errno.h>\n#include <fcntl.h>\n#include <stdarg.h>\n"
        "static int answer(const char *name, int fd, int command, void *argument) {\n"
        "  if (command == F_SETLEASE) { errno = EINVAL; return -1; }\n"
        "  return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, name))(fd, command, argument);\n}\n"
        "#define WRAP(NAME) int NAME(int fd, int command, ...) { va_list rest; va_start(rest, command); \\\n"
        "  void *argument = va_arg(rest, void *); va_end(rest); return answer(#NAME, fd, command, argument); }\n"
        "WRAP(fcntl)\nWRAP(fcntl64)\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def purge_in_program(root: pathlib.Path, *, before: tuple[str, ...] = (), **environment: str) -> dict[str, Any]:
    """shm.purge of one root in a program of its own, as {"removed": {name: evidence}, "kept": {name: [reason, evidence]}}."""
    code = (
        "import json, os, sys, time\n"
        "from cleanslate import shm\n"
        "tally = shm.purge([sys.argv[1]], min_age_s=0, every_family=False, dry_run=False, now=time.time() + 1)\n"
        "name = lambda record: os.path.basename(record.path)\n"
        "print(json.dumps({'removed': {name(r): r.evidence for r in tally.removed},\n"
        "                  'kept': {name(r): [r.reason, r.evidence] for r in tally.kept}}))\n"
    )
    done = subprocess.run(
        [*before, sys.executable, "-c", code, str(root)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "initcontainer"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
