"""Verification: every state of a GPU is its own result and exit code, and only a measured, unused GPU is clean.

The GPUs are simulated (tests/gpusim), the library, the processes and the device nodes are real.
"""

import json
from collections.abc import Iterator

import pytest

from gpusim import gpusim
from gpusim.gpusim import GIB, MIB, Driver, Gpu, Mig
from node.eight_gpus import (
    CANNOT_TELL,
    CLEAN,
    MIGS,
    NOT_CLEAN,
    SOON,
    UUIDS,
    all_but,
    holding,
    results,
    verdict,
)
from node.machine import DRIVER_DIRECTORY, Machine

VERBS = ("inspect", "reset")


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with eight idle GPUs."""
    with Machine(gpus=gpusim.gpus(8)) as one:
        yield one


@pytest.mark.parametrize("verb", VERBS)
def test_idle_gpus_are_clean_although_the_driver_reserves_memory(machine: Machine, verb: str) -> None:
    """Reserved memory does not count as used."""
    result = machine.cleanslate(verb)
    assert verdict(result) == CLEAN
    assert [gpu["uuid"] for gpu in result.report["gpus"]] == UUIDS
    assert [gpu["index"] for gpu in result.report["gpus"]] == list(range(8))
    assert {(gpu["usedBytes"], gpu["reservedBytes"], gpu["totalBytes"]) for gpu in result.report["gpus"]} == {
        (0, 615 * MIB, 141 * GIB)
    }
    assert results(result) == ["Clean"] * 8


def test_the_programs_own_reader_is_no_holder(machine: Machine) -> None:
    """Its NVML child has the device nodes open while it reads, and is not reported."""
    assert machine.cleanslate("inspect").report["processes"] == []


@pytest.mark.parametrize("verb", VERBS)
def test_memory_on_the_last_gpu_of_eight_is_seen(machine: Machine, verb: str) -> None:
    """Every GPU is measured, not the first two."""
    machine.driver.update(7, residual_bytes=20 * GIB)
    result = machine.cleanslate(verb, *SOON)
    assert verdict(result) == NOT_CLEAN
    assert results(result) == all_but(7, "Residual")
    assert result.report["gpus"][7]["usedBytes"] == 20 * GIB


def test_memory_with_no_process_is_residual_and_says_what_to_do(machine: Machine) -> None:
    """A driver leak is told from success, and from a process."""
    machine.driver.update(2, residual_bytes=1204 * MIB)
    gpu = machine.cleanslate("reset", *SOON).report["gpus"][2]
    assert (gpu["result"], gpu["holders"]) == ("Residual", [])
    assert UUIDS[2] in gpu["message"]
    assert "1204 MiB" in gpu["message"]
    assert "reboot" in gpu["message"]


@pytest.mark.parametrize(
    ("used", "flags", "expected"),
    [
        (64 * MIB, (), "Clean"),
        (64 * MIB + 1, (), "Residual"),
        (15 * MIB, ("--max-used-mib", "0"), "Residual"),
        (0, ("--max-used-mib", "0"), "Clean"),
        (300 * MIB, ("--max-used-mib", "300"), "Clean"),
    ],
    ids=["at the tolerance", "one byte more", "strict and idle noise", "strict and empty", "a larger tolerance"],
)
def test_the_tolerance_is_what_was_asked_for(
    machine: Machine, used: int, flags: tuple[str, ...], expected: str
) -> None:
    """64 MiB by default, 0 on request, and no byte more."""
    machine.driver.update(0, base_bytes=used)
    result = machine.cleanslate("inspect", *flags)
    assert results(result) == all_but(0, expected)
    assert result.code == (0 if expected == "Clean" else 3)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("function", "code"),
    [("nvmlDeviceGetMemoryInfo_v2", 15), ("nvmlDeviceGetHandleByIndex_v2", 15), ("nvmlDeviceGetMemoryInfo_v2", 999)],
    ids=["lost while it is read", "lost before that", "unknown error"],
)
def test_a_gpu_that_errors_is_an_error_and_the_others_are_judged(
    machine: Machine, verb: str, function: str, code: int
) -> None:
    """One sick GPU hides neither itself nor the rest."""
    machine.driver.update(5, errors={function: code}, recovery_action=2)
    result = machine.cleanslate(verb, *SOON)
    assert verdict(result) == CANNOT_TELL
    assert results(result) == all_but(5, "Error")
    message = result.report["gpus"][5]["message"]
    assert f"({code})" in message
    assert function in message


def test_the_drivers_advice_is_passed_on(machine: Machine) -> None:
    """The recovery action that the driver names is the next step."""
    machine.driver.update(5, errors={"nvmlDeviceGetMemoryInfo_v2": 15}, recovery_action=2)
    assert "reboot" in machine.cleanslate("inspect").report["gpus"][5]["message"]


def test_an_error_beside_a_leak_is_not_clean(machine: Machine) -> None:
    """What is known to be dirty weighs more than what is unknown."""
    machine.driver.update(0, residual_bytes=GIB)
    machine.driver.update(1, errors={"nvmlDeviceGetMemoryInfo_v2": 15})
    result = machine.cleanslate("reset", *SOON)
    assert verdict(result) == NOT_CLEAN
    assert results(result) == ["Residual", "Error", *["Clean"] * 6]


@pytest.mark.parametrize("verb", VERBS)
def test_a_gpu_that_the_host_has_and_nvml_does_not_show_is_missing(machine: Machine, verb: str) -> None:
    """The driver's own list in /proc is the expectation, no flag is needed."""
    machine.driver.update(3, missing=True)
    result = machine.cleanslate(verb, *SOON)
    assert verdict(result) == CANNOT_TELL
    assert sorted(results(result)) == ["Clean"] * 7 + ["Missing"]


@pytest.mark.parametrize(("expected", "outcome", "missing"), [("8", CLEAN, 0), ("9", CANNOT_TELL, 1)])
def test_the_number_of_gpus_must_be_the_one_expected(
    machine: Machine, expected: str, outcome: tuple[str, int], missing: int
) -> None:
    """`--expect-gpus` counts what NVML shows."""
    result = machine.cleanslate("inspect", "--expect-gpus", expected)
    assert verdict(result) == outcome
    assert results(result).count("Missing") == missing


@pytest.mark.parametrize("verb", VERBS)
def test_zero_gpus_are_not_clean(verb: str) -> None:
    """Nothing measured proves nothing."""
    with Machine(gpus=()) as machine:
        result = machine.cleanslate(verb, *SOON)
    assert verdict(result) == CANNOT_TELL
    assert result.report["gpus"] == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_machine_without_a_driver_cannot_be_told(verb: str) -> None:
    """No library is no pass, and the report says what is not there."""
    with Machine() as machine:
        result = machine.cleanslate(verb, *SOON)
    assert verdict(result) == CANNOT_TELL
    assert "libnvidia-ml.so.1" in result.report["message"] + " ".join(result.report["warnings"])


@pytest.mark.parametrize(
    ("code", "words"), [(9, "kernel module"), (18, "reboot")], ids=["not loaded", "another version than the library"]
)
def test_a_driver_that_does_not_start_cannot_be_told(machine: Machine, code: int, words: str) -> None:
    """The library is there, the kernel's part is not: the number and the next step are named."""
    machine.driver.system(errors={"nvmlInit_v2": code})
    result = machine.cleanslate("inspect")
    assert verdict(result) == CANNOT_TELL
    said = result.report["message"] + " ".join(result.report["warnings"])
    assert f"({code})" in said
    assert words in said


@pytest.mark.parametrize("verb", VERBS)
def test_a_library_too_old_for_version_two_cannot_be_told(machine: Machine, verb: str) -> None:
    """Version 1 would count reserved memory as used: it is not taken instead."""
    Driver.install(machine.path(DRIVER_DIRECTORY), machine.path("/dev"), gpusim.gpus(8), memory_v2=False)
    result = machine.cleanslate(verb, *SOON)
    assert verdict(result) == CANNOT_TELL
    assert results(result) == ["Error"] * 8
    assert "510" in result.report["gpus"][0]["message"]


def test_the_library_named_by_flag_is_the_one_that_answers(machine: Machine) -> None:
    """`--nvml-library` names a file; one that is none cannot be told, and is named."""
    other = Driver.install(machine.path("/run/other"), machine.path("/dev"), gpusim.gpus(1))
    result = machine.cleanslate("inspect", "--nvml-library", f"/run/other/{other.library.name}", "--expect-gpus", "1")
    assert (verdict(result), len(result.report["gpus"])) == (CLEAN, 1)
    absent = machine.cleanslate("inspect", "--nvml-library", "/run/absent.so")
    assert absent.code in {2, 4}
    assert "/run/absent.so" in absent.stdout + absent.stderr


def test_mig_instances_are_judged_one_by_one() -> None:
    """Idle instances are never empty; one with a leak is Residual beside its clean sister."""
    whole, plain = gpusim.gpus(2)
    parts = (Mig(uuid=MIGS[0], base_bytes=107 * MIB), Mig(uuid=MIGS[1], residual_bytes=GIB))
    with Machine(gpus=(Gpu(uuid=whole.uuid, minor=0, mig=parts), plain)) as machine:
        result = machine.cleanslate("reset", *SOON)
        assert verdict(result) == NOT_CLEAN
        found = {gpu["uuid"]: gpu["result"] for gpu in result.report["gpus"]}
        assert found == {MIGS[0]: "Clean", MIGS[1]: "Residual", plain.uuid: "Clean"}
        assert verdict(machine.cleanslate("inspect", "--gpu", MIGS[0])) == CLEAN
        assert verdict(machine.cleanslate("inspect", "--gpu", MIGS[1])) == NOT_CLEAN


def test_a_holder_of_one_mig_instance_is_named_there_alone() -> None:
    """Processes are attributed to instances, not to their GPU."""
    gpu = Gpu(uuid=UUIDS[0], minor=0, mig=tuple(Mig(uuid=uuid) for uuid in MIGS))
    with Machine(gpus=(gpu,)) as machine, holding(machine, "--gpu", f"{MIGS[1]}={GIB}") as holder:
        gpus = machine.cleanslate("inspect").report["gpus"]
    assert [[one["pid"] for one in gpu["holders"]] for gpu in gpus] == [[], [holder.pid]]


@pytest.mark.parametrize("verb", VERBS)
def test_memory_that_cannot_be_read_is_judged_by_processes_and_never_clean(machine: Machine, verb: str) -> None:
    """As on unified memory: its own result, and the processes are named."""
    machine.driver.update_all({0: {"errors": gpusim.NO_MEMORY_INFO}, 1: {"errors": gpusim.NO_MEMORY_INFO}})
    with holding(machine, "--gpu", "1=4096") as holder:
        result = machine.cleanslate(verb, *SOON)
    assert results(result) == ["NotSupported", "Busy", *["Clean"] * 6]
    assert verdict(result) == CANNOT_TELL
    assert result.report["gpus"][0]["usedBytes"] is None
    assert [one["pid"] for one in result.report["gpus"][1]["holders"]] == [holder.pid]


def test_a_gpu_in_use_by_a_kept_owner_is_busy_and_the_reset_clean_for_the_rest(machine: Machine) -> None:
    """A neighbour's GPU is no failure of the reset, and the neighbour is named and lives on."""
    with holding(machine, "--gpu", f"4={20 * GIB}") as holder:
        result = machine.cleanslate("reset")
        assert verdict(result) == CLEAN
        assert results(result) == all_but(4, "Busy")
        assert [one["pid"] for one in result.report["gpus"][4]["holders"]] == [holder.pid]
        assert str(holder.pid) in result.report["gpus"][4]["message"]
        assert result.outcomes(holder.pid) == ["Kept"]
        assert machine.alive(holder.pid)


def test_a_monitor_makes_no_gpu_busy(machine: Machine) -> None:
    """It holds nodes and no memory: reported, kept, and the GPUs are clean."""
    with holding(machine, "--only-control") as monitor:
        result = machine.cleanslate("reset", "--scope", "all")
        assert verdict(result) == CLEAN
        assert results(result) == ["Clean"] * 8
        assert result.verdicts(monitor.pid) == ["Keep"]
        assert machine.alive(monitor.pid)


def test_a_holder_with_memory_within_the_tolerance_is_still_a_holder(machine: Machine) -> None:
    """Clean means no holder but monitors, however little it uses."""
    with holding(machine, "--gpu", "0=4096") as holder:
        gpu = machine.cleanslate("inspect").report["gpus"][0]
    assert (gpu["result"], [one["pid"] for one in gpu["holders"]]) == ("Busy", [holder.pid])


def test_a_client_of_mps_is_a_holder_without_a_figure(machine: Machine) -> None:
    """NVML lists it and cannot say how much of the memory is its: the GPU's own figure counts."""
    with holding(machine, "--gpu", f"0={GIB}", "--kind", "M", "--unattributed") as client:
        gpu = machine.cleanslate("inspect").report["gpus"][0]
    assert (gpu["result"], gpu["usedBytes"]) == ("Busy", GIB)
    assert [one["pid"] for one in gpu["holders"]] == [client.pid]


def test_a_pid_that_only_nvml_knows_is_no_clean_gpu(machine: Machine) -> None:
    """The driver lists a process that /proc does not have: it is named, and the GPU is not passed as clean."""
    machine.driver.update(6, ghosts=(4_000_000,), residual_bytes=GIB)
    result = machine.cleanslate("reset", *SOON)
    assert verdict(result) == NOT_CLEAN
    assert results(result)[:6] == ["Clean"] * 6
    assert "4000000" in result.report["gpus"][6]["message"]


@pytest.mark.parametrize("named", ["2", UUIDS[2]], ids=["index", "uuid"])
def test_only_the_gpus_named_are_judged(machine: Machine, named: str) -> None:
    """`--gpu` takes an index or a UUID; what the others are is not asked."""
    machine.driver.update(7, residual_bytes=GIB)
    machine.driver.update(6, errors={"nvmlDeviceGetMemoryInfo_v2": 15})
    result = machine.cleanslate("reset", "--gpu", named)
    assert verdict(result) == CLEAN
    assert [gpu["uuid"] for gpu in result.report["gpus"]] == [UUIDS[2]]
    assert verdict(machine.cleanslate("reset", "--gpu", named, "--gpu", "7", *SOON)) == NOT_CLEAN


@pytest.mark.parametrize("named", ["8", "GPU-ffffffff-5eed-4c1e-a115-1a7e0000ffff"], ids=["index", "uuid"])
def test_a_gpu_that_was_named_and_is_not_there_is_missing(machine: Machine, named: str) -> None:
    """Asking for what does not exist is no pass."""
    result = machine.cleanslate("inspect", "--gpu", named)
    assert verdict(result) == CANNOT_TELL
    assert results(result) == ["Missing"]


def test_the_termination_message_names_the_dirty_gpus_first(machine: Machine) -> None:
    """At most 4,096 bytes of valid JSON, which agree with the report and the exit code."""
    machine.driver.update(7, residual_bytes=GIB)
    result = machine.cleanslate("reset", *SOON, "--termination-message", "/run/message")
    written = machine.path("/run/message").read_bytes()
    message = json.loads(written)
    assert len(written) <= 4096
    assert (message["result"], message["exitCode"]) == verdict(result) == NOT_CLEAN
    assert (message["gpus"][0]["index"], message["gpus"][0]["result"]) == (7, "Residual")
