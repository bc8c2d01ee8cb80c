"""Trees of a server's processes in a machine, as real servers make them: started, told apart, killed. See programs/server.py."""

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from node.machine import DRIVER_DIRECTORY, PROGRAMS, Machine
from node.running import Running

BIN = "/run/bin"  # the front end is known by its command line: python …/vllm serve …
GIB = 1 << 30
LAUNCHERS = ("direct", "bash", "subreaper", "subreaper-session", "nohup")
SHELL = ("bash", "-c", '"$@"; true', "bash")  # a shell that starts a command and waits for it
_COMMANDS = {"vllm": "vllm", "sglang": "sglang", "untitled": "vllm"}


@dataclass(frozen=True, kw_only=True)
class Tree:
    """One server's processes by their pids in the machine, and its names in its /dev/shm.

    `launcher` is what was started: the front end itself, or the program that started it. With one GPU there are no workers.
    """

    machine: Machine
    launcher: Running
    front_end: int
    engine: int
    workers: tuple[int, ...]
    tracker: int
    names: frozenset[str]
    shm: str

    @property
    def orphans(self) -> tuple[int, ...]:
        """What the front end's death leaves behind: workers, then their engine, whose death they would notice."""
        return (*self.workers, self.engine)

    @property
    def pids(self) -> tuple[int, ...]:
        """All of it, the tracker too."""
        return (self.front_end, *self.orphans, self.tracker)

    def kill_front_end(self) -> None:
        """SIGKILLs the front end, as the kernel's OOM killer does, and returns when it is dead."""
        self.machine.kill(self.front_end)

    def stop(self) -> None:
        """Ends it in order: SIGTERM to the front end; returns when all of it is gone."""
        self.machine.signal(self.front_end, signal.SIGTERM)
        self.machine.wait_gone(*self.pids)

    def intact(self) -> bool:
        """Whether every process lives and every name is there."""
        return all(map(self.machine.alive, self.pids)) and self.names == self.names_left()

    def names_left(self) -> frozenset[str]:
        """Those of its names that are still there; none once its mount namespace is gone."""
        try:
            return self.names & self.machine.names(self.shm)
        except FileNotFoundError:
            return frozenset()


@contextmanager
def tree(
    machine: Machine,
    *,
    method: str = "spawn",
    tensor_parallel: int = 2,
    gpus: Sequence[int] | None = None,
    gpu_bytes: int = GIB,
    titles: str = "vllm",
    launcher: str = "direct",
    options: Sequence[str] = (),
    **how: Any,
) -> Iterator[Tree]:
    """A running server; `how` as in `Machine.popen` (cgroup, container, user…).

    `gpus`: the GPU of each worker, by default one each where the machine has a driver. `titles`: "vllm", "sglang", "untitled".
    `launcher`: "direct", "bash" (a shell that waits for it), "subreaper" (a supervisor in the same process group),
    "subreaper-session" (the front end in a session of its own), "nohup" (with setsid, its starter gone).
    """
    command = _front_end(machine, method, tensor_parallel, titles)
    if gpus is None and machine.driver is not None:
        gpus = range(tensor_parallel)
    for gpu in gpus or ():
        command += ["--gpu", str(gpu)]
    command += ["--driver", DRIVER_DIRECTORY, "--gpu-bytes", str(gpu_bytes), *options]
    with machine.popen(*_launched(command, launcher), **how) as running:
        yield _tree(
            machine,
            running,
            json.loads(running.readline()),
            in_container=bool(how.get("container") or how.get("inside")),
        )


@contextmanager
def leak(machine: Machine, **how: Any) -> Iterator[Tree]:
    """A server as in `tree`, whose front end was SIGKILLed: its engine is under another parent."""
    with tree(machine, **how) as leaked:
        leaked.kill_front_end()
        machine.wait_until(lambda: machine.parent(leaked.engine) != leaked.front_end, "another parent of the engine")
        yield leaked


@contextmanager
def role(
    machine: Machine, *options: str, gpus: Sequence[int] = (), under: Sequence[str] = (), **how: Any
) -> Iterator[int]:
    """The pid of one process as in programs/role.py, which holds `gpus`; `under`: a command that starts it."""
    command = [*under, sys.executable, str(PROGRAMS / "role.py"), "--driver", DRIVER_DIRECTORY, *options]
    for gpu in gpus:
        command += ["--gpu", str(gpu)]
    with machine.popen(*command, **how) as running:
        pid = int(running.readline())
        yield machine.pid_of(pid, running.pid) if how.get("container") or how.get("inside") else pid


def _front_end(machine: Machine, method: str, tensor_parallel: int, titles: str) -> list[str]:
    name = _COMMANDS[titles]
    machine.path(BIN).mkdir(exist_ok=True)
    script = machine.path(f"{BIN}/{name}")
    if not script.is_symlink():
        script.symlink_to(PROGRAMS / "server.py")
    workers = tensor_parallel if tensor_parallel > 1 else 0
    words = [sys.executable, f"{BIN}/{name}", "serve", "tiny-model", "--method", method, "--workers", str(workers)]
    return [*words, "--titles", titles]


def _launched(command: list[str], launcher: str) -> list[str]:
    """The whole command line of a launcher."""
    subreaper = [sys.executable, str(PROGRAMS / "subreaper.py")]
    prefixes = {
        "direct": [],
        "bash": SHELL,
        "subreaper": subreaper,
        "subreaper-session": [*subreaper, "--new-session"],
        "nohup": ["bash", "-c", 'nohup setsid "$@" < /dev/null & ', "bash"],
    }
    return [*prefixes[launcher], *command]


def _tree(machine: Machine, running: Running, told: dict[str, Any], *, in_container: bool) -> Tree:
    def outer(pid: int) -> int:
        return machine.pid_of(pid, running.pid) if in_container else pid

    return Tree(
        machine=machine,
        launcher=running,
        front_end=outer(told["front_end"]),
        engine=outer(told["engine"]),
        workers=tuple(map(outer, told["workers"])),
        tracker=outer(told["tracker"]),
        names=frozenset(told["names"]),
        shm=f"/proc/{running.pid}/root/dev/shm" if in_container else "/dev/shm",
    )
