"""A node of eight simulated GPUs: who holds them, and what a report says of them."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpusim import gpusim
from node.machine import DRIVER_DIRECTORY, Machine
from node.result import Result
from node.running import Running

HOLDER = str(Path(gpusim.__file__).with_name("holder.py"))
CLEAN, NOT_CLEAN, CANNOT_TELL = ("Clean", 0), ("NotClean", 3), ("CannotTell", 4)
SOON = ("--timeout", "1s")
UUIDS = [gpu.uuid for gpu in gpusim.gpus(8)]
MIGS = [f"MIG-{n:08x}-5eed-4c1e-a115-1a7e0000{n:04x}" for n in range(2)]


@contextlib.contextmanager
def holding(machine: Machine, *arguments: str, **how: Any) -> Iterator[Running]:
    """A process that holds GPUs; `arguments` as in tests/gpusim/holder.py."""
    argv = [sys.executable, "-S", HOLDER, "hold", "--dir", DRIVER_DIRECTORY, *arguments]
    with machine.popen(*argv, stdin=True, **how) as running:
        assert running.readline() == "ready"
        yield running


def verdict(result: Result) -> tuple[str, int]:
    """The report's result with the exit code, which it names too."""
    assert result.report["exitCode"] == result.code
    return result.report["result"], result.code


def results(result: Result) -> list[str]:
    """What each GPU is, in the report's order."""
    return [gpu["result"] for gpu in result.report["gpus"]]


def all_but(index: int, result: str) -> list[str]:
    """Eight GPUs, clean but for one."""
    return ["Clean"] * index + [result] + ["Clean"] * (7 - index)
