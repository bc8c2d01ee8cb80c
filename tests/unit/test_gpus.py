"""Each result of a GPU, and what all of them together mean for the exit code."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleanslate import gpus
from cleanslate.gpus import EXIT_CODES, GpuResult, GpuVerdict, Holder, Result, judge_gpu, judge_reading, overall
from cleanslate.nvml import FUNCTION_NOT_FOUND, NOT_SUPPORTED, GpuError, GpuReading, Reading
from unit.examples import GIB, GPU_0, GPU_1, MIB, MIG_0, gpu, holder, kept

LOST = GpuError(code=15, function="nvmlDeviceGetMemoryInfo_v2", text="GPU is lost")
TOO_OLD = GpuError(code=FUNCTION_NOT_FOUND, function="nvmlDeviceGetMemoryInfo_v2", text="Function Not Found")
NO_MEMORY_INFO = GpuError(code=NOT_SUPPORTED, function="nvmlDeviceGetMemoryInfo_v2", text="Not Supported")
UNREAD = {"used_bytes": None, "reserved_bytes": None, "total_bytes": None}
WORKER, LIVE = holder(), kept()
SERVICE = holder(harmless=True)
STUCK = holder(verdict="End", stuck=True)

RESULTS: dict[str, tuple[GpuReading, tuple[Holder, ...], GpuResult, str]] = {
    "idle": (gpu(), (), GpuResult.CLEAN, "clean, 0 MiB"),
    "idle noise": (gpu(used_bytes=15 * MIB), (), GpuResult.CLEAN, "clean, 15 MiB"),
    "at the tolerance": (gpu(used_bytes=64 * MIB), (), GpuResult.CLEAN, "clean, 64 MiB"),
    "a byte above the tolerance": (gpu(used_bytes=64 * MIB + 1), (), GpuResult.RESIDUAL, "no process holds it"),
    "memory without a process": (gpu(used_bytes=20 * GIB), (), GpuResult.RESIDUAL, "20480 MiB used and no process"),
    "what the driver reserves": (gpu(reserved_bytes=100 * GIB), (), GpuResult.CLEAN, "clean, 0 MiB"),
    "an unknown holder": (gpu(used_bytes=GIB), (WORKER,), GpuResult.HELD, "held by pid 100 (VLLM::Worker_TP0"),
    "a holder that has no memory yet": (gpu(), (WORKER,), GpuResult.HELD, "0 MiB used, held by pid 100"),
    "a kept owner": (gpu(used_bytes=GIB), (LIVE,), GpuResult.BUSY, "which is kept: belongs to a live pod"),
    "a kept owner without memory": (gpu(), (LIVE,), GpuResult.BUSY, "in use by pid 100"),
    "a kept owner and a leftover": (gpu(used_bytes=GIB), (LIVE, holder(101)), GpuResult.HELD, "held by pid 101"),
    "what SIGKILL does not end": (gpu(used_bytes=GIB), (LIVE, STUCK), GpuResult.UNKILLABLE, "reboot the node"),
    "a service on an idle GPU": (gpu(used_bytes=MIB), (SERVICE,), GpuResult.CLEAN, "clean, 1 MiB"),
    "a service on a full GPU": (gpu(used_bytes=GIB), (SERVICE,), GpuResult.HELD, "held by pid 100"),
    "a lost GPU": (gpu(error=LOST, **UNREAD), (), GpuResult.ERROR, "GPU is lost (15); look for Xid in dmesg"),
    "a lost GPU with advice": (
        gpu(error=LOST, recovery_action="reboot", **UNREAD),
        (),
        GpuResult.ERROR,
        "the driver advises: reboot",
    ),
    "a lost GPU that is held": (gpu(error=LOST, **UNREAD), (WORKER,), GpuResult.ERROR, "GPU is lost"),
    "a driver too old": (gpu(error=TOO_OLD, **UNREAD), (), GpuResult.ERROR, "510 is needed"),
    "no memory reading": (gpu(error=NO_MEMORY_INFO, **UNREAD), (), GpuResult.NOT_SUPPORTED, "judged by processes"),
    "no memory reading, held": (
        gpu(error=NO_MEMORY_INFO, **UNREAD),
        (WORKER,),
        GpuResult.HELD,
        "memory unknown, held by",
    ),
    "no memory reading, in use": (
        gpu(error=NO_MEMORY_INFO, **UNREAD),
        (LIVE,),
        GpuResult.BUSY,
        "memory unknown, in use",
    ),
    "no memory reading, a service": (
        gpu(error=NO_MEMORY_INFO, **UNREAD),
        (SERVICE,),
        GpuResult.NOT_SUPPORTED,
        "none holds it",
    ),
    "processes that NVML does not list": (gpu(processes=None), (), GpuResult.ERROR, "does not list its processes"),
}


def judged(reading: Reading, *, holders: dict[str, list[Holder]] | None = None, **known: Any) -> list[GpuVerdict]:
    """The verdicts on a reading, with the ordinary settings unless told otherwise."""
    settings: dict[str, Any] = {"scope": None, "expected": None, "asked_bytes": None}
    return list(judge_reading(reading, holders or {}, **settings | known))


def results(reading: Reading, **known: Any) -> list[tuple[int, str]]:
    """Index and result of each GPU."""
    return [(one.reading.index, str(one.result)) for one in judged(reading, **known)]


@pytest.mark.parametrize("row", RESULTS.values(), ids=RESULTS.keys())
def test_a_gpu_is_what_its_memory_and_holders_say(row: tuple[Any, ...]) -> None:
    """Each result, with the sentence that names the GPU and the numbers."""
    reading, holders, expected, said = row
    found = judge_gpu(reading, holders, asked_bytes=None)
    assert found.result is expected
    assert said in found.message
    assert found.message.startswith(f"{GPU_0} (index 0): ")
    assert "\n" not in found.message


@pytest.mark.parametrize(
    ("reading", "asked_bytes", "tolerance"),
    [
        (gpu(), None, 64 * MIB),
        (gpu(mig=True), None, 288 * MIB),
        (gpu(mig=True, uuid=MIG_0, parent=GPU_0), None, 128 * MIB),
        (gpu(), 0, 0),
        (gpu(mig=True), 0, 0),
        (gpu(), 1000 * MIB, 1000 * MIB),
    ],
    ids=["a GPU", "in MIG mode", "an instance", "strict", "strict in MIG mode", "lenient"],
)
def test_the_tolerance_fits_the_kind_of_gpu(reading: GpuReading, asked_bytes: int | None, tolerance: int) -> None:
    """What idle ones of that kind read at most, unless something else is asked for: zero too."""
    at, above = reading._replace(used_bytes=tolerance), reading._replace(used_bytes=tolerance + 1)
    assert gpus.tolerance_bytes(reading, asked_bytes) == tolerance
    assert judge_gpu(at, (), asked_bytes=asked_bytes).result is GpuResult.CLEAN
    assert judge_gpu(above, (), asked_bytes=asked_bytes).result is GpuResult.RESIDUAL


def test_many_holders_are_named_shortly() -> None:
    """Three by name, the rest by number."""
    message = judge_gpu(gpu(used_bytes=GIB), [holder(pid) for pid in range(1, 9)], asked_bytes=None).message
    assert "pid 3 (" in message
    assert message.endswith("… and 5 more")


def test_memory_on_the_last_gpu_alone_is_seen() -> None:
    """The shell line looked at two GPUs of eight."""
    reading = Reading(gpus=(*(gpu(index) for index in range(7)), gpu(7, used_bytes=GIB)))
    assert results(reading, expected=8) == [*((index, "Clean") for index in range(7)), (7, "Residual")]


def test_missing_gpus_are_results_by_count() -> None:
    """A GPU that fell off the bus is not a clean one."""
    found = judged(Reading(gpus=(gpu(0), gpu(1))), expected=4)
    assert [(one.reading.index, str(one.result)) for one in found] == [
        (0, "Clean"),
        (1, "Clean"),
        (2, "Missing"),
        (3, "Missing"),
    ]
    assert found[2].message == "NVML shows 2 GPUs, 4 were expected; look for Xid 79 in dmesg"


def test_mig_instances_count_as_one_gpu() -> None:
    """Two instances of one GPU do not make up for a missing one."""
    instances = tuple(gpu(0, uuid=f"MIG-{number}", parent=GPU_0, mig=True) for number in range(2))
    assert results(Reading(gpus=instances), expected=2) == [(0, "Clean"), (0, "Clean"), (1, "Missing")]
    assert results(Reading(gpus=(*instances, gpu(1))), expected=2)[-1] == (1, "Clean")


def test_more_gpus_than_expected_are_all_judged() -> None:
    """Every GPU that is there counts."""
    assert results(Reading(gpus=(gpu(0), gpu(1, used_bytes=GIB))), expected=1) == [(0, "Clean"), (1, "Residual")]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (None, [(0, "Clean"), (1, "Residual"), (2, "Clean")]),
        ({"0"}, [(0, "Clean")]),
        ({GPU_1}, [(1, "Residual")]),
        ({"0", GPU_1}, [(0, "Clean"), (1, "Residual")]),
        ({"2"}, [(2, "Clean")]),
        ({MIG_0}, [(2, "Clean")]),
        ({"GPU-parent"}, [(2, "Clean")]),
        ({"0", "7"}, [(0, "Clean"), (7, "Missing")]),
        ({"GPU-gone"}, [(-1, "Missing")]),
    ],
    ids=[
        "all",
        "index",
        "UUID",
        "both",
        "index of a MIG GPU",
        "instance",
        "its parent",
        "no such index",
        "no such UUID",
    ],
)
def test_a_scope_names_gpus_by_index_uuid_or_instance(scope: set[str] | None, expected: list[tuple[int, str]]) -> None:
    """What is named and not there is missing; what is not named does not count, nor does the expected number then."""
    instance = gpu(2, uuid=MIG_0, parent="GPU-parent", mig=True)
    reading = Reading(gpus=(gpu(0), gpu(1, used_bytes=GIB), instance))
    named = None if scope is None else frozenset(scope)
    assert results(reading, scope=named, expected=None if scope is None else 8) == expected


def test_a_missing_gpu_is_named_as_it_was_asked_for() -> None:
    """The UUID is in the report, so that it can be looked for."""
    (found,) = judged(Reading(gpus=(gpu(),)), scope=frozenset({GPU_1}))
    assert (found.reading.uuid, found.result) == (GPU_1, GpuResult.MISSING)
    assert GPU_1 in found.message


def test_holders_belong_to_the_gpu_that_they_hold() -> None:
    """By UUID, nobody else's."""
    reading = Reading(gpus=(gpu(0, used_bytes=GIB), gpu(1, used_bytes=GIB)))
    assert results(reading, holders={GPU_1: [WORKER]}) == [(0, "Residual"), (1, "Held")]


@pytest.mark.parametrize("failure", ["NVML: no answer", None])
def test_no_gpu_at_all_is_never_a_pass(failure: str | None) -> None:
    """Zero GPUs and no reading are no verdicts, and no verdicts are no pass."""
    found = judged(Reading(failure=failure), expected=None)
    assert found == []
    assert overall(found, failure=failure, busy_is_clean=True) is Result.CANNOT_TELL
    assert results(Reading(failure=None), expected=1) == [(0, "Missing")]


def verdicts_of(*of: GpuResult) -> list[GpuVerdict]:
    """One GPU with each of these results."""
    return [GpuVerdict(reading=gpu(at), tolerance_bytes=0, result=one, message="m") for at, one in enumerate(of)]


@pytest.mark.parametrize(
    ("result", "reset", "gate"),
    [
        (GpuResult.CLEAN, 0, 0),
        (GpuResult.BUSY, 0, 3),
        (GpuResult.RESIDUAL, 3, 3),
        (GpuResult.HELD, 3, 3),
        (GpuResult.UNKILLABLE, 3, 3),
        (GpuResult.ERROR, 4, 4),
        (GpuResult.NOT_SUPPORTED, 4, 4),
        (GpuResult.MISSING, 4, 4),
    ],
)
def test_each_result_has_its_exit_code(result: GpuResult, reset: int, gate: int) -> None:
    """A GPU that a kept owner uses passes a reset, which may not touch it, and not a gate, which needs it."""
    for others in ((), (GpuResult.CLEAN,) * 7):
        found = verdicts_of(*others, result)
        assert EXIT_CODES[overall(found, failure=None, busy_is_clean=True)] == reset
        assert EXIT_CODES[overall(found, failure=None, busy_is_clean=False)] == gate


@given(st.lists(st.sampled_from(list(GpuResult)), max_size=8), st.none() | st.just("NVML: silent"), st.booleans())
def test_dirty_weighs_more_than_unknown_and_nothing_is_unknown(
    of: list[GpuResult], failure: str | None, busy_is_clean: bool
) -> None:
    """Clean is only what was measured and found clean, every GPU of it."""
    found = overall(verdicts_of(*of), failure=failure, busy_is_clean=busy_is_clean)
    dirty = {"Residual", "Held", "Unkillable"} | (set() if busy_is_clean else {"Busy"})
    passing = {"Clean", "Busy"} if busy_is_clean else {"Clean"}
    if set(of) & dirty:
        assert found is Result.NOT_CLEAN
    elif of and not failure and set(of) <= passing:
        assert found is Result.CLEAN
    else:
        assert found is Result.CANNOT_TELL


def test_every_result_of_a_gpu_is_counted() -> None:
    """A new result has to be given its weight."""
    assert set(GpuResult) == gpus.DIRTY | gpus.UNKNOWN | {GpuResult.CLEAN, GpuResult.BUSY}
    assert EXIT_CODES == {Result.CLEAN: 0, Result.NOT_CLEAN: 3, Result.CANNOT_TELL: 4, Result.REFUSED: 5}


def reading_of(*of: GpuReading) -> Reading:
    """A reading of these GPUs."""
    return Reading(gpus=of)


FREED: dict[str, tuple[list[GpuReading], list[GpuReading], set[str] | None, int]] = {
    "what fell": ([gpu(used_bytes=GIB), gpu(1, used_bytes=GIB)], [gpu(used_bytes=MIB), gpu(1)], None, 2 * GIB - MIB),
    "what rose frees nothing": ([gpu(), gpu(1, used_bytes=GIB)], [gpu(used_bytes=GIB), gpu(1)], None, GIB),
    "unknown before": ([gpu(error=LOST, **UNREAD)], [gpu()], None, 0),
    "unknown after": ([gpu(used_bytes=GIB)], [gpu(error=LOST, **UNREAD)], None, 0),
    "gone after": ([gpu(used_bytes=GIB)], [], None, 0),
    "nothing read": ([], [], None, 0),
    "out of scope": ([gpu(used_bytes=GIB), gpu(1, used_bytes=MIB)], [gpu(), gpu(1)], {"1"}, MIB),
    "an instance and its GPU": (
        [gpu(used_bytes=GIB), gpu(uuid=MIG_0, parent=GPU_0, used_bytes=GIB)],
        [gpu(), gpu(uuid=MIG_0, parent=GPU_0)],
        None,
        GIB,
    ),
}


@pytest.mark.parametrize(("before", "after", "scope", "freed"), FREED.values(), ids=FREED.keys())
def test_freed_memory_is_what_two_readings_know(
    before: list[GpuReading], after: list[GpuReading], scope: set[str] | None, freed: int
) -> None:
    """Unknown counts as nothing, and no memory counts twice."""
    assert gpus.freed_bytes(reading_of(*before), reading_of(*after), scope and frozenset(scope)) == freed
