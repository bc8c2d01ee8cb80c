"""The verdict on every GPU-relevant process: pure rules over one survey. This is where it is decided who is ended.

The first rule that answers wins, and their order is the documentation. What no rule proves to be left over is kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cleanslate.families import Family
from cleanslate.formats import Plan
from cleanslate.model import GpuUuid, Judgement, Manner, Owner, OwnerKind, Pid, Process, Verdict
from cleanslate.settings import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that is known of one GPU-relevant process.

    `gpus` it holds; `nvml_listed`: NVML lists it with a context; `lists_complete`: those lists were read whole, and their
    pids are this program's. `holds_devices`: any NVIDIA node is open, `holds_uvm`: that of CUDA contexts (None: unreadable).
    `started_at_s`: Unix time. `container_alive`: its container's first process lives (None: unknown). `protection`: why it
    is protected. `family`: the server it belongs to, with that one's GPUs and owner.
    """

    process: Process
    owner: Owner
    started_at_s: float
    parent: Process | None = None
    gpus: frozenset[GpuUuid] = frozenset()
    nvml_listed: bool = False
    lists_complete: bool = False
    holds_devices: bool = False
    holds_uvm: bool | None = False
    protection: str | None = None
    container_alive: bool | None = None
    family: Family | None = None
    family_gpus: frozenset[GpuUuid] = frozenset()
    family_owner: Owner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a verdict rests on besides the process: the order given and the cluster's view.

    `gpus`: those in scope, or None for all. `named_owners`: `kind:name` of owners that scope All may end although it would
    keep their kind.
    """

    scope: Scope
    plan: Plan | None = None
    gpus: frozenset[GpuUuid] | None = None
    named_owners: frozenset[str] = frozenset()


Rule = Callable[[Case, Ground], Judgement | None]


def judge(case: Case, ground: Ground) -> Judgement:
    """The verdict on one process: End only with evidence, else Keep."""
    for rule in RULES:
        if judgement := rule(case, ground):
            return judgement
    return _keep("nothing proves it left over", case.owner.evidence, known=False)


def judge_all(cases: Mapping[Pid, Case], ground: Ground) -> dict[Pid, Judgement]:
    """The verdicts on all processes of a survey."""
    return {pid: judge(case, ground) for pid, case in cases.items()}


def is_protected(case: Case, _: Ground) -> Judgement | None:
    """PID 1, kernel threads, this program, the node's services."""
    return _keep("protected", case.protection) if case.protection else None


def is_dead(case: Case, _: Ground) -> Judgement | None:
    """A zombie is dead: there is nothing to end, only a parent that does not collect it."""
    if not case.process.is_zombie:
        return None
    parent = case.parent.comm if case.parent else "unknown"
    return _keep(
        "a zombie, dead already",
        f"state {case.process.state}; not collected by its parent {case.process.ppid} ({parent})",
    )


def is_monitor(case: Case, _: Ground) -> Judgement | None:
    """A holder without a context: NVML does not list it, nvidia-uvm is not open, and it belongs to no server."""
    if case.holds_uvm is not False or not _has_no_context(case):
        return None
    return _monitor("holds NVIDIA devices but not nvidia-uvm, and NVML does not list it")


def is_outside_the_gpus(case: Case, ground: Ground) -> Judgement | None:
    """With --gpu, whatever holds none of the named GPUs is none of our business."""
    if ground.gpus is None or (case.gpus | case.family_gpus) & ground.gpus:
        return None
    return _keep("holds none of the GPUs in scope", _gpu_evidence(case))


def started_after_the_plan(case: Case, ground: Ground) -> Judgement | None:
    """The cluster's view is of a moment; who came later is not in it."""
    plan = ground.plan
    if plan is None or case.started_at_s < plan.snapshot_time_s - plan.margin_s:
        return None
    after_s = case.started_at_s - plan.snapshot_time_s
    return _keep(
        "started after the plan was made", f"started {after_s:+.1f} s from the plan's time, margin {plan.margin_s:g} s"
    )


def is_condemned(case: Case, ground: Ground) -> Judgement | None:
    """The plan says that this pod is to go."""
    if ground.plan is None or case.owner.kind is not OwnerKind.POD or case.owner.name not in ground.plan.condemned_pods:
        return None
    return _end("its pod is condemned by the plan", case.owner.evidence, _live_manner(case))


def is_orphaned_worker(case: Case, _: Ground) -> Judgement | None:
    """The headline leak: the front end died, its engine and workers did not. Holds for the workers' own children too."""
    family = case.family
    if family is None or family.orphaned is None:
        return None
    pid = case.process.pid
    if pid in family.trackers:
        return _end("resource tracker of an orphaned server", family.orphaned, Manner.SPARED)
    if pid == family.head:
        return _end("orphaned worker", family.orphaned, Manner.AT_ONCE)
    if not _same_owner(case.owner, case.family_owner):
        return None  # a container or job started from inside it answers for itself
    return _end(f"belongs to orphaned worker {family.head}", family.orphaned, Manner.AT_ONCE)


def has_no_context(case: Case, ground: Ground) -> Judgement | None:
    """With driver 580 whatever opens NVML has nvidia-uvm open too: there its complete lists alone tell monitors.

    Not for a pod that is gone: what it left behind is a leftover with or without memory.
    """
    if not case.lists_complete or not _has_no_context(case) or _pod_leftover(case, ground):
        return None
    return _monitor("holds NVIDIA devices, and NVML, whose lists are complete, does not list it")


def by_owner(case: Case, ground: Ground) -> Judgement | None:
    """Everything else is decided by whom the process belongs to."""
    return _BY_OWNER[case.owner.kind](case, ground)


RULES: tuple[Rule, ...] = (
    is_protected,
    is_dead,
    is_monitor,
    is_outside_the_gpus,
    started_after_the_plan,
    is_condemned,
    is_orphaned_worker,
    has_no_context,
    by_owner,
)


def _pod(case: Case, ground: Ground) -> Judgement:
    if ground.plan is None:
        return _pod_without_plan(case, ground)
    if leftover := _pod_leftover(case, ground):
        return leftover
    if ground.scope is Scope.ALL:
        return _end("scope all", case.owner.evidence, _live_manner(case))
    return _keep("belongs to a live pod", f"pod {case.owner.name} is in the plan; {case.owner.evidence}")


def _pod_leftover(case: Case, ground: Ground) -> Judgement | None:
    """The verdict on what a pod or container left behind that is gone by the plan."""
    owner = case.owner
    if owner.kind is not OwnerKind.POD or ground.plan is None:
        return None
    running = ground.plan.live_pods.get(owner.name)
    if running is None:
        return _end("its pod is gone", f"pod {owner.name} is not in the plan; {owner.evidence}", _leftover_manner(case))
    if owner.container is None or owner.container in running:
        return None
    why = f"container {owner.container[:12]} of pod {owner.name} is not running by the plan"
    return _end("its container is gone", why, _leftover_manner(case))


def _pod_without_plan(case: Case, ground: Ground) -> Judgement:
    if case.container_alive and ground.scope is Scope.ALL:
        return _end("scope all", case.owner.evidence, _live_manner(case))
    if case.container_alive:
        return _keep("belongs to a live pod", f"its container's first process lives; {case.owner.evidence}")
    why = f"no plan says whether its pod lives; {case.owner.evidence}"
    return _keep("belongs to a pod of unknown state", why, known=False)


def _host(case: Case, ground: Ground) -> Judgement:
    if ground.scope is Scope.ALL:
        return _end("scope all", case.owner.evidence, _live_manner(case))
    whose = "a login session" if case.owner.kind is OwnerKind.LOGIN else "the host itself"
    return _keep(f"belongs to {whose}, and no proof that it is left over", case.owner.evidence)


def _foreign(case: Case, ground: Ground) -> Judgement:
    owner = case.owner
    if ground.scope is Scope.ALL and _is_named(owner, ground.named_owners):
        return _end("scope all, and its owner is named", owner.evidence, _live_manner(case))
    return _keep(_FOREIGN[owner.kind], owner.evidence)


def _unknown(case: Case, _: Ground) -> Judgement:
    return _keep("its owner is unknown", case.owner.evidence, known=False)


_FOREIGN = {
    OwnerKind.CONTAINER: "belongs to a container of another engine",
    OwnerKind.BATCH: "belongs to a batch job",
    OwnerKind.SERVICE: "belongs to a system service",
}
_BY_OWNER: Mapping[OwnerKind, Callable[[Case, Ground], Judgement]] = {
    OwnerKind.POD: _pod,
    OwnerKind.HOST: _host,
    OwnerKind.LOGIN: _host,
    OwnerKind.CONTAINER: _foreign,
    OwnerKind.BATCH: _foreign,
    OwnerKind.SERVICE: _foreign,
    OwnerKind.UNKNOWN: _unknown,
}


def _is_named(owner: Owner, named: frozenset[str]) -> bool:
    if f"{owner.kind}:{owner.name}" in named:
        return True
    # A container's ID may be cut as container engines show it: 12 digits.
    cut = f"{owner.kind}:{owner.name[:12]}"
    return owner.kind is OwnerKind.CONTAINER and len(owner.name) == 64 and cut in named


def _same_owner(owner: Owner, other: Owner | None) -> bool:
    return other is not None and (owner.kind, owner.name, owner.container) == (other.kind, other.name, other.container)


def _live_manner(case: Case) -> Manner:
    tracker = case.family is not None and case.process.pid in case.family.trackers
    return Manner.SPARED if tracker else Manner.GRACEFULLY


def _leftover_manner(case: Case) -> Manner:
    tracker = case.family is not None and case.process.pid in case.family.trackers
    return Manner.SPARED if tracker else Manner.AT_ONCE


def _has_no_context(case: Case) -> bool:
    return case.holds_devices and not case.nvml_listed and case.family is None


def _monitor(evidence: str) -> Judgement:
    reason = "a monitor, which holds no GPU memory"
    return Judgement(verdict=Verdict.KEEP, reason=reason, evidence=evidence, monitor=True)


def _gpu_evidence(case: Case) -> str:
    return f"holds {', '.join(sorted(case.gpus))}" if case.gpus else "no GPU of it is known"


def _keep(reason: str, evidence: str | None, *, known: bool = True) -> Judgement:
    return Judgement(verdict=Verdict.KEEP, reason=reason, evidence=evidence or "", owner_known=known)


def _end(reason: str, evidence: str, manner: Manner) -> Judgement:
    return Judgement(verdict=Verdict.END, reason=reason, evidence=evidence, manner=manner)
