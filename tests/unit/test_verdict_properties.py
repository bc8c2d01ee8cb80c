"""Over random worlds: no live owner's process is ever ended under `orphans`, and nothing protected under either scope.

A world is made of servers whose fate is known because the test decides it: alive or with a dead front end, in a place that
lives or is gone. The oracle is that knowledge, not the rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cleanslate import families, owners, protected, verdicts
from cleanslate.families import Links
from cleanslate.model import Judgement, Manner, OwnerKind, Pid, Process, Verdict
from cleanslate.settings import Scope
from cleanslate.verdicts import Case, Ground
from unit.examples import (
    CONTAINER,
    GPU_0,
    GPU_1,
    NOW_S,
    OTHER_CONTAINER,
    OTHER_POD,
    POD,
    SPAWN,
    STATIC_POD,
    TRACKER,
    plan,
    process,
    titled,
)

PLACES = {
    "running container": f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope",
    "earlier container": f"0::/kubepods/burstable/pod{POD}/{OTHER_CONTAINER}",
    "pod that is gone": f"0::/kubepods/besteffort/pod{STATIC_POD}/{CONTAINER}",
    "condemned pod": f"0::/kubepods/pod{OTHER_POD}/{CONTAINER}",
    "docker": f"0::/docker/{CONTAINER}",
    "Slurm": "0::/system.slice/slurmstepd.scope/job_42/step_0",
    "service": "0::/system.slice/vllm.service",
    "login": "0::/user.slice/user-1000.slice/session-3.scope",
    "host": "0::/",
    "unknown": "0::/somewhere",
    "unreadable": "",
}
NOT_LIVE_BY_PLAN = {"earlier container", "pod that is gone", "condemned pod"}
NEVER_BY_SCOPE_ALL = {"docker", "Slurm", "service", "unknown", "unreadable"}
LAUNCHERS = {
    "shell": "/usr/bin/bash",
    "init": "/usr/bin/tini",
    "shim": "/usr/bin/containerd-shim-runc-v2",
    "supervisor": "/usr/bin/python3.11",
    "unreadable": None,
}
MAKE_NO_WORKERS = {"shell", "init", "shim"}
GUARDED = "/opt/guarded/python3"
WORKER_ARGVS = (("VLLM::Worker_TP0",), ("sglang::scheduler_TP0",), SPAWN)
INNOCENTS = (
    ("vim", "vllm.py"),
    ("tail", "-f", "vllm.log"),
    ("bash", "-c", "sleep 1000 # python3 vllm"),
    ("nvidia-persistenced",),
    ("python3", "train.py"),
)


@dataclass(frozen=True, kw_only=True)
class Server:
    """What is decided of one server. `adopted_by_init`: its orphans went past the launcher to PID 1."""

    place: str
    launcher: str
    alive: bool
    workers: int
    worker_argv: tuple[str, ...]
    tracker: bool
    late: bool
    guarded: bool
    zombie_worker: bool
    launcher_gone: bool
    adopted_by_init: bool
    severed: bool | None
    container_alive: bool | None
    gpu: str


@dataclass(kw_only=True)
class World:
    """Processes, and of each whether it is alive by construction, late, off limits, or surely left over."""

    processes: dict[Pid, Process] = field(default_factory=dict)
    server: dict[Pid, Server] = field(default_factory=dict)
    gpus: dict[Pid, frozenset[str]] = field(default_factory=dict)
    monitors: set[Pid] = field(default_factory=set)
    off_limits: set[Pid] = field(default_factory=set)
    trackers: set[Pid] = field(default_factory=set)
    pipes: dict[Pid, frozenset[int]] = field(default_factory=dict)
    awaited: dict[Pid, int] = field(default_factory=dict)

    def add(self, one: Process, of: Server, *, gpu: bool = False) -> Pid:
        """One more process of a server."""
        self.processes[one.pid] = one
        self.server[one.pid] = of
        self.gpus[one.pid] = frozenset({of.gpu}) if gpu else frozenset()
        if of.guarded or one.state == "Z":
            self.off_limits.add(one.pid)
        return one.pid


servers = st.builds(
    Server,
    place=st.sampled_from(sorted(PLACES)),
    launcher=st.sampled_from(sorted(LAUNCHERS)),
    alive=st.booleans(),
    workers=st.integers(0, 2),
    worker_argv=st.sampled_from(WORKER_ARGVS),
    tracker=st.booleans(),
    late=st.sampled_from([False, False, False, True]),
    guarded=st.sampled_from([False, False, False, True]),
    zombie_worker=st.booleans(),
    launcher_gone=st.booleans(),
    adopted_by_init=st.booleans(),
    severed=st.none() | st.booleans(),
    container_alive=st.none() | st.booleans(),
    gpu=st.sampled_from([GPU_0, GPU_1]),
)


def add_server(world: World, of: Server, base: int, host_init: bool) -> None:
    """Launcher `base`, front end +1, engine +2, workers +3…, tracker +9; a dead front end is not there any more.

    In a container the first server's front end may be PID 1 itself.
    """
    is_pid_1 = of.alive and of.launcher_gone and not host_init and base == 1000
    home: dict[str, Any] = {"cgroup": PLACES[of.place], "pgid": base if of.launcher_gone else base + 1}
    home |= {"pgid": 1} if is_pid_1 else {}
    exe = GUARDED if of.guarded else "/usr/bin/python3.11"
    if not of.launcher_gone:
        executable = LAUNCHERS[of.launcher]
        launcher = process(base, 1, executable=executable, cgroup=home["cgroup"], comm="python3")
        world.add(launcher, replace(of, guarded=False))
    above = 1 if of.launcher_gone else base
    if of.alive and not is_pid_1:
        argv = ("python3", "/usr/local/bin/vllm", "serve")
        world.add(process(base + 1, above, argv=argv, executable=exe, **home), of)
    reaper = 1 if of.adopted_by_init or of.launcher_gone else base
    front_end = 1 if is_pid_1 else base + 1
    parent = front_end if of.alive else reaper
    severed = None if of.alive else of.severed
    engine = titled("VLLM::EngineCore", base + 2, parent, executable=exe, severed=severed, **home)
    world.add(engine, of, gpu=True)
    for number in range(of.workers):
        dead = {"state": "Z", "threads": 1} if of.zombie_worker and number == 0 else {}
        argv = of.worker_argv
        one = process(base + 3 + number, base + 2, argv=argv, comm=argv[0][:15], executable=exe, **home, **dead)
        world.add(one, of, gpu=not dead)
    if of.tracker:
        tracker = world.add(process(base + 9, parent, argv=TRACKER, executable=exe, **home), of)
        world.trackers.add(tracker)
        world.awaited[tracker] = base
        world.pipes[Pid(base + 2)] = frozenset({base})


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, bool]:
    """A world and whether its PID 1 is the host's."""
    host_init = draw(st.booleans())
    world = World()
    init = "/usr/lib/systemd/systemd" if host_init else "/usr/bin/python3.11"
    for number, server in enumerate(draw(st.lists(servers, min_size=1, max_size=4))):
        add_server(world, server, 1000 + 20 * number, host_init)
    first = next(iter(world.server.values()))
    for one in (
        process(1, 0, pgid=1, executable=init, uid=0),
        process(2, 0, kernel_thread=True, argv=(), executable=None),
    ):
        world.off_limits.add(world.add(one, first))
    service = process(10, 1, executable="/usr/bin/nvidia-persistenced", executable_trusted=True, uid=0)
    world.off_limits.add(world.add(service, first, gpu=True))
    for number, argv in enumerate(draw(st.lists(st.sampled_from(INNOCENTS), max_size=3))):
        server = draw(servers.filter(lambda one: one.alive and not one.guarded))
        where = {"cgroup": PLACES[server.place], "executable": f"/srv/tools/{argv[0]}", "executable_trusted": False}
        world.add(process(500 + number, 1, argv=argv, comm=argv[0][:15], **where), server, gpu=draw(st.booleans()))
    monitor = draw(servers.filter(lambda one: one.alive and one.place != "condemned pod"))
    world.monitors.add(world.add(process(600, 1, cgroup=PLACES[monitor.place], argv=("nvitop",)), monitor))
    return world, host_init


def judgements(world: World, ground: Ground, host_init: bool) -> Mapping[Pid, Judgement]:
    """The verdicts on every process of the world, put together as a survey does."""
    processes = world.processes
    holders = frozenset(pid for pid, gpus in world.gpus.items() if gpus)
    found = families.families(processes, holders, host_init=host_init)
    found = families.with_trackers(found, processes, Links(held=world.pipes, awaited=world.awaited))
    owned = {pid: owners.owner_of(one.cgroup, uid=one.uid) for pid, one in processes.items()}
    cases = {}
    for pid, one in processes.items():
        family = next((one_family for one_family in found if pid in one_family.members), None)
        holds = frozenset().union(*(world.gpus[member] for member in family.members)) if family else frozenset()
        cases[pid] = Case(
            process=one,
            owner=owned[pid],
            started_at_s=NOW_S if world.server[pid].late else NOW_S - 3600,
            parent=processes.get(one.ppid),
            gpus=world.gpus[pid],
            nvml_listed=bool(world.gpus[pid]),
            holds_devices=bool(world.gpus[pid]) or pid in world.monitors,
            holds_uvm=bool(world.gpus[pid]),
            protection=protected.protection(one, own=frozenset(), extra=("/opt/guarded/*",)),
            container_alive=world.server[pid].container_alive if owned[pid].kind is OwnerKind.POD else None,
            family=family,
            family_gpus=holds,
            family_owner=owned[family.head] if family else None,
        )
    return verdicts.judge_all(cases, ground)


grounds = st.builds(
    Ground,
    scope=st.sampled_from(list(Scope)),
    plan=st.none() | st.just(plan(condemned=(OTHER_POD,))),
    gpus=st.none() | st.just(frozenset({GPU_0})),
)


def may_be_ended(world: World, pid: Pid, ground: Ground) -> bool:
    """What the world's maker knows: whether ending this process would harm nobody who is alive and not asked for."""
    server = world.server[pid]
    if pid in world.off_limits or pid in world.monitors or (ground.plan and server.late):
        return False
    if ground.gpus is not None and server.gpu not in ground.gpus:
        return False
    left_over = not server.alive and pid >= 1000 and pid % 20 >= 2
    if left_over or (ground.plan and server.place in NOT_LIVE_BY_PLAN):
        return True
    return ground.scope is Scope.ALL and server.place not in NEVER_BY_SCOPE_ALL


def must_be_ended(world: World, pid: Pid, ground: Ground, host_init: bool) -> bool:
    """A worker of a dead server under a parent that never makes workers is the headline leak."""
    server = world.server[pid]
    under_init = server.adopted_by_init or server.launcher_gone
    proved = host_init if under_init else server.launcher in MAKE_NO_WORKERS
    is_worker = pid >= 1000 and 2 <= pid % 20 < 9
    return proved and is_worker and not server.alive and may_be_ended(world, pid, ground)


@settings(max_examples=80, deadline=None)
@given(worlds(), grounds)
def test_nothing_alive_or_protected_is_ever_ended(made: tuple[World, bool], ground: Ground) -> None:
    """Under `orphans` only leftovers end; under `all` also what is in reach; what is off limits never does."""
    world, host_init = made
    found = judgements(world, ground, host_init)
    ended = {pid for pid, one in found.items() if one.verdict is Verdict.END}
    assert ended <= {pid for pid in world.processes if may_be_ended(world, pid, ground)}
    assert found.keys() == world.processes.keys()


@settings(max_examples=60, deadline=None)
@given(worlds(), grounds)
def test_every_orphaned_worker_is_found(made: tuple[World, bool], ground: Ground) -> None:
    """The rules are no excuse for doing nothing: a dead server's engine and workers go, its tracker is spared."""
    world, host_init = made
    found = judgements(world, ground, host_init)
    wanted = {pid for pid in world.processes if must_be_ended(world, pid, ground, host_init)}
    assert {pid for pid in wanted if found[pid].verdict is not Verdict.END} == set()
    assert {found[pid].manner for pid in wanted} <= {Manner.AT_ONCE, Manner.GRACEFULLY}
    ended_trackers = {pid for pid in world.trackers if found[pid].verdict is Verdict.END}
    assert {found[pid].manner for pid in ended_trackers} <= {Manner.SPARED}


@settings(max_examples=60, deadline=None)
@given(worlds(), grounds)
def test_every_verdict_names_its_reason_and_evidence(made: tuple[World, bool], ground: Ground) -> None:
    """A verdict without evidence is none; the unknown is never ended without the evidence of a dead front end."""
    world, host_init = made
    for pid, one in judgements(world, ground, host_init).items():
        assert one.reason
        assert one.evidence
        if one.verdict is Verdict.END and world.server[pid].place in {"unknown", "unreadable"}:
            assert "makes no workers" in one.evidence or "pipe" in one.evidence or "is gone" in one.evidence


any_owner = st.sampled_from([owners.owner_of(text) for text in PLACES.values()])
any_case = st.builds(
    Case,
    process=st.builds(process, state=st.sampled_from("SRDZTX"), threads=st.integers(1, 3)),
    owner=any_owner,
    started_at_s=st.sampled_from([NOW_S - 3600, NOW_S - 5.01, NOW_S - 5, NOW_S, NOW_S + 3600]),
    gpus=st.frozensets(st.sampled_from([GPU_0, GPU_1])),
    nvml_listed=st.booleans(),
    lists_complete=st.booleans(),
    holds_devices=st.booleans(),
    holds_uvm=st.none() | st.booleans(),
    protection=st.sampled_from([None, None, "PID 1"]),
    container_alive=st.none() | st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(any_case, grounds, st.frozensets(st.sampled_from(["service:vllm.service", "batch:job_42", "unknown:"])))
def test_no_single_fact_outweighs_protection_the_plans_time_or_ignorance(
    one: Case, ground: Ground, named: frozenset[str]
) -> None:
    """Whatever combination of facts a survey brings, also ones that make no sense together."""
    found = verdicts.judge(one, Ground(scope=ground.scope, plan=ground.plan, gpus=ground.gpus, named_owners=named))
    if found.verdict is Verdict.KEEP:
        return
    assert one.protection is None
    assert not one.process.is_zombie
    assert one.owner.kind is not OwnerKind.UNKNOWN
    assert ground.plan is None or one.started_at_s < NOW_S - 5
    assert ground.gpus is None or one.gpus & ground.gpus
    assert ground.scope is Scope.ALL or one.owner.kind is OwnerKind.POD
    assert (
        one.owner.kind in {OwnerKind.POD, OwnerKind.LOGIN, OwnerKind.HOST}
        or f"{one.owner.kind}:{one.owner.name}" in named
    )
    assert found.evidence
