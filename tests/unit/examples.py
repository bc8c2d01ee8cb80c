"""Builders of plain data for the unit tests: each names only what its test is about, the rest is ordinary."""

from typing import Any

from cleanslate.families import Family
from cleanslate.formats import Plan
from cleanslate.gpus import Holder
from cleanslate.model import ContainerId, Judgement, Owner, OwnerKind, Pid, Process, Verdict
from cleanslate.nvml import GpuReading
from cleanslate.verdicts import Case

MIB = 1 << 20
GIB = 1 << 30

POD = "5e1c7f3a-1b2c-4d5e-8f90-a1b2c3d4e5f6"
OTHER_POD = "0d9c8b7a-6f5e-4d3c-9b2a-1f0e9d8c7b6a"
STATIC_POD = "8f14e45fceea167a5a36dedd4bea2543"
CONTAINER = "3f2a" * 16
OTHER_CONTAINER = "b04c" * 16
GPU_0 = "GPU-6f1c0a7e-0000-4000-8000-000000000000"
GPU_1 = "GPU-6f1c0a7e-0000-4000-8000-000000000001"
MIG_0 = "MIG-6f1c0a7e-0000-4000-8000-000000000002"

NOW_S = 1_800_000_000.0
SPAWN = ("/usr/bin/python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=7)")
TRACKER = ("/usr/bin/python3", "-c", "from multiprocessing.resource_tracker import main;main(9)")


def process(pid: int = 100, ppid: int = 50, **known: Any) -> Process:
    """An ordinary Python process of a user, with whatever is `known` of it instead."""
    ordinary: dict[str, Any] = {
        "start_ticks": 1000 + pid,
        "pgid": pid,
        "sid": pid,
        "state": "S",
        "threads": 4,
        "comm": "python3",
        "argv": ("python3", "app.py"),
        "executable": "/usr/bin/python3.11",
        "cgroup": "0::/",
        "uid": 1000,
    }
    return Process(pid=Pid(pid), ppid=Pid(ppid), **ordinary | known)


def titled(title: str, pid: int = 100, ppid: int = 50, **known: Any) -> Process:
    """A process that set its title as setproctitle does: one argument, and comm cut at 15 characters."""
    return process(pid, ppid, **{"argv": (title,), "comm": title[:15]} | known)


def by_pid(*processes: Process) -> dict[Pid, Process]:
    """One scan's processes."""
    return {one.pid: one for one in processes}


def owner(kind: OwnerKind, name: str = "", container: str | None = None) -> Owner:
    """An owner with an evidence of its own."""
    inside = ContainerId(container) if container else None
    return Owner(kind=kind, name=name, container=inside, evidence=f"cgroup of {kind} {name}".strip())


def pod(uid: str = POD, container: str | None = CONTAINER) -> Owner:
    """A pod's container as owner."""
    return owner(OwnerKind.POD, uid, container)


def family(head: int, *members: int, trackers: tuple[int, ...] = (), orphaned: str | None = None) -> Family:
    """A server's processes."""
    pids = frozenset(map(Pid, (head, *members, *trackers)))
    return Family(head=Pid(head), members=pids, trackers=frozenset(map(Pid, trackers)), orphaned=orphaned)


def case(of: Process | None = None, belongs_to: Owner | None = None, **known: Any) -> Case:
    """A process that holds GPU 0 with a context, an hour before NOW_S."""
    ordinary: dict[str, Any] = {
        "started_at_s": NOW_S - 3600,
        "gpus": frozenset({GPU_0}),
        "nvml_listed": True,
        "holds_devices": True,
        "holds_uvm": True,
    }
    return Case(process=of or process(), owner=belongs_to or owner(OwnerKind.HOST, "uid 1000"), **ordinary | known)


def plan(live: dict[str, frozenset[str]] | None = None, condemned: tuple[str, ...] = (), margin_s: float = 5.0) -> Plan:
    """The cluster's view at NOW_S: by default one live pod with one running container."""
    pods = {POD: frozenset({CONTAINER})} if live is None else live
    return Plan(snapshot_time_s=NOW_S, live_pods=pods, condemned_pods=frozenset(condemned), margin_s=margin_s)


def judgement(verdict: Verdict = Verdict.KEEP, **known: Any) -> Judgement:
    """A verdict with a reason."""
    return Judgement(**{"verdict": verdict, "reason": "belongs to a live pod", "evidence": "it is in the plan"} | known)


def holder(pid: int = 100, **known: Any) -> Holder:
    """A holder of unknown owner."""
    return Holder(pid=pid, title="VLLM::Worker_TP0", owner="of unknown owner", **known)


def kept(pid: int = 100, **known: Any) -> Holder:
    """A holder that is kept for what it is."""
    return holder(pid, verdict="Keep", reason="belongs to a live pod", kept=True, **known)


def gpu(index: int = 0, **known: Any) -> GpuReading:
    """An idle H200 without processes."""
    ordinary: dict[str, Any] = {
        "uuid": f"GPU-6f1c0a7e-0000-4000-8000-{index:012d}",
        "name": "NVIDIA H200",
        "minor": index,
        "used_bytes": 0,
        "reserved_bytes": 615 * MIB,
        "total_bytes": 141 * GIB,
    }
    return GpuReading(index=index, **ordinary | known)
