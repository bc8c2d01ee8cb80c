"""Where the demonstration happens: on this machine's GPUs, or in a machine of the tests with simulated ones."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Protocol

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import leak

PYTHONPATH = f"{ROOT / 'initcontainer'}:{ROOT / 'tests'}"
GIB = 1 << 30
IDLE_BYTES = 64 << 20
PRIVATE_SHM = 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "$@"'


class Place(Protocol):
    """What the story needs of a machine."""

    title: str
    arguments: tuple[str, ...]

    def start_server(self) -> dict[str, Any]:
        """Starts a server with two workers; what it says of itself."""

    def kill_front_end(self) -> None:
        """SIGKILLs the server's front end, as the kernel does when memory runs out."""

    def run(self, *argv: str) -> tuple[int, str]:
        """Runs a program; its exit code and what it printed."""


class Simulated:
    """A machine of tests/node with two simulated GPUs."""

    title = "no NVIDIA driver on this machine: the GPUs are SIMULATED (all else is real: processes, memory, signals)"
    arguments = ()

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self._front_end: Any = None

    def start_server(self) -> dict[str, Any]:
        """In the machine; the engine and its workers will go to its PID 1."""
        argv = [sys.executable, leak.SERVER, "2", str(40 * GIB), "2"]
        self._front_end = self._machine.popen(*argv, env={"PYTHONPATH": PYTHONPATH})
        return dict(json.loads(self._front_end.readline()))

    def kill_front_end(self) -> None:
        """By the machine's init, whose child it is."""
        self._front_end.kill()
        self._front_end.wait()

    def run(self, *argv: str) -> tuple[int, str]:
        """In the machine."""
        done = self._machine.run(*argv, env={"PYTHONPATH": PYTHONPATH, "COLUMNS": os.environ.get("COLUMNS", "120")})
        return done.returncode, done.stdout + done.stderr


class Real:
    """This machine, with its idle GPUs and a /dev/shm of our own."""

    def __init__(self, gpus: list[tuple[int, str]], ours: contextlib.ExitStack) -> None:
        self.title = "on the real GPUs " + ", ".join(f"{index} ({name})" for index, name in gpus)
        self.arguments = tuple(word for index, _ in gpus for word in ("--gpu", str(index)))
        self._count = len(gpus)
        self._ours = ours
        self._leak: leak.Leak | None = None

    def start_server(self) -> dict[str, Any]:
        """Two workers with 4 GiB each, on one or two GPUs."""
        self._leak = self._ours.enter_context(leak.Leak(2, 4 * GIB, self._count))
        return self._leak.said

    def kill_front_end(self) -> None:
        """As the kernel would."""
        if self._leak is not None:
            self._leak.kill_front_end()

    def run(self, *argv: str) -> tuple[int, str]:
        """On this machine."""
        environment = os.environ | {"PYTHONPATH": PYTHONPATH}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


def idle_gpus() -> list[tuple[int, str]]:
    """Index and name of the first GPUs from 0 on that nobody uses, two at most: others' work is left alone."""
    query = ["nvidia-smi", "--query-gpu=index,name,memory.used", "--format=csv,noheader,nounits"]
    rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    idle: list[tuple[int, str]] = []
    for index, name, used_mib in (row.split(", ") for row in rows):
        if int(used_mib) << 20 > IDLE_BYTES or len(idle) == 2:
            break
        idle.append((int(index), name))
    return idle


def enter_private_shm() -> None:
    """Starts this program anew with a /dev/shm of its own, so that the demonstration purges nobody else's."""
    if os.environ.get("DEMO_PRIVATE_SHM") != "1":
        os.environ["DEMO_PRIVATE_SHM"] = "1"
        words = ["unshare", "--mount", "sh", "-c", PRIVATE_SHM, "sh", sys.executable, *sys.argv]
        os.execvp(words[0], words)


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """The real GPUs if there is a driver, else simulated ones. Raises RuntimeError where no GPU is idle."""
    if pathlib.Path("/proc/driver/nvidia/version").exists():
        enter_private_shm()
        gpus = idle_gpus()
        if not gpus:
            raise RuntimeError("GPU 0 is in use; the demonstration needs an idle one")
        with contextlib.ExitStack() as ours:  # whatever the reset leaves, the demonstration takes with it
            yield Real(gpus, ours)
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from gpusim import hardware
    from node import machine

    with machine.Machine(gpus=hardware.gpus(2)) as simulated:
        yield Simulated(simulated)
