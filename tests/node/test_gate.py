"""The gate: it waits until the GPUs are clean, ends nothing, passes nothing unknown, and is over at its deadline.

A driver that never answers is here too, since the deadline is what saves the caller then.
"""

import contextlib
import json
import struct
import time
from collections.abc import Iterator

import pytest

from gpusim import gpusim
from gpusim.gpusim import GIB, MIB
from node.eight_gpus import CANNOT_TELL, CLEAN, NOT_CLEAN, SOON, UUIDS, all_but, holding, results, verdict
from node.machine import Machine
from node.result import Result
from node.running import Running

LONG = ("--timeout", "60s")


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with eight idle GPUs."""
    with Machine(gpus=gpusim.gpus(8)) as one:
        yield one


def served(machine: Machine, index: int) -> int:
    """How many figures a flickering GPU has served."""
    path = machine.driver.directory / "served" / UUIDS[index]
    return struct.unpack("=i", path.read_bytes())[0] if path.exists() else 0


def answer(running: Running) -> Result:
    """The report of a gate that was started."""
    return Result.of(running.completed())


@contextlib.contextmanager
def waiting_gate(machine: Machine, index: int, *flags: str) -> Iterator[Running]:
    """A gate that has read GPU `index` as dirty three times, and waits."""
    machine.driver.update(index, flicker=(GIB,) * 1000)
    with machine.start_cleanslate("gate", *LONG, *flags) as gate:
        machine.wait_until(lambda: served(machine, index) >= 3, "three readings of the gate")
        assert gate.poll() is None
        yield gate


def test_clean_gpus_pass_at_once(machine: Machine) -> None:
    """Every GPU clean, exit code 0."""
    result = machine.cleanslate("gate", *LONG)
    assert verdict(result) == CLEAN
    assert results(result) == ["Clean"] * 8


def test_the_gate_waits_for_a_holder_to_die_and_passes_then(machine: Machine) -> None:
    """It neither ends the holder nor passes before the kernel freed its memory."""
    with holding(machine, "--gpu", f"7={20 * GIB}") as holder, machine.start_cleanslate("gate", *LONG) as gate:
        with pytest.raises(TimeoutError):
            gate.wait(1.0)
        assert machine.alive(holder.pid)
        machine.kill(holder.pid)
        result = answer(gate)
    assert verdict(result) == CLEAN
    assert results(result) == ["Clean"] * 8


def test_a_gate_that_times_out_says_which_gpu_and_who(machine: Machine) -> None:
    """Exit code 3, the holder named in report and termination message, and it lives on. Whose it is, a gate cannot tell."""
    with holding(machine, "--gpu", f"7={20 * GIB}") as holder:
        result = machine.cleanslate("gate", *SOON, "--termination-message", "/run/message")
        assert machine.alive(holder.pid)
    assert verdict(result) == NOT_CLEAN
    assert results(result) == all_but(7, "Held")
    message = json.loads(machine.path("/run/message").read_bytes())
    assert (message["result"], message["exitCode"]) == NOT_CLEAN
    assert str(holder.pid) in message["gpus"][0]["message"]


def test_the_gate_needs_its_reads_in_a_row(machine: Machine) -> None:
    """A dirty read between clean ones starts the count anew."""
    machine.driver.update(0, flicker=(0, 0, GIB, 0, 0, 0))
    result = machine.cleanslate("gate", *LONG, "--stable-reads", "3")
    assert verdict(result) == CLEAN
    assert served(machine, 0) >= 6


def test_one_stable_read_is_enough_where_one_was_asked_for(machine: Machine) -> None:
    """The first clean read passes."""
    machine.driver.update(0, flicker=(0, GIB, GIB))
    assert verdict(machine.cleanslate("gate", *SOON, "--stable-reads", "1")) == CLEAN


def test_gpus_that_never_settle_do_not_pass(machine: Machine) -> None:
    """Every other read is dirty: not clean at the deadline, whatever the last one said."""
    machine.driver.update(0, flicker=(0, GIB) * 500)
    result = machine.cleanslate("gate", *SOON, "--stable-reads", "2")
    assert result.code == NOT_CLEAN[1]
    assert result.report["result"] == NOT_CLEAN[0]


def test_a_reading_cut_short_by_the_deadline_hides_nothing(machine: Machine) -> None:
    """Where a reading takes long, what the last whole one showed is still the answer."""
    machine.driver.update(7, residual_bytes=GIB, slow_ms={"nvmlDeviceGetMemoryInfo_v2": 300})
    result = machine.cleanslate("gate", *SOON)
    assert verdict(result) == NOT_CLEAN
    assert results(result) == all_but(7, "Residual")


def test_idle_noise_passes_and_zero_tolerance_does_not(machine: Machine) -> None:
    """`--max-used-mib` holds for the gate as well."""
    machine.driver.update(0, base_bytes=15 * MIB)
    assert verdict(machine.cleanslate("gate", *SOON)) == CLEAN
    assert verdict(machine.cleanslate("gate", *SOON, "--max-used-mib", "0")) == NOT_CLEAN


def test_a_gpu_that_comes_back_is_seen_by_the_waiting_gate(machine: Machine) -> None:
    """An open NVML session never finds it: the gate opens a new one."""
    machine.driver.update(3, missing=True)
    with waiting_gate(machine, 0) as gate:
        machine.driver.update_all({0: {"flicker": ()}, 3: {"missing": False}})
        result = answer(gate)
    assert verdict(result) == CLEAN
    assert results(result) == ["Clean"] * 8


def test_an_error_that_goes_away_is_waited_for(machine: Machine) -> None:
    """A GPU under recovery passes when it answers again."""
    machine.driver.update(3, errors={"nvmlDeviceGetMemoryInfo_v2": 27})
    with waiting_gate(machine, 0) as gate:
        machine.driver.update_all({0: {"flicker": ()}, 3: {"errors": {}}})
        assert verdict(answer(gate)) == CLEAN


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"errors": {"nvmlDeviceGetMemoryInfo_v2": 15}}, "Error"),
        ({"missing": True}, "Missing"),
        ({"errors": gpusim.NO_MEMORY_INFO}, "NotSupported"),
    ],
    ids=["error", "missing", "not supported"],
)
def test_the_gate_passes_nothing_unknown(machine: Machine, fault: dict[str, object], expected: str) -> None:
    """At the deadline it is exit code 4, and the GPU is named."""
    machine.driver.update(3, **fault)
    result = machine.cleanslate("gate", *SOON)
    assert verdict(result) == CANNOT_TELL
    assert sorted(set(results(result))) == sorted({"Clean", expected})


@pytest.mark.parametrize("gpus", [(), None], ids=["zero GPUs", "no driver"])
def test_the_gate_does_not_pass_without_gpus(gpus: tuple[()] | None) -> None:
    """Nothing measured is no pass."""
    with Machine(gpus=gpus) as machine:
        assert verdict(machine.cleanslate("gate", *SOON)) == CANNOT_TELL


def test_the_gate_waits_for_the_number_of_gpus_that_was_requested(machine: Machine) -> None:
    """Fewer than requested is a missing GPU, although all that are there are clean."""
    assert verdict(machine.cleanslate("gate", *SOON, "--expect-gpus", "8")) == CLEAN
    result = machine.cleanslate("gate", *SOON, "--expect-gpus", "9")
    assert verdict(result) == CANNOT_TELL
    assert "Missing" in results(result)


def test_the_gate_minds_only_the_gpus_named(machine: Machine) -> None:
    """The others may be as dirty as they like."""
    machine.driver.update(7, residual_bytes=GIB)
    assert verdict(machine.cleanslate("gate", *SOON, "--gpu", UUIDS[0], "--gpu", "1")) == CLEAN
    assert verdict(machine.cleanslate("gate", *SOON, "--gpu", "7")) == NOT_CLEAN


SILENT = [
    "nvmlInit_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
]


@pytest.mark.parametrize("verb", ["gate", "reset"])
@pytest.mark.parametrize("function", SILENT)
def test_a_call_that_never_returns_ends_at_the_deadline(machine: Machine, verb: str, function: str) -> None:
    """Exit code 4 within the timeout and a margin, and no child is left."""
    if function in {"nvmlInit_v2", "nvmlDeviceGetCount_v2"}:
        machine.driver.system(hang=(function,))
    else:
        machine.driver.update(7, hang=(function,))
    before = machine.pids()
    began = time.monotonic()
    result = machine.cleanslate(verb, *SOON)
    assert time.monotonic() - began < 10
    assert verdict(result) == CANNOT_TELL
    assert "no answer" in result.report["message"] + " ".join(result.report["warnings"])
    assert machine.pids() == before


@pytest.mark.parametrize("verb", ["gate", "inspect", "reset"])
def test_a_call_that_not_even_sigkill_ends_is_left_to_the_kernel(machine: Machine, verb: str) -> None:
    """The program ends at its deadline all the same; its child holds neither the terminal nor the report."""
    if not machine.freezable():
        pytest.skip("needs the freezer of cgroup version 1, to hold a process beyond SIGKILL")
    with gpusim.frozen_cgroup(machine.path("/sys/fs/cgroup/freezer")) as group:
        machine.driver.system(freezer=f"/sys/fs/cgroup/freezer/{group.name}")
        machine.driver.update(0, unkillable=("nvmlDeviceGetMemoryInfo_v2",))
        before = machine.pids()
        with machine.start_cleanslate(verb, *SOON, "--termination-message", "/run/message") as program:
            result = Result.of(program.completed(timeout=30))  # ends only when nobody holds its outputs
        left = machine.pids() - before
        assert {machine.state(pid) for pid in left} == {"D"}
    assert verdict(result) == CANNOT_TELL
    assert json.loads(machine.path("/run/message").read_bytes())["exitCode"] == CANNOT_TELL[1]
    machine.wait_gone(*left)


def test_a_reader_that_hangs_is_replaced_by_another(machine: Machine) -> None:
    """Within its own deadline the gate gives a silent child up, and passes when the next one is answered."""
    machine.driver.update(0, hang=("nvmlDeviceGetMemoryInfo_v2",))
    with machine.start_cleanslate("gate", *LONG) as gate:
        machine.wait_until(lambda: len(machine.with_title("cleanslate gate")) >= 2, "the gate's child")
        machine.driver.update(0, hang=())
        assert verdict(Result.of(gate.completed(timeout=40))) == CLEAN
