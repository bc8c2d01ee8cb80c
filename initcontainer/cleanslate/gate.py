"""The gate: wait until the GPUs are clean, then let the server start. Needs no privilege and sees no other process.

Memory decides. Processes that NVML lists count where they can be seen from here and are no service of the node.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cleanslate import devices, gpus, verify
from cleanslate.gpus import GpuResult, GpuVerdict, Holder, Result
from cleanslate.nvml import Nvml, Reading, find_library
from cleanslate.settings import Settings
from cleanslate.verify import Patience, Settled


class GateFindings(NamedTuple):
    """What the gate saw last, its result, and how long it looked, in seconds."""

    verdicts: tuple[GpuVerdict, ...]
    failure: str | None
    result: Result
    waited_s: float


def wait(settings: Settings, nvml: Nvml) -> GateFindings:
    """Read until every GPU is clean or the time is over. Says on stderr what it waits for, at once and on every change.

    Raises termination.TerminatedError on SIGTERM if it is heeded.
    """
    start = time.monotonic()
    expected = settings.expect_gpus or devices.count_nodes(settings.host_root) or devices.count_gpus() or None
    patience = Patience(
        until=start + settings.timeout_s,
        stable_reads=settings.stable_reads,
        hopeful=lambda _: True,  # whatever is wrong may be put right while the gate waits
        passing=frozenset({GpuResult.CLEAN}),
    )
    settled = verify.settle(nvml, _judge(settings, expected), patience, _teller())
    failure = settled.reading.failure
    result = gpus.overall(settled.verdicts, failure=failure, busy_is_clean=False)
    if result is Result.CLEAN and not settled.clean:
        result = Result.NOT_CLEAN
    return GateFindings(
        verdicts=settled.verdicts,
        failure=failure,
        result=result,
        waited_s=time.monotonic() - start,
    )


def library(settings: Settings) -> str | None:
    """The NVML library to use: the one named, the host's where it is mounted, else what the container's loader finds."""
    return settings.nvml_library or find_library(settings.host_root)


def _judge(settings: Settings, expected: int | None) -> Callable[[Reading], Sequence[GpuVerdict]]:
    def judge(reading: Reading) -> Sequence[GpuVerdict]:
        return gpus.judge_reading(
            reading,
            _holders(reading),
            scope=frozenset(settings.gpus) or None,
            expected=expected,
            asked_bytes=settings.max_used_bytes,
        )

    return judge


def _holders(reading: Reading) -> dict[str, list[Holder]]:
    listed = {gpu.uuid: gpu.processes for gpu in reading.gpus if gpu.uuid and gpu.processes}
    return {uuid: [_holder(process.pid) for process in processes] for uuid, processes in listed.items()}


def _holder(pid: int) -> Holder:
    # Most gates see no processes at all, and start sooner without what it takes to tell them apart.
    from cleanslate import procfs, protected
    from cleanslate.model import Pid

    # Another PID namespace has processes of the same numbers, which are not meant.
    stat = procfs.read_stat(Pid(pid)) if procfs.in_initial_pid_namespace() else None
    if stat is None:
        return Holder(pid=pid, title="?", owner="not visible from here", harmless=True)
    process = procfs.with_details(procfs.bare(stat))
    harmless = process.is_zombie or protected.protection(process, own=frozenset(), extra=()) is not None
    return Holder(pid=pid, title=stat.comm, owner="of unknown owner", harmless=harmless)


def _teller() -> Callable[[Settled], None]:
    """A listener that prints a line when the state of the GPUs changes: their results, not every byte."""
    last: list[tuple[str, ...]] = [()]

    def tell(settled: Settled) -> None:
        waiting = [verdict for verdict in settled.verdicts if verdict.result is not GpuResult.CLEAN]
        state = tuple(f"{v.reading.index}{v.result}" for v in waiting) or (
            (settled.reading.failure or "none",) if not settled.verdicts else ()
        )
        if state != last[0]:
            last[0] = state
            for line in _lines(settled, waiting):
                print(line, file=sys.stderr, flush=True)  # noqa: T201 - the gate's voice

    return tell


def _lines(settled: Settled, waiting: Sequence[GpuVerdict]) -> list[str]:
    if settled.reading.failure:
        return [f"gate: waiting: {settled.reading.failure}"]
    if not settled.verdicts:
        return ["gate: waiting: NVML shows 0 GPUs; check runtimeClassName and NVIDIA_VISIBLE_DEVICES of the pod"]
    return [f"gate: waiting: {verdict.message}" for verdict in waiting]
