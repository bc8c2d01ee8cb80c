"""PID 1 of a space: makes namespaces around itself, then starts what it is asked to, collects the dead, and knows who ended.

`init.py SPEC` with SPEC as JSON: `cgroup` (made in every hierarchy, and entered), `hostname`, `parent` (its starter's pid),
`listener` (the descriptor of a listening SOCK_SEQPACKET socket), and `root`: how the space's file system is furnished
(furnish.py). The program stays outside and ends with its PID 1, which is in namespaces of its own of every kind.

A request is one JSON message, an answer another. `start` (name, argv, env, log; descriptors to hand down, from 3 on) and
`open` (name) answer with the pid and bring a pidfd; `list` tells each name's exit code, None while it runs.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from cluster.programs import furnish
from node.programs import cgroups, namespaces

MESSAGE_BYTES = 100_000
MAX_DESCRIPTORS = 4
_EVERYTHING = (
    namespaces.NEWPID
    | namespaces.NEWNS
    | namespaces.NEWNET
    | namespaces.NEWIPC
    | namespaces.NEWUTS
    | namespaces.NEWCGROUP
)


def main() -> int:
    """Outside: makes the cgroups and namespaces, and waits for the end of PID 1."""
    spec = json.loads(sys.argv[1])
    namespaces.die_with_parent(signal.SIGKILL)  # until it is ready, it is nobody's but its starter's
    if os.getppid() != spec["parent"]:
        return 1
    groups = cgroups.Cgroups(spec["cgroup"])
    if groups.exist():  # a node that starts again
        groups.remove()
    groups.make()
    groups.enter()
    namespaces.unshare(_EVERYTHING)
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        _first_process(spec, groups, writer)
    os.close(writer)
    os.close(spec["listener"])
    if os.read(reader, 1):
        namespaces.die_with_parent(0)
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def _first_process(spec: dict[str, Any], groups: cgroups.Cgroups, ready: int) -> NoReturn:
    namespaces.die_with_parent(signal.SIGKILL)
    socket.sethostname(spec["hostname"])
    furnish.furnish(spec["root"], groups.hierarchies)
    os.write(ready, b"r")
    os.close(ready)
    os.chdir("/")
    Init(socket.socket(fileno=spec["listener"])).serve()


class Init:
    """The processes that were started here, by name."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._pids: dict[str, int] = {}
        self._codes: dict[str, int] = {}

    def serve(self) -> NoReturn:
        """Answers requests and collects children, for ever."""
        wake, wakened = socket.socketpair()
        wakened.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakened.fileno(), warn_on_full_buffer=False)
        waiting = selectors.DefaultSelector()
        waiting.register(self._listener, selectors.EVENT_READ)
        waiting.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is wake:
                    wake.recv(4096)
                else:
                    self._answer()
            self._collect()

    def _collect(self) -> None:
        names = {pid: name for name, pid in self._pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in names:
                self._codes[names[pid]] = os.waitstatus_to_exitcode(status)

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            message, handed, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_DESCRIPTORS)
            try:
                value, brought = self._do(json.loads(message), handed)
                answer = {"value": value}
            except (OSError, ValueError, KeyError) as error:
                answer, brought = {"error": repr(error)}, []
            with contextlib.suppress(OSError):  # whoever asked is gone
                socket.send_fds(connection, [json.dumps(answer).encode()], brought)
            for descriptor in (*handed, *brought):
                os.close(descriptor)

    def _do(self, request: dict[str, Any], handed: list[int]) -> tuple[Any, list[int]]:
        self._collect()  # whose end was seen by its pidfd is known here to have ended
        match request["do"]:
            case "start":
                return self._start(request, handed)
            case "open":
                pid = self._pids[request["name"]]
                return pid, [os.pidfd_open(pid)]
            case "list":
                return {name: self._codes.get(name) for name in self._pids}, []
            case other:
                raise ValueError(f"{other} is no request")

    def _start(self, request: dict[str, Any], handed: list[int]) -> tuple[int, list[int]]:
        name = request["name"]
        if name in self._pids and name not in self._codes:
            raise ValueError(f"{name} runs already, as pid {self._pids[name]}")
        pid = os.fork()
        if pid == 0:
            _become(request, handed)
        self._pids[name] = pid
        self._codes.pop(name, None)
        return pid, [os.pidfd_open(pid)]


def _become(request: dict[str, Any], handed: list[int]) -> NoReturn:
    """The child: a session of its own, its log, its descriptors, its program."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open("/dev/null", os.O_RDONLY)
        saved = [os.dup(descriptor) for descriptor in handed]
        for number, descriptor in enumerate((null, log, log, *saved)):
            os.dup2(descriptor, number)
        os.closerange(3 + len(saved), 256)
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except BaseException as error:
        os.write(2, f"init: cannot start {request['name']}: {request['argv'][0]}: {error!r}\n".encode())
    os._exit(127)


if __name__ == "__main__":
    sys.exit(main())
