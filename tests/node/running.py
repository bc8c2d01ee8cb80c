"""A program that runs in a machine: its pid there, its pipes, its end."""

import contextlib
import os
import select
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from node.machine import Machine

_CHUNK_BYTES = 1 << 16


class Running:
    """A started program; a context manager that kills it if it is still there. Made by `Machine.popen`."""

    def __init__(self, machine: "Machine", argv: list[str], pid: int, pipes: tuple[int | None, int, int, int]) -> None:
        self.machine = machine
        self.argv = argv
        self.pid = pid
        self._stdin, self._stdout, self._stderr, self._status = pipes
        self._read = {self._stdout: b"", self._stderr: b""}
        self._open = {self._stdout, self._stderr}
        self._code: int | None = None

    @classmethod
    def start(cls, machine: "Machine", request: dict[str, Any], *, stdin: bool) -> Self:
        """Sends the request with fresh pipes. Raises OSError if the program cannot be started."""
        input_end, our_input = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY), None)
        (our_out, out), (our_err, err), (our_status, status) = os.pipe(), os.pipe(), os.pipe()
        theirs, ours = (input_end, out, err, status), (our_input, our_out, our_err, our_status)
        try:
            pid = machine.ask("spawn", theirs, **request)
        except BaseException:
            _close(*ours)
            raise
        finally:
            _close(*theirs)
        return cls(machine, request["argv"], pid, ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self.kill()
            self.wait()
        self.close_stdin()
        _close(self._stdout, self._stderr, self._status)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends it a signal; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.machine.signal(self.pid, number)

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), or None while it runs."""
        return self._await_code(0)

    def wait(self, timeout: float = 20.0) -> int:
        """Its exit code, once it has ended. Raises TimeoutError."""
        code = self._await_code(timeout)
        if code is None:
            raise TimeoutError(
                f"pid {self.pid} {self.argv}: has not ended within {timeout:.0f} s; {self.machine.describe()}"
            )
        return code

    def _await_code(self, timeout: float) -> int | None:
        if self._code is None and select.select([self._status], [], [], timeout)[0]:
            self._code = int(os.read(self._status, 16) or -signal.SIGKILL)  # nothing: the machine's end took it along
        return self._code

    def write(self, text: str) -> None:
        """Writes to its standard input."""
        if self._stdin is None:
            raise ValueError("started without stdin=True")
        os.write(self._stdin, text.encode())

    def close_stdin(self) -> None:
        """Ends its standard input."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def readline(self, timeout: float = 20.0) -> str:
        """The next line of its output without the newline. Raises TimeoutError, or EOFError with what it said on stderr."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._read[self._stdout]:
            if self._stdout not in self._open:
                raise EOFError(f"{self.argv}: no line; standard error: {self._text(self._stderr)}")
            self._fill(deadline)
        line, _, self._read[self._stdout] = self._read[self._stdout].partition(b"\n")
        return line.decode()

    def communicate(self, text: str | None = None, timeout: float = 60.0) -> tuple[str, str]:
        """Writes `text`, closes standard input, reads both outputs to their ends. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        if text is not None:
            self.write(text)
        self.close_stdin()
        while self._open:
            self._fill(deadline)
        return self._text(self._stdout), self._text(self._stderr)

    def completed(self, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Waits for its end and gives what subprocess.run would."""
        out, err = self.communicate(None, timeout)
        return subprocess.CompletedProcess(self.argv, self.wait(timeout), out, err)

    def _text(self, stream: int) -> str:
        return self._read[stream].decode(errors="surrogateescape")

    def _fill(self, deadline: float) -> None:
        ready, _, _ = select.select(list(self._open), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            said = {name: self._text(stream)[-2000:] for name, stream in (("out", self._stdout), ("err", self._stderr))}
            raise TimeoutError(
                f"pid {self.pid} {self.argv}: output not ended in time; {said}; {self.machine.describe()}"
            )
        for stream in ready:
            chunk = os.read(stream, _CHUNK_BYTES)
            self._read[stream] += chunk
            if not chunk:
                self._open.discard(stream)


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)
