"""A forked child that answers questions, and that can be given up when it never does.

NVML may never return on a sick GPU, and reading a process's memory may wait for ever behind a stuck driver. Such calls are
made in a child: at a deadline it is killed, and if the kernel holds it beyond SIGKILL the parent goes on without it. The
child keeps nothing of the parent's: no terminal, no report, no descriptor but its ends of two pipes.
"""

import fcntl
import marshal
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1  # prctl(2)
REAP_S = 0.5  # a killed child is gone within milliseconds, unless the kernel holds it
_LENGTH = struct.Struct("=I")
_LIMIT_BYTES = 256 << 20

# marshal carries numbers, text, bytes and tuples of them and costs no import; both ends are the same interpreter.
Message = Any


class WorkerSilentError(Exception):
    """No answer came before the deadline, so the child was killed. `stuck`: it did not even die."""

    def __init__(self, *, pid: int, deadline_s: float, stuck: bool) -> None:
        self.pid, self.deadline_s, self.stuck = pid, deadline_s, stuck
        fate = "which SIGKILL does not end" if stuck else "killed"
        super().__init__(f"no answer in {deadline_s:.3g} s, child {pid} {fate}")


class WorkerDiedError(Exception):
    """The child ended without an answer, for example by a fault in a library. `status` as from waitpid, if known."""

    def __init__(self, *, pid: int, status: int | None) -> None:
        self.pid, self.status = pid, status
        how = "ended" if status is None else f"ended with status {os.waitstatus_to_exitcode(status)}"
        super().__init__(f"child {pid} {how} before it answered")


class Worker:
    """One child running `serve(request)` for each request, in order; a context manager that leaves no child behind.

    `prepare` runs in the child before the first request. An exception in either ends the child. Not for a process that has
    threads.
    """

    def __init__(self, serve: Callable[[Message], Message], prepare: Callable[[], None] = lambda: None) -> None:
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(serve, prepare, (their_in, their_out), parent)
        os.close(their_in)
        os.close(their_out)
        self._closed = False

    def __enter__(self) -> "Worker":
        """The worker itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the child."""
        self.close()

    def tell(self, request: Message) -> None:
        """Put a question without waiting for its answer; `hear` gets that. Raises WorkerDiedError."""
        data = marshal.dumps(request)
        try:
            _write(self._out, _LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise WorkerDiedError(pid=self.pid, status=self.close()) from error

    def hear(self, *, deadline_s: float) -> Message:
        """The answer to the oldest open question. Raises WorkerSilentError after `deadline_s`, WorkerDiedError."""
        until = time.monotonic() + deadline_s
        try:
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, until))
            return marshal.loads(self._receive(min(length, _LIMIT_BYTES), until))  # noqa: S302 - our own child wrote it
        except TimeoutError as error:
            stuck = self.close() is None
            raise WorkerSilentError(pid=self.pid, deadline_s=deadline_s, stuck=stuck) from error
        except (OSError, EOFError, ValueError) as error:
            raise WorkerDiedError(pid=self.pid, status=self.close()) from error

    def ask(self, request: Message, *, deadline_s: float) -> Message:
        """Question and answer in one, as `tell` and `hear`."""
        self.tell(request)
        return self.hear(deadline_s=deadline_s)

    def fileno(self) -> int:
        """The descriptor that turns readable with an answer, for poll."""
        return self._in

    def close(self, *, wait: bool = True) -> int | None:
        """End the child and collect it: its wait status, or None if it outlives SIGKILL and was left to the kernel.

        Without `wait` it is killed and left for init to collect: for a program that is about to end itself.
        """
        if self._closed:
            return None
        self._closed = True
        os.close(self._in)
        os.close(self._out)
        return _kill(self.pid, wait=wait)

    def _receive(self, size: int, until: float) -> bytes:
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        data = bytearray()
        while len(data) < size:
            if not poll.poll(max(until - time.monotonic(), 0) * 1000):
                raise TimeoutError
            more = os.read(self._in, size - len(data))
            if not more:
                raise EOFError
            data += more
        return bytes(data)


def _kill(pid: int, *, wait: bool) -> int | None:
    pidfd = os.pidfd_open(pid)  # our own child and not yet collected: the pid cannot be another's
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return os.waitpid(pid, 0)[1] if poll.poll(REAP_S * 1000 if wait else 0) else None
    finally:
        os.close(pidfd)


def _run_child(
    serve: Callable[[Message], Message], prepare: Callable[[], None], ends: tuple[int, int], parent: int
) -> NoReturn:
    """Everything the child ever does. Never returns into the parent's code, whatever happens."""
    try:
        # A parent whose standard streams were closed has given their numbers to the pipes.
        ends = (fcntl.fcntl(ends[0], fcntl.F_DUPFD, 3), fcntl.fcntl(ends[1], fcntl.F_DUPFD, 3))
        _leave_parent(ends, parent)
        prepare()
        while head := _read(ends[0], _LENGTH.size):
            answer = marshal.dumps(serve(marshal.loads(_read(ends[0], *_LENGTH.unpack(head)))))  # noqa: S302
            _write(ends[1], _LENGTH.pack(len(answer)) + answer)
    except BaseException:  # noqa: BLE001 - the parent sees the child end, which is the answer
        os._exit(1)
    os._exit(0)


def _leave_parent(ends: tuple[int, int], parent: int) -> None:
    """Die with the parent, and hold neither its terminal nor its files, even if a system call never returns."""
    import ctypes  # in the child alone: a gate's parent starts sooner without it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    low, high = sorted(ends)
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, min(max(os.sysconf("SC_OPEN_MAX"), 1 << 16), 1 << 20))


def _read(descriptor: int, size: int) -> bytes:
    """Exactly `size` bytes, or what came before the other end was closed."""
    data = bytearray()
    while len(data) < size and (more := os.read(descriptor, size - len(data))):
        data += more
    return bytes(data)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
