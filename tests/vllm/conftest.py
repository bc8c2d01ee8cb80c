"""Fixtures of the tests on a real vLLM: the environment that it is installed in, and a machine that sees it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusim import gpusim
from node.machine import Machine
from vllm.servers import ServerMachine

NO_ROOM = 77


@pytest.fixture(scope="session", autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: it makes namespaces, mounts and cgroups of its own")


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The environment with vLLM's CPU build, installed if it is not there yet."""
    script = Path(__file__).resolve().parent / "install.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    if done.returncode == NO_ROOM:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def machine(vllm: Path) -> Iterator[ServerMachine]:
    """One machine for all tests of a module, since a server takes half a minute to start, with free GPUs."""
    with ServerMachine(vllm, gpus=gpusim.gpus(2)) as one:
        yield one


@pytest.fixture
def machine_alone() -> Iterator[Machine]:
    """A machine for one test, without vLLM."""
    with Machine() as one:
        yield one
