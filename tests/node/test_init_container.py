"""A reset as an init container: its summary says everything, its exit code only that the summary is there."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from gpusim import gpusim
from gpusim.gpusim import GIB
from node import servers
from node.machine import Machine, program

MESSAGE = "/run/message"
SOON = ("--timeout", "5s", "--shm-min-age", "0s")
AS_INIT = ("--termination-message", MESSAGE, "--exit-zero", "--host-name", "gpu-17.example.com")


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with two idle GPUs."""
    with Machine(gpus=gpusim.gpus(2)) as one:
        yield one


def summary(machine: Machine) -> dict[str, Any]:
    """What was written for whoever started the container."""
    return dict(json.loads(machine.path(MESSAGE).read_bytes()))


def test_a_node_that_is_not_clean_is_told_once(machine: Machine) -> None:
    """Exit 0, or the kubelet would reset the node again and again; the summary has the result and its exit code."""
    machine.driver.update(1, residual_bytes=GIB)
    assert machine.cleanslate("reset", *SOON, *AS_INIT).code == 0
    told = summary(machine)
    assert (told["result"], told["exitCode"]) == ("NotClean", 3)
    assert (told["host"], told["scope"], told["dryRun"]) == ("gpu-17.example.com", "orphans", False)


def test_a_refused_plan_is_told_once(machine: Machine) -> None:
    """As every result."""
    done = machine.cleanslate("reset", *SOON, *AS_INIT, "--plan", "/nowhere")
    assert done.code == 0
    assert (summary(machine)["result"], summary(machine)["exitCode"]) == ("Refused", 5)
    assert "nothing was touched" in summary(machine)["message"]


def test_a_reset_says_how_much_memory_it_freed(machine: Machine) -> None:
    """A dry run frees none and says so."""
    worker = ("--title", "VLLM::Worker_TP0", "--gpu-bytes", str(20 * GIB))
    with servers.role(machine, *worker, gpus=[0], under=servers.SHELL) as orphan:
        dry = machine.cleanslate("reset", "--dry-run", *SOON, *AS_INIT)
        assert dry.code == 0
        assert (summary(machine)["dryRun"], summary(machine)["gpuBytesFreed"]) == (True, 0)
        assert machine.alive(orphan)
        assert machine.cleanslate("reset", *SOON, *AS_INIT).code == 0
        assert not machine.alive(orphan)
    assert summary(machine)["result"] == "Clean"
    assert summary(machine)["gpuBytesFreed"] == 20 * GIB


def test_a_log_that_nobody_can_read_does_not_matter(machine: Machine) -> None:
    """The summary is there; one line says what is not."""
    done = machine.run("sh", "-c", '"$@" > /dev/full', "sh", *program("reset", *SOON, *AS_INIT))
    assert done.returncode == 0
    assert "cannot write the report" in done.stderr
    assert summary(machine)["result"] == "Clean"


def test_a_summary_that_cannot_be_written_is_no_success(machine: Machine) -> None:
    """Nobody would know the result."""
    lost = ("--termination-message", "/nowhere/message", "--exit-zero")
    assert machine.cleanslate("reset", *SOON, *lost).code == 4


def test_without_a_summary_there_is_no_exit_zero(machine: Machine) -> None:
    """Exit 2, and what to add."""
    done = machine.cleanslate("reset", "--exit-zero")
    assert done.code == 2
    assert "--exit-zero: cannot use: nobody would know the result; give --termination-message too" in done.stderr


def test_a_stopped_reset_has_no_result(machine: Machine) -> None:
    """SIGTERM leaves with 143 and no summary: the reset is run again, or its pod is going."""
    machine.driver.update(0, residual_bytes=GIB)
    with machine.start_cleanslate("reset", "--timeout", "60s", *AS_INIT) as running:
        machine.wait_until(lambda: len(machine.with_title("cleanslate reset")) >= 2, "the reset's child")
        running.kill(signal.SIGTERM)
        assert running.wait(timeout=20) == 143
    assert not machine.path(MESSAGE).exists() or not machine.path(MESSAGE).read_bytes()
