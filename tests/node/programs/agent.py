"""The one process of a machine that the test talks to: starts programs inside, sends signals, mounts.

Requests and answers are one JSON message each on a SOCK_SEQPACKET socket. `spawn` brings four descriptors: standard input,
output, error, and one that gets the exit code (negative: the signal) when the program has ended.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any, NoReturn

import cgroups
import namespaces

MESSAGE_BYTES = 200_000  # below the default socket buffer of 208 KiB; holds an environment
_CONTAINER = namespaces.NEWPID | namespaces.NEWNS | namespaces.NEWIPC


def serve(control: socket.socket) -> NoReturn:
    """Answers until the test closes its end."""
    waiting = selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is control:
                _answer(control, waiting)
            else:
                _collect(key, waiting)


def _collect(key: selectors.SelectorKey, waiting: selectors.BaseSelector) -> None:
    pid, status = key.data
    waiting.unregister(key.fileobj)
    os.close(key.fd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody asks any more, as after a program that could not be started
        os.write(status, str(code).encode())
    os.close(status)


def _answer(control: socket.socket, waiting: selectors.BaseSelector) -> None:
    message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 4)
    if not message:
        sys.exit(0)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # recv_fds cannot ask the kernel for that
    request = json.loads(message)
    try:
        answer = {"value": _do(request, descriptors, waiting)}
    except OSError as error:
        answer = {"error": f"{request['do']}: {error}", "errno": error.errno}
    control.send(json.dumps(answer).encode())


def _do(request: dict[str, Any], descriptors: list[int], waiting: selectors.BaseSelector) -> int | None:
    match request["do"]:
        case "spawn":
            return _spawn(request, descriptors, waiting)
        case "signal":
            return os.kill(request["pid"], request["signal"])
        case "mount":
            return namespaces.mount(*request["arguments"])
        case "cover":
            return namespaces.cover(request["directory"], request["keep"])
        case "write":
            return _write(request["path"], request["text"])
        case other:
            raise OSError(f"{other} is no request")


def _write(path: str, text: str) -> None:
    """For files whose meaning depends on the writer's namespaces."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _spawn(request: dict[str, Any], descriptors: list[int], waiting: selectors.BaseSelector) -> int:
    """Starts a program and returns its pid in the machine once exec has worked."""
    *stdio, status = descriptors
    news, report = os.pipe()
    if request["pid"] is not None:
        _write("/proc/sys/kernel/ns_last_pid", str(request["pid"] - 1))
    child = os.fork()
    if child == 0:
        _become(request, stdio, report)
    waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, status))
    for descriptor in (*stdio, report):
        os.close(descriptor)
    with os.fdopen(news, encoding="utf-8") as lines:
        told = dict(line.rstrip("\n").split("=", 1) for line in lines)
    if "error" in told:
        raise OSError(int(told["errno"]), told["error"])
    return int(told.get("pid", child))


def _become(request: dict[str, Any], stdio: list[int], report: int) -> NoReturn:
    """The child: enters what was asked for and turns into the program."""
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, programs expect it
        for number, descriptor in enumerate(stdio):
            os.dup2(descriptor, number)
        if request["session"]:
            os.setsid()
        if request["container"] or request["inside"]:
            _enter_container(request, report)
        for directory in request["cgroups"]:
            cgroups.join(directory)
        _change_user(request["user"])
        os.chdir(request["cwd"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        os.write(report, f"errno={error.errno}\nerror={request['argv'][0]}: {error.strerror}\n".encode())
    os._exit(127)


def _enter_container(request: dict[str, Any], report: int) -> None:
    """Returns in a process inside a container's namespaces, new or joined; its parent stays outside, as a shim does."""
    if request["inside"]:
        namespaces.enter(request["inside"], _CONTAINER)
    else:
        namespaces.unshare(_CONTAINER)
    inner = os.fork()
    if inner:
        os.write(report, f"pid={inner}\n".encode())
        os.closerange(0, 1 << 16)
        _end_like(inner)
    if request["inside"]:
        return
    namespaces.own_mounts()
    namespaces.mount("proc", "/proc", "proc", namespaces.NOSUID_NODEV_NOEXEC)
    namespaces.mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777")


def _end_like(child: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _change_user(uid: int | None) -> None:
    if uid is None:
        return
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
