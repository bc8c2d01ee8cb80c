"""Which processes hold which GPU, and which of them count against it. Pure, over a survey and a reading as late or later."""

from collections.abc import Callable, Mapping

from cleanslate.gpus import Holder
from cleanslate.model import Judgement, Outcome, Pid, Verdict
from cleanslate.nvml import GpuReading, Reading
from cleanslate.verdicts import Case

Holders = dict[str, list[Holder]]


def holders(
    cases: Mapping[Pid, Case],
    judgements: Mapping[Pid, Judgement],
    outcomes: Mapping[Pid, Outcome],
    reading: Reading,
    *,
    name_of: Callable[[Pid], str | None],
    all_visible: bool,
) -> Holders:
    """The holders of each GPU, monitors left out.

    `name_of` a pid that the survey does not know, None if there is no such process; `all_visible`: pids that NVML lists and
    that are not there do not exist, rather than live outside this PID namespace.
    """
    found: Holders = {}
    used = {(gpu.uuid, process.pid): process.used_bytes for gpu in reading.gpus for process in gpu.processes or ()}
    for pid, case in cases.items():
        judgement, outcome = judgements[pid], outcomes.get(pid)
        if judgement.monitor or outcome is Outcome.ENDED:
            continue
        holder = Holder(
            pid=pid,
            title=case.process.title,
            owner=str(case.owner),
            verdict=str(judgement.verdict),
            reason=judgement.reason,
            kept=judgement.verdict is Verdict.KEEP and judgement.owner_known,
            stuck=outcome in {Outcome.UNINTERRUPTIBLE, Outcome.UNKILLABLE},
            harmless=case.protection is not None or case.process.is_zombie,
        )
        for uuid in case.gpus:
            found.setdefault(uuid, []).append(holder._replace(used_bytes=used.get((uuid, pid))))
    for gpu in reading.gpus:
        _add_listed(gpu, cases, found, name_of, all_visible)
    return found


def _add_listed(
    gpu: GpuReading,
    cases: Mapping[Pid, Case],
    found: Holders,
    name_of: Callable[[Pid], str | None],
    all_visible: bool,
) -> None:
    """Processes that NVML lists and the survey does not know. A dead one's memory is nobody's: that GPU is residual."""
    for process in gpu.processes or ():
        if process.pid in cases or gpu.uuid is None:
            continue
        name = name_of(process.pid) if all_visible else None
        if name is None and all_visible:
            continue
        seen = "of unknown owner" if name else "not visible from this PID namespace"
        holder = Holder(
            pid=process.pid, title=name or "?", owner=seen, harmless=name is None, used_bytes=process.used_bytes
        )
        found.setdefault(gpu.uuid, []).append(holder)
