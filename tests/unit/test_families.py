"""Families: which processes are one server, and what proves that its front end is gone."""

import pytest

from cleanslate import families
from cleanslate.families import Family, Links
from cleanslate.model import Pid, Process
from unit.examples import SPAWN, TRACKER, by_pid, process, titled

INIT = process(1, 0, executable="/usr/lib/systemd/systemd", comm="systemd", argv=("/sbin/init",), uid=0)
SHELL = process(50, 1, executable="/usr/bin/bash", argv=("bash",), comm="bash")
FRONT_END = process(100, 50, argv=("python3", "/usr/local/bin/vllm", "serve", "model"))
NO_LINKS = Links(held={}, awaited={})


def engine(pid: int = 110, ppid: int = 100, **known: object) -> Process:
    """A vLLM engine, in its front end's process group as in life."""
    return titled("VLLM::EngineCore", pid, ppid, **{"pgid": 100, **known})


def worker(pid: int = 120, ppid: int = 110, **known: object) -> Process:
    """A worker of that engine."""
    return titled(f"VLLM::Worker_TP{pid % 10}", pid, ppid, **{"pgid": 100, **known})


def tracker(pid: int = 130, ppid: int = 100, *, pgid: int = 100) -> Process:
    """Python's resource tracker, in its front end's process group."""
    return process(pid, ppid, argv=TRACKER, pgid=pgid)


def found(*processes: Process, holders: tuple[int, ...] = (), host_init: bool = True) -> tuple[Family, ...]:
    """The families among these."""
    return families.families(by_pid(*processes), frozenset(map(Pid, holders)), host_init=host_init)


def only(*processes: Process, holders: tuple[int, ...] = (), host_init: bool = True) -> Family:
    """The one family among these."""
    (one,) = found(*processes, holders=holders, host_init=host_init)
    return one


def orphaned(child: Process, *others: Process, host_init: bool = True) -> str | None:
    """The evidence that this vLLM worker is orphaned."""
    return families.orphan_evidence(child, by_pid(child, *others), holds_gpu=False, host_init=host_init)


def test_a_live_server_is_one_family_from_its_front_end_down() -> None:
    """Front end, engine and workers belong together, and nothing says that they are left over."""
    one = only(INIT, SHELL, FRONT_END, engine(), worker(120), worker(121))
    assert (one.head, one.orphaned) == (100, None)
    assert one.members == {100, 110, 120, 121}


def test_several_engines_of_one_front_end_are_one_family() -> None:
    """Data parallel engines and a coordinator have the same front end."""
    one = only(INIT, SHELL, FRONT_END, engine(110), engine(111), worker(120, 110), worker(121, 111))
    assert (one.head, one.members) == (100, {100, 110, 111, 120, 121})


def test_a_workers_own_children_belong_to_it() -> None:
    """Whatever a worker started (compilers, helpers) goes where it goes."""
    compiler = process(140, 120, executable="/usr/bin/nvcc", argv=("nvcc", "kernel.cu"))
    assert 140 in only(INIT, SHELL, FRONT_END, engine(), worker(), compiler).members


def test_a_front_ends_other_children_do_not_belong_to_its_workers() -> None:
    """A notebook may start a server and much else."""
    other = process(140, 100, argv=("python3", "plot.py"))
    assert 140 not in only(INIT, SHELL, FRONT_END, engine(), other).members


def test_two_servers_of_one_shell_are_two_families() -> None:
    """The dead one and the live one beside it share nothing but the shell."""
    alive = (FRONT_END, engine(), worker())
    dead = (engine(210, 50, pgid=200), worker(220, 210, pgid=200))
    by_head = {one.head: one for one in found(INIT, SHELL, *alive, *dead)}
    assert set(by_head) == {100, 210}
    assert by_head[100].orphaned is None
    assert by_head[100].members == {100, 110, 120}
    assert by_head[210].orphaned
    assert by_head[210].members == {210, 220}


def test_nothing_without_a_workers_role_makes_a_family() -> None:
    """A plain process, even one with a GPU, is nobody's family."""
    assert found(INIT, SHELL, process(100, 50), holders=(100,)) == ()


def test_a_loop_among_parents_is_survived() -> None:
    """A scan is no snapshot: a reused pid can make two processes each other's parents."""
    members = [one.members for one in found(engine(110, 120), worker(120, 110))]
    assert frozenset.union(*members) == {110, 120}


@pytest.mark.parametrize(
    ("parent", "said"),
    [
        (INIT, "PID 1 of the host"),
        (SHELL, "bash (pid 50)"),
        (process(50, 1, executable="/usr/bin/tini"), "tini (pid 50)"),
        (process(50, 1, executable="/usr/bin/containerd-shim-runc-v2"), "containerd-shim-runc-v2 (pid 50)"),
        (process(50, 1, executable="/usr/lib/systemd/systemd"), "systemd (pid 50)"),
    ],
    ids=["PID 1 of the host", "a shell", "an init", "a container shim", "a user's service manager"],
)
def test_a_worker_under_what_never_makes_workers_is_orphaned(parent: Process, said: str) -> None:
    """The evidence names the parent."""
    evidence = orphaned(engine(110, parent.pid), parent)
    assert evidence == f"vLLM worker whose parent is {said}, which makes no workers"


@pytest.mark.parametrize(
    ("parent", "host_init"),
    [
        (process(1, 0, argv=("python3", "-m", "vllm.entrypoints.openai.api_server")), False),
        (process(1, 0, executable=None, argv=()), False),
    ],
    ids=["python", "unknown executable"],
)
def test_ppid_1_alone_proves_nothing(parent: Process, host_init: bool) -> None:
    """PID 1 of a container may be the front end, alive."""
    assert orphaned(engine(110, 1, pgid=1), parent, host_init=host_init) is None
    assert only(parent, engine(110, 1, pgid=1), host_init=host_init).head == 1


def test_an_init_in_a_container_is_known_by_its_executable() -> None:
    """Seen from inside, a shell that is PID 1 makes no workers either."""
    shell = process(1, 0, executable="/usr/bin/dash")
    assert orphaned(engine(110, 1, pgid=1), shell, host_init=False)


@pytest.mark.parametrize(("severed", "is_orphan"), [(None, False), (False, False), (True, True)], ids=str)
def test_under_a_subreaper_of_its_own_group_only_a_severed_pipe_proves_it(
    severed: bool | None, is_orphan: bool
) -> None:
    """A Python supervisor that adopted the engine looks like its front end, but shares no pipe with it."""
    subreaper = process(90, 50, pgid=90)
    evidence = orphaned(engine(110, 90, pgid=90, severed=severed), subreaper)
    assert (evidence is not None) is is_orphan
    assert not evidence or "waits on a pipe nobody writes to" in evidence


@pytest.mark.parametrize(
    ("pgid", "leader", "is_orphan"),
    [
        (100, None, True),
        (100, FRONT_END, False),
        (100, process(100, 50, state="Z", threads=1), True),
        (100, process(100, 50, state="X", threads=1), True),
        (110, None, False),
        (90, None, False),
        (0, None, False),
    ],
    ids=["gone", "alive", "a zombie", "dying", "the engine itself", "the parent's group", "outside the namespace"],
)
def test_under_a_subreaper_of_another_group_the_groups_leader_decides(
    pgid: int, leader: Process | None, is_orphan: bool
) -> None:
    """A process group that outlived its leader, under a parent of another group: the parent did not make it."""
    subreaper = process(90, 50, pgid=90)
    others = (subreaper,) if leader is None else (subreaper, leader)
    evidence = orphaned(engine(110, 90, pgid=pgid), *others)
    assert (evidence is not None) is is_orphan
    assert not evidence or "process group's leader 100 is gone" in evidence


def test_a_leader_whose_other_threads_run_on_is_alive() -> None:
    """A main thread may end before the rest of its process; that shows as a zombie with threads."""
    leader = process(100, 50, state="Z", threads=5)
    assert orphaned(engine(110, 90), process(90, 50, pgid=90), leader) is None


def test_an_unseen_parent_proves_nothing() -> None:
    """A parent that the scan missed is unknown, not gone."""
    assert orphaned(engine(110, 4711)) is None
    one = only(engine(110, 4711), worker(120, 110))
    assert (one.head, one.orphaned, one.members) == (110, None, {110, 120})


def test_a_ray_worker_is_lawful_under_a_raylet_only() -> None:
    """The raylet makes Ray's workers; an init or a shell does not; of anything else nothing is known."""
    raylet = process(60, 1, executable="/opt/ray/raylet", argv=("/opt/ray/raylet",), comm="raylet")
    child = titled("ray::RayWorkerWrapper", 110, 60, pgid=60)
    assert orphaned(child, raylet) is None
    assert orphaned(titled("ray::RayWorkerWrapper", 110, 50), SHELL) == (
        "Ray worker whose parent is bash (pid 50), which makes no workers"
    )
    assert orphaned(titled("ray::IDLE", 110, 90, pgid=100, severed=True), process(90, 50, pgid=90)) is None


def test_an_engine_inside_a_ray_worker_is_no_orphan() -> None:
    """vLLM under Ray: the engine's parent is a worker itself, and that one's parent the raylet."""
    raylet = process(60, 1, executable="/opt/ray/raylet", comm="raylet")
    actor = titled("ray::LLMServer", 105, 60, pgid=60)
    one = only(INIT, raylet, actor, engine(110, 105, pgid=60), worker(120, 110, pgid=60))
    assert one.orphaned is None
    assert {105, 110, 120} <= one.members


def test_multiprocessing_children_are_a_family_if_they_hold_a_gpu() -> None:
    """Spawned workers before they set a title, or of programs that never do."""
    spawned = process(110, 50, argv=SPAWN, pgid=100)
    assert only(INIT, SHELL, spawned, holders=(110,)).orphaned == (
        "Python multiprocessing worker whose parent is bash (pid 50), which makes no workers"
    )
    assert found(INIT, SHELL, spawned) == ()


def test_an_orphaned_worker_without_engine_is_a_family_of_its_own() -> None:
    """Each topmost orphan carries its own evidence."""
    heads = {one.head: one.orphaned for one in found(INIT, SHELL, worker(120, 1), worker(121, 50))}
    assert set(heads) == {120, 121}
    assert all(heads.values())


@pytest.mark.parametrize("front_end_alive", [True, False], ids=["alive", "dead"])
def test_a_tracker_that_is_a_child_belongs_to_its_family(front_end_alive: bool) -> None:
    """The front end's child while it lives; the topmost orphan's if that one started it."""
    processes = (
        by_pid(INIT, SHELL, FRONT_END, engine(), tracker(130, 100))
        if front_end_alive
        else by_pid(INIT, SHELL, engine(110, 50), tracker(130, 110))
    )
    (one,) = families.with_trackers(families.families(processes, frozenset(), host_init=True), processes, NO_LINKS)
    assert one.trackers == {130}
    assert 130 in one.members


def test_a_tracker_is_found_by_the_pipe_it_waits_on() -> None:
    """Re-parented away from its family, a tracker still waits for the end of its pipe's holders."""
    processes = by_pid(INIT, SHELL, engine(110, 50), worker(120, 110), tracker(130, 1))
    links = Links(held={Pid(120): frozenset({777})}, awaited={Pid(130): 777})
    (one,) = families.with_trackers(families.families(processes, frozenset(), host_init=True), processes, links)
    assert one.trackers == {130}
    assert one.members == {110, 120, 130}


def test_a_strangers_tracker_is_nobodys() -> None:
    """A tracker on another pipe, elsewhere in the tree, has nothing to do with this family."""
    processes = by_pid(INIT, SHELL, engine(110, 50), tracker(130, 1))
    links = Links(held={Pid(110): frozenset({777})}, awaited={Pid(130): 778})
    (one,) = families.with_trackers(families.families(processes, frozenset(), host_init=True), processes, links)
    assert (one.trackers, one.members) == (frozenset(), {110})


@pytest.mark.parametrize("tracker_parent", [1, 210], ids=["re-parented", "still the dead family's child"])
def test_a_tracker_shared_with_a_live_family_is_the_live_ones(tracker_parent: int) -> None:
    """Ending it would make the live server lose its shared memory; it is no member of the dead family either."""
    alive = (FRONT_END, engine(), worker())
    dead = (engine(210, 50, pgid=200), worker(220, 210, pgid=200))
    processes = by_pid(INIT, SHELL, *alive, *dead, tracker(130, tracker_parent))
    links = Links(held={Pid(120): frozenset({777}), Pid(220): frozenset({777})}, awaited={Pid(130): 777})
    found_families = families.families(processes, frozenset(), host_init=True)
    by_head = {one.head: one for one in families.with_trackers(found_families, processes, links)}
    assert by_head[100].trackers == {130}
    assert by_head[210].trackers == frozenset()
    assert 130 not in by_head[210].members


def test_a_dead_servers_tracker_below_the_same_init_is_not_the_live_ones() -> None:
    """Where PID 1 is itself the front end of a live server, what was re-parented to it keeps its own process group."""
    wrapper = process(1, 0, pgid=1, sid=1)
    processes = by_pid(wrapper, engine(110, 1, pgid=1), engine(210, 1, pgid=200), tracker(230, 1, pgid=200))
    found = families.families(processes, frozenset(), host_init=False)
    by_head = {one.head: one for one in families.with_trackers(found, processes, Links(held={}, awaited={}))}
    assert 230 not in by_head[1].members


def test_descendants_are_the_roots_and_all_below() -> None:
    """Across generations, roots included, strangers not."""
    processes = by_pid(INIT, SHELL, FRONT_END, engine(), worker(), process(300, 1))
    assert families.descendants([Pid(100)], processes) == {100, 110, 120}
    assert families.descendants([Pid(110), Pid(300)], processes) == {110, 120, 300}
    assert families.descendants([], processes) == frozenset()
