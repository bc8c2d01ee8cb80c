"""The outside of a space (programs/init.py): start programs in it, signal them, wait for them, run commands, see its files."""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cluster.places import PROGRAMS, PYTHON
from cluster.programs.init import MAX_DESCRIPTORS, MESSAGE_BYTES

ANSWER_DEADLINE_S = 30.0
_CREDENTIALS = "3i"  # struct ucred
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS) + socket.CMSG_SPACE(struct.calcsize(_CREDENTIALS))
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}


class SpaceError(Exception):
    """A space that did not do what it was asked to, or does not answer."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """A program started in a space, held by its pidfd, so that no signal ever reaches another one."""

    name: str
    pidfd: int

    @property
    def alive(self) -> bool:
        """Whether it runs still; stopped by SIGSTOP counts as running."""
        return not self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s` seconds."""
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def send(self, number: signal.Signals) -> None:
        """Sends a signal. Raises ProcessLookupError if it has ended."""
        signal.pidfd_send_signal(self.pidfd, number)

    def stop(self, timeout_s: float = 20.0, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends it: the signal, and SIGKILL to what is still there at the deadline."""
        if self.alive:
            self.send(number)
        if not self.wait(timeout_s):
            self.send(signal.SIGKILL)
            self.wait(timeout_s)

    def __del__(self) -> None:
        os.close(self.pidfd)


class Space:
    """A space by the socket of its PID 1."""

    def __init__(self, path: Path) -> None:
        self.socket = path

    @classmethod
    def make(cls, path: Path, spec: Mapping[str, Any], log: Path) -> Self:
        """Starts a space of the machine; its PID 1 answers when this returns. Raises SpaceError.

        Blocks for about 0.1 s. The process survives the caller once it has answered, and not before.
        """
        with listener(path) as listening, log.open("ab") as output:
            argv = command({**spec, "parent": os.getpid(), "listener": listening.fileno()})
            process = subprocess.Popen(
                argv,
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=ENVIRONMENT,
            )
        space = cls(path)
        try:
            space.components()
        except SpaceError as error:
            process.kill()
            process.wait()
            raise SpaceError(f"{spec['hostname']}: cannot make its namespaces; see {log}") from error
        threading.Thread(
            target=process.wait, daemon=True
        ).start()  # it lives on; should it end before us, it is collected
        return space

    @property
    def pid(self) -> int:
        """The pid of its PID 1 as the caller's PID namespace sees it. Raises SpaceError if there is none."""
        return self._ask({"do": "list"}).pid

    def start(
        self,
        name: str,
        argv: Sequence[str | os.PathLike[str]],
        *,
        log: str,
        env: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> Component:
        """Starts a program; `log` is a path of the space, descriptors arrive as 3, 4, … Raises SpaceError."""
        words = [os.fspath(word) for word in argv]
        request = {"do": "start", "name": name, "argv": words, "log": log, "env": ENVIRONMENT | dict(env or {})}
        return self._component(name, request, descriptors)

    def component(self, name: str) -> Component:
        """One that was started here, by somebody else perhaps. Raises SpaceError if it runs no more."""
        return self._component(name, {"do": "open", "name": name}, ())

    def components(self) -> dict[str, int | None]:
        """The exit code of everything that was started here; None while it runs."""
        return dict(self._ask({"do": "list"}).value)

    def command(self, *argv: str | os.PathLike[str], namespaces: str = "--all") -> list[str]:
        """A command line that runs `argv` in the space as a child of the caller."""
        return ["nsenter", f"--target={self.pid}", *namespaces.split(), "--", *map(os.fspath, argv)]

    def run(self, *argv: str | os.PathLike[str], timeout_s: float = 60.0, input: str | None = None) -> str:  # noqa: A002
        """Runs a short command in the space and returns its output. Raises SpaceError with what it said."""
        return run(self.command(*argv), timeout_s=timeout_s, stdin=input)

    def path(self, path: str | os.PathLike[str]) -> Path:
        """The space's file `path` as one of the caller's."""
        return Path(f"/proc/{self.pid}/root/{os.fspath(path).lstrip('/')}")

    def _component(self, name: str, request: dict[str, Any], descriptors: Sequence[int]) -> Component:
        return Component(name=name, pidfd=self._ask(request, descriptors).descriptors[0])

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> "_Answer":
        with self._connect() as connection:
            try:
                socket.send_fds(connection, [json.dumps(request).encode()], list(descriptors))
                message, ancillary, _, _ = connection.recvmsg(MESSAGE_BYTES, _ANCILLARY_BYTES)
            except OSError as error:
                raise SpaceError(f"{self.socket}: no answer to {request['do']}: {error}") from error
        answer = json.loads(message or b'{"error": "the space has ended"}')
        if "error" in answer:
            raise SpaceError(f"{self.socket}: cannot {request['do']} {request.get('name', '')}: {answer['error']}")
        return _Answer.of(answer["value"], {kind: data for _, kind, data in ancillary})

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(ANSWER_DEADLINE_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            connection.connect(os.fspath(self.socket))
        except OSError as error:
            connection.close()
            raise SpaceError(f"{self.socket}: cannot connect: {error}; the space has ended") from error
        return connection


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What PID 1 said, what it handed over, and its pid, which the kernel attests."""

    value: Any
    descriptors: list[int]
    pid: int

    @classmethod
    def of(cls, value: Any, ancillary: Mapping[int, bytes]) -> Self:
        raw = ancillary.get(socket.SCM_RIGHTS, b"")
        descriptors = [int(number) for number in struct.unpack(f"{len(raw) // 4}i", raw)]
        pid, _, _ = struct.unpack(_CREDENTIALS, ancillary[socket.SCM_CREDENTIALS])
        return cls(value=value, descriptors=descriptors, pid=pid)


def run(argv: Sequence[str], *, timeout_s: float = 60.0, stdin: str | None = None) -> str:
    """Runs a short command and returns its output. Raises SpaceError with what it said."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "env": ENVIRONMENT}
    done = subprocess.run(argv, input=stdin or "", timeout=timeout_s, **how)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise SpaceError(f"{' '.join(argv)}: ended with {done.returncode}: {said}")
    return done.stdout


def listener(path: Path) -> socket.socket:
    """A listening socket at a path, for a space's PID 1."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(os.fspath(path))
    listening.listen(64)
    return listening


def command(spec: Mapping[str, Any]) -> list[str]:
    """The command line that makes a space of this description."""
    return [*PYTHON, os.fspath(PROGRAMS / "init.py"), json.dumps(spec)]
