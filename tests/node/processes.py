"""The processes of a machine as the test sees them: /proc of the machine, read from outside. Pids are the machine's own."""

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

_POLL_S = 0.005


class Processes(ABC):
    """What a test asks about the processes of a machine."""

    @abstractmethod
    def path(self, path: str | os.PathLike[str]) -> Path:
        """The machine's file `path` as a path of the test's own."""

    @abstractmethod
    def signal(self, pid: int, number: int) -> None:
        """Sends a signal."""

    def pids(self) -> set[int]:
        """Every pid in the machine, zombies too."""
        return {int(name) for name in os.listdir(self.path("/proc")) if name.isdigit()}

    def stat(self, pid: int) -> list[str] | None:
        """/proc/PID/stat from its third field on (state, ppid, pgid, sid…), or None if there is no such process."""
        with contextlib.suppress(OSError):
            return self.path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None

    def state(self, pid: int) -> str | None:
        """The letter of the process's state, or None if there is no such process."""
        stat = self.stat(pid)
        return stat[0] if stat else None

    def parent(self, pid: int) -> int | None:
        """The pid of its parent, 0 if that is outside the machine, None if there is no such process."""
        stat = self.stat(pid)
        return int(stat[1]) if stat else None

    def start_ticks(self, pid: int) -> int | None:
        """Its start time in ticks since boot: with the pid, its identity."""
        stat = self.stat(pid)
        return int(stat[19]) if stat else None

    def alive(self, pid: int) -> bool:
        """Whether the process is there and no zombie."""
        return self.state(pid) not in {None, "Z", "X"}

    def title(self, pid: int) -> str:
        """Its command line with spaces between words; "" for a zombie or no process."""
        with contextlib.suppress(OSError):
            return self.path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return ""

    def with_title(self, part: str) -> set[int]:
        """The pids whose command line contains `part`."""
        return {pid for pid in self.pids() if part in self.title(pid)}

    def pid_of(self, inner_pid: int, container: int) -> int:
        """The machine's pid of `inner_pid` in the PID namespace of the process `container`. Raises ProcessLookupError."""
        namespace = os.readlink(self.path(f"/proc/{container}/ns/pid"))
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if os.readlink(self.path(f"/proc/{pid}/ns/pid")) == namespace and self._innermost_pid(pid) == inner_pid:
                    return pid
        raise ProcessLookupError(f"pid {inner_pid} is not in the PID namespace of pid {container}")

    def _innermost_pid(self, pid: int) -> int:
        status = self.path(f"/proc/{pid}/status").read_text(errors="replace")
        return int(next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")))

    def kill(self, *pids: int) -> None:
        """SIGKILLs processes and returns when none of them is alive."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self.signal(pid, signal.SIGKILL)
        self.wait_gone(*pids)

    def wait_gone(self, *pids: int, deadline_s: float = 10.0) -> None:
        """Returns when none of the processes is alive. Raises TimeoutError, naming those that are."""
        self.wait_until(lambda: not any(map(self.alive, pids)), f"the end of {pids}", deadline_s=deadline_s)

    def wait_until(self, condition: Callable[[], bool], what: str, *, deadline_s: float = 10.0) -> None:
        """Returns when `condition()` is true; polls, for facts that the kernel tells by no event. Raises TimeoutError."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not reached within {deadline_s:.0f} s; {self.describe()}")
            time.sleep(_POLL_S)

    def describe(self) -> str:
        """Every process in one line of text, for messages."""
        known = ((pid, self.state(pid), self.parent(pid), self.title(pid)) for pid in sorted(self.pids()))
        return "; ".join(f"{pid} {state} of {parent}: {title[-60:]}" for pid, state, parent, title in known)
