"""Who holds which GPU: from a survey's verdicts and NVML's lists, which may be later."""

from typing import Any

import pytest

from cleanslate import holding
from cleanslate.gpus import Holder
from cleanslate.model import Judgement, Outcome, Pid, Verdict
from cleanslate.nvml import GpuProcess, GpuReading, Reading
from cleanslate.verdicts import Case
from unit.examples import GIB, GPU_0, GPU_1, case, gpu, judgement, pod, process, titled

WORKER = case(titled("VLLM::Worker_TP0"), pod())


def held(
    cases: dict[int, Case],
    judgements: dict[int, Judgement],
    *readings: GpuReading,
    outcomes: dict[int, Outcome] | None = None,
    names: dict[int, str] | None = None,
    all_visible: bool = True,
) -> dict[str, list[Holder]]:
    """The holders, where `names` are the processes that live beside those of the survey."""
    return holding.holders(
        {Pid(pid): one for pid, one in cases.items()},
        {Pid(pid): one for pid, one in judgements.items()},
        {Pid(pid): one for pid, one in (outcomes or {}).items()},
        Reading(gpus=readings),
        name_of=(names or {}).get,  # type: ignore[arg-type]
        all_visible=all_visible,
    )


def listed(pid: int, used_bytes: int | None = GIB, **known: Any) -> GpuReading:
    """GPU 0 with one process in NVML's lists."""
    return gpu(processes=(GpuProcess(pid=Pid(pid), used_bytes=used_bytes),), **known)


def test_a_holder_is_told_with_owner_verdict_and_memory() -> None:
    """As a message and the report need it."""
    (one,) = held({100: WORKER}, {100: judgement()}, listed(100))[GPU_0]
    assert (one.pid, one.title, one.owner) == (100, "VLLM::Worker_TP0", str(pod()))
    assert (one.verdict, one.reason, one.used_bytes) == ("Keep", "belongs to a live pod", GIB)
    assert (one.kept, one.stuck, one.harmless) == (True, False, False)


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (judgement(), True),
        (judgement(owner_known=False), False),
        (judgement(Verdict.END), False),
    ],
    ids=["kept by a known owner", "kept for want of proof", "to end"],
)
def test_only_a_known_owner_makes_a_gpu_busy(found: Judgement, kept: bool) -> None:
    """What is kept because nothing is known of it does not count as lawful use."""
    (one,) = held({100: WORKER}, {100: found}, listed(100))[GPU_0]
    assert one.kept is kept


@pytest.mark.parametrize(
    ("outcome", "there", "stuck"),
    [
        (Outcome.ENDED, False, False),
        (Outcome.UNKILLABLE, True, True),
        (Outcome.UNINTERRUPTIBLE, True, True),
        (Outcome.NOT_ENDED, True, False),
        (Outcome.WOULD_END, True, False),
    ],
)
def test_what_became_of_a_process_decides_whether_it_holds(outcome: Outcome, there: bool, stuck: bool) -> None:
    """The ended hold nothing; what SIGKILL does not end is stuck."""
    found = held({100: WORKER}, {100: judgement(Verdict.END)}, gpu(), outcomes={100: outcome})
    assert [one.stuck for one in found.get(GPU_0, [])] == ([stuck] if there else [])


def test_monitors_hold_no_memory() -> None:
    """An exporter does not make a GPU busy."""
    assert held({100: WORKER}, {100: judgement(monitor=True)}, gpu()) == {}


@pytest.mark.parametrize(
    "harmless",
    [case(protection="a service of the node"), case(process(state="Z", threads=1))],
    ids=["service", "zombie"],
)
def test_services_and_zombies_count_only_above_the_tolerance(harmless: Case) -> None:
    """They are marked for the verdict on the GPU."""
    (one,) = held({100: harmless}, {100: judgement()}, gpu())[GPU_0]
    assert one.harmless


def test_a_process_holds_every_gpu_it_is_on() -> None:
    """Memory is told for each; where NVML cannot say it is unknown."""
    both = case(titled("VLLM::EngineCore"), gpus=frozenset({GPU_0, GPU_1}))
    found = held({100: both}, {100: judgement()}, listed(100), gpu(1))
    assert {uuid: [one.used_bytes for one in its] for uuid, its in found.items()} == {GPU_0: [GIB], GPU_1: [None]}
    (one,) = held({100: WORKER}, {100: judgement()}, listed(100, used_bytes=None))[GPU_0]
    assert one.used_bytes is None


def test_a_newcomer_in_nvmls_lists_holds_the_gpu() -> None:
    """It came after the survey: of unknown owner, so the GPU is not clean."""
    (one,) = held({}, {}, listed(555), names={555: "python3"})[GPU_0]
    assert (one.pid, one.title, one.owner, one.verdict) == (555, "python3", "of unknown owner", None)
    assert (one.kept, one.harmless, one.used_bytes) == (False, False, GIB)


def test_a_listed_process_that_does_not_exist_holds_nothing() -> None:
    """NVML may list the dead: their memory is nobody's, and the GPU residual."""
    assert held({}, {}, listed(555), all_visible=True) == {}


@pytest.mark.parametrize("names", [{}, {555: "somebody else's pid 555"}], ids=["unseen", "another with that pid here"])
def test_from_inside_a_namespace_listed_processes_are_invisible_not_dead(names: dict[int, str]) -> None:
    """NVML's pids are the host's: from here they may not exist or be another's, and are held against nobody in sight."""
    (one,) = held({}, {}, listed(555), names=names, all_visible=False)[GPU_0]
    assert (one.title, one.owner) == ("?", "not visible from this PID namespace")
    assert one.harmless


def test_a_surveyed_process_is_not_listed_twice() -> None:
    """Once by the survey, whatever NVML says."""
    assert len(held({100: WORKER}, {100: judgement()}, listed(100), names={100: "python3"})[GPU_0]) == 1


def test_lists_that_nvml_refuses_or_of_a_gpu_without_uuid_add_nobody() -> None:
    """Unknown is told by the GPU's own result."""
    assert held({}, {}, gpu(processes=None), listed(555, uuid=None), names={555: "x"}) == {}
