"""The simulator's programs as a test starts them: one that asks NVML, and processes that hold GPUs."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpusim.gpusim import TTY_MAJOR, Driver

SIMULATOR = Path(__file__).resolve().parent


def asking(driver: Driver) -> "subprocess.Popen[str]":
    """A program that asks NVML everything."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver.directory)}
    argv = [sys.executable, str(SIMULATOR / "ask.py")]
    return subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def ask(driver: Driver) -> dict[str, Any]:
    """Everything that NVML says, through the real pynvml in a process of its own."""
    with asking(driver) as program:
        output, _ = program.communicate(timeout=30)
    assert program.returncode == 0
    answer: dict[str, Any] = json.loads(output)
    return answer


@contextlib.contextmanager
def holder(driver: Driver, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds GPUs until the block ends."""
    argv = [sys.executable, "-S", str(SIMULATOR / "holder.py"), "hold", "--dir", str(driver.directory)]
    argv += ["--dev", str(driver.dev), *arguments]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def held_nodes(pid: int) -> set[int]:
    """Device numbers of the character devices that a process has open."""
    descriptors = Path(f"/proc/{pid}/fd")
    opened = [os.stat(descriptors / name) for name in os.listdir(descriptors)]
    return {status.st_rdev for status in opened if os.major(status.st_rdev) == TTY_MAJOR}


def node_numbers(driver: Driver, *names: str) -> set[int]:
    """Device numbers of nodes by name."""
    return {os.stat(driver.dev / name).st_rdev for name in names}


def wait_for_state(process: "subprocess.Popen[str]", letter: str) -> None:
    """Until a process is in this state of /proc/PID/stat; fails after ten seconds."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != letter:
        assert time.monotonic() < deadline, f"never in state {letter}"
        time.sleep(0.01)
