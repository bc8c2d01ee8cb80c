"""The rules of the verdicts, one table each, and their order: verdict, reason and manner."""

from itertools import combinations
from typing import Any

import pytest

from cleanslate import verdicts
from cleanslate.model import Judgement, Manner, OwnerKind, Pid, Verdict
from cleanslate.settings import Scope
from cleanslate.verdicts import Case, Ground
from unit.examples import (
    CONTAINER,
    GPU_0,
    GPU_1,
    MIG_0,
    NOW_S,
    OTHER_CONTAINER,
    OTHER_POD,
    POD,
    STATIC_POD,
    case,
    family,
    owner,
    plan,
    pod,
    process,
)

KEEP, END = Verdict.KEEP, Verdict.END
AT_ONCE, GRACEFULLY, SPARED = Manner.AT_ONCE, Manner.GRACEFULLY, Manner.SPARED
ORPHANS, ALL = Scope.ORPHANS, Scope.ALL
ORPHANED = "vLLM worker whose parent is bash (pid 50), which makes no workers"
ZOMBIE = process(state="Z", threads=1)
LOGIN = owner(OwnerKind.LOGIN, "uid 1000")
HOST = owner(OwnerKind.HOST, "uid 1000")
DOCKER = owner(OwnerKind.CONTAINER, CONTAINER)
SLURM = owner(OwnerKind.BATCH, "job_42")
SERVICE = owner(OwnerKind.SERVICE, "vllm.service")
UNKNOWN = owner(OwnerKind.UNKNOWN)


def judge(of: Case, scope: Scope = ORPHANS, **known: Any) -> Judgement:
    """The verdict under a scope, with a plan, GPUs or names if given."""
    return verdicts.judge(of, Ground(scope=scope, **known))


def said(found: Judgement) -> tuple[Verdict, str, Manner | None]:
    """Verdict, reason and, where it matters, manner."""
    return found.verdict, found.reason, found.manner if found.verdict is END else None


BY_OWNER = {
    "running container of a live pod": (pod(), plan(), "belongs to a live pod", (END, "scope all", GRACEFULLY)),
    "earlier container of a live pod": (
        pod(container=OTHER_CONTAINER),
        plan(),
        (END, "its container is gone", AT_ONCE),
        (END, "its container is gone", AT_ONCE),
    ),
    "a live pod's process in no container": (
        pod(container=None),
        plan(),
        "belongs to a live pod",
        (END, "scope all", GRACEFULLY),
    ),
    "pod that is gone": (
        pod(OTHER_POD),
        plan(),
        (END, "its pod is gone", AT_ONCE),
        (END, "its pod is gone", AT_ONCE),
    ),
    "static pod that is live": (
        pod(STATIC_POD),
        plan({STATIC_POD: frozenset({CONTAINER})}),
        "belongs to a live pod",
        (END, "scope all", GRACEFULLY),
    ),
    "pod that the plan condemns": (
        pod(),
        plan(condemned=(POD,)),
        (END, "its pod is condemned by the plan", GRACEFULLY),
        (END, "its pod is condemned by the plan", GRACEFULLY),
    ),
    "condemned pod that the plan does not list as live": (
        pod(OTHER_POD),
        plan(condemned=(OTHER_POD,)),
        (END, "its pod is condemned by the plan", GRACEFULLY),
        (END, "its pod is condemned by the plan", GRACEFULLY),
    ),
    "login session": (
        LOGIN,
        None,
        "belongs to a login session, and no proof that it is left over",
        (END, "scope all", GRACEFULLY),
    ),
    "plain host process": (
        HOST,
        None,
        "belongs to the host itself, and no proof that it is left over",
        (END, "scope all", GRACEFULLY),
    ),
    "another engine's container": (
        DOCKER,
        None,
        "belongs to a container of another engine",
        "belongs to a container of another engine",
    ),
    "batch job": (SLURM, None, "belongs to a batch job", "belongs to a batch job"),
    "system service": (SERVICE, None, "belongs to a system service", "belongs to a system service"),
    "unknown": (UNKNOWN, None, "its owner is unknown", "its owner is unknown"),
}


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("row", BY_OWNER.values(), ids=BY_OWNER.keys())
def test_by_owner(row: tuple[Any, ...], scope: Scope) -> None:
    """The design's table of owners."""
    belongs_to, its_plan, under_orphans, under_all = row
    expected = under_orphans if scope is ORPHANS else under_all
    found = judge(case(belongs_to=belongs_to), scope, plan=its_plan)
    assert said(found) == ((KEEP, expected, None) if isinstance(expected, str) else expected)
    assert found.evidence
    assert found.owner_known is (belongs_to is not UNKNOWN)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("belongs_to", [LOGIN, HOST, DOCKER, SLURM, SERVICE, UNKNOWN], ids=str)
def test_a_plan_speaks_of_pods_alone(belongs_to: Any, scope: Scope) -> None:
    """What belongs to no pod is judged as without one: its absence from the plan says nothing."""
    one = case(belongs_to=belongs_to)
    assert judge(one, scope, plan=plan({})) == judge(one, scope)


@pytest.mark.parametrize(
    ("container_alive", "scope", "expected", "known"),
    [
        (True, ORPHANS, (KEEP, "belongs to a live pod", None), True),
        (True, ALL, (END, "scope all", GRACEFULLY), True),
        (None, ORPHANS, (KEEP, "belongs to a pod of unknown state", None), False),
        (False, ORPHANS, (KEEP, "belongs to a pod of unknown state", None), False),
        (None, ALL, (KEEP, "belongs to a pod of unknown state", None), False),
        (False, ALL, (KEEP, "belongs to a pod of unknown state", None), False),
    ],
)
def test_by_hand_a_pod_is_as_live_as_its_container(
    container_alive: bool | None, scope: Scope, expected: tuple[Any, ...], known: bool
) -> None:
    """Without a plan the container's first process speaks; where it can't be seen the pod is unknown, and kept."""
    found = judge(case(belongs_to=pod(), container_alive=container_alive), scope)
    assert said(found) == expected
    assert found.owner_known is known


@pytest.mark.parametrize(
    ("belongs_to", "name", "ended"),
    [
        (SERVICE, "service:vllm.service", True),
        (SLURM, "batch:job_42", True),
        (DOCKER, f"container:{CONTAINER}", True),
        (DOCKER, f"container:{CONTAINER[:12]}", True),
        (DOCKER, f"container:{CONTAINER[:11]}", False),
        (DOCKER, "container:", False),
        (SERVICE, "service:vllm", False),
        (SERVICE, "batch:vllm.service", False),
        (SERVICE, "service:vllm.servic", False),
        (owner(OwnerKind.SERVICE, "vllm-number-12.service"), "service:vllm-number-", False),
        (UNKNOWN, "unknown:", False),
    ],
)
def test_scope_all_ends_a_foreign_owner_only_if_it_is_named(belongs_to: Any, name: str, ended: bool) -> None:
    """By kind and whole name; a container's ID may be cut to twelve digits. Naming alone does nothing."""
    found = judge(case(belongs_to=belongs_to), ALL, named_owners=frozenset({name}))
    expected = (END, "scope all, and its owner is named", GRACEFULLY)
    assert (said(found) == expected) is ended
    assert judge(case(belongs_to=belongs_to), ORPHANS, named_owners=frozenset({name})).verdict is KEEP


EVERY_OWNER = (pod(), pod(OTHER_POD), LOGIN, HOST, DOCKER, SLURM, SERVICE, UNKNOWN)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("belongs_to", EVERY_OWNER, ids=str)
@pytest.mark.parametrize("its_plan", [None, plan()], ids=["without a plan", "with a plan"])
def test_an_orphaned_worker_is_ended_wherever_it_is(belongs_to: Any, scope: Scope, its_plan: Any) -> None:
    """Head at once, its own kind at once, the tracker spared; each with the family's evidence."""
    server = family(100, 101, trackers=(102,), orphaned=ORPHANED)
    expected = {
        100: (END, "orphaned worker", AT_ONCE),
        101: (END, "belongs to orphaned worker 100", AT_ONCE),
        102: (END, "resource tracker of an orphaned server", SPARED),
    }
    for pid, verdict in expected.items():
        one = case(process(pid), belongs_to, family=server, family_owner=belongs_to)
        found = judge(one, scope, plan=its_plan)
        assert said(found) == verdict
        assert found.evidence == ORPHANED


@pytest.mark.parametrize(
    "family_owner",
    [None, LOGIN, pod(container=OTHER_CONTAINER), pod(OTHER_POD)],
    ids=["unknown", "a login", "another container of the pod", "another pod"],
)
def test_what_an_orphan_started_elsewhere_answers_for_itself(family_owner: Any) -> None:
    """A live pod's process below someone's orphaned worker stays the live pod's."""
    below = case(process(101), pod(), family=family(100, 101, orphaned=ORPHANED), family_owner=family_owner)
    assert said(judge(below, plan=plan())) == (KEEP, "belongs to a live pod", None)


@pytest.mark.parametrize(
    ("belongs_to", "its_plan", "scope", "expected"),
    [
        (pod(), plan(), ORPHANS, (KEEP, "belongs to a live pod", None)),
        (pod(), plan(), ALL, (END, "scope all", SPARED)),
        (pod(OTHER_POD), plan(), ORPHANS, (END, "its pod is gone", SPARED)),
        (pod(container=OTHER_CONTAINER), plan(), ORPHANS, (END, "its container is gone", SPARED)),
        (pod(), plan(condemned=(POD,)), ORPHANS, (END, "its pod is condemned by the plan", SPARED)),
        (LOGIN, None, ORPHANS, (KEEP, "belongs to a login session, and no proof that it is left over", None)),
        (LOGIN, None, ALL, (END, "scope all", SPARED)),
    ],
)
def test_a_tracker_is_spared_wherever_its_family_is_ended(
    belongs_to: Any, its_plan: Any, scope: Scope, expected: tuple[Any, ...]
) -> None:
    """It unlinks its family's shared memory, if it is not killed with it."""
    tracker = case(process(102), belongs_to, family=family(100, 101, trackers=(102,)), family_owner=belongs_to)
    assert said(judge(tracker, scope, plan=its_plan)) == expected


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("belongs_to", [HOST, pod(OTHER_POD), UNKNOWN], ids=str)
def test_what_is_protected_is_kept(belongs_to: Any, scope: Scope) -> None:
    """In either scope, whatever else is true, with the protection as evidence."""
    found = judge(case(belongs_to=belongs_to, protection="a kernel thread"), scope, plan=plan())
    assert said(found) == (KEEP, "protected", None)
    assert (found.evidence, found.owner_known) == ("a kernel thread", True)


@pytest.mark.parametrize("scope", list(Scope))
def test_a_zombie_is_dead_already(scope: Scope) -> None:
    """Named with the parent that does not collect it, never signalled."""
    found = judge(case(ZOMBIE, parent=process(50, comm="supervisor")), scope)
    assert said(found) == (KEEP, "a zombie, dead already", None)
    assert found.evidence == "state Z; not collected by its parent 50 (supervisor)"
    assert "(unknown)" in judge(case(ZOMBIE), scope).evidence


def test_a_zombie_leader_whose_threads_run_on_is_not_dead() -> None:
    """Its memory is still there."""
    assert judge(case(process(state="Z", threads=3)), ALL).verdict is END


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize(
    ("known", "is_monitor"),
    [
        ({}, True),
        ({"gpus": frozenset()}, True),
        ({"nvml_listed": True}, False),
        ({"holds_uvm": True}, False),
        ({"holds_uvm": None}, False),
        ({"holds_devices": False}, False),
        ({"family": family(100)}, False),
    ],
    ids=["silent", "of the control node alone", "listed", "with uvm", "unreadable", "no device", "of a server"],
)
def test_a_monitor_holds_devices_and_no_context(known: dict[str, Any], is_monitor: bool, scope: Scope) -> None:
    """NVML does not list it and nvidia-uvm is not open: it is kept in either scope."""
    found = judge(case(**{"nvml_listed": False, "holds_uvm": False} | known), scope)
    assert found.monitor is is_monitor
    assert not is_monitor or said(found) == (KEEP, "a monitor, which holds no GPU memory", None)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize(
    ("known", "is_monitor"),
    [
        ({}, True),
        ({"lists_complete": False}, False),
        ({"nvml_listed": True}, False),
        ({"holds_devices": False}, False),
        ({"family": family(100)}, False),
        ({"belongs_to": pod(OTHER_POD)}, False),
        ({"belongs_to": pod(container=OTHER_CONTAINER)}, False),
        ({"belongs_to": pod()}, True),
    ],
    ids=["not listed", "lists cut", "listed", "no device", "of a server", "pod gone", "container gone", "pod lives"],
)
def test_complete_lists_tell_a_monitor_that_has_uvm_open(known: dict[str, Any], is_monitor: bool, scope: Scope) -> None:
    """Newer drivers open nvidia-uvm for NVML too. What a pod that is gone left behind is a leftover all the same."""
    one = case(**{"nvml_listed": False, "lists_complete": True} | known)
    found = judge(one, scope, plan=plan())
    assert found.monitor is is_monitor
    assert not is_monitor or said(found) == (KEEP, "a monitor, which holds no GPU memory", None)


@pytest.mark.parametrize(
    ("named", "held", "family_holds", "inside"),
    [
        (None, (), (), True),
        ((GPU_0,), (GPU_0,), (), True),
        ((GPU_0,), (GPU_0, GPU_1), (), True),
        ((GPU_0,), (GPU_1,), (), False),
        ((GPU_0,), (), (), False),
        ((GPU_0,), (GPU_1,), (GPU_0, GPU_1), True),
        ((MIG_0,), (MIG_0, GPU_0), (), True),
        ((MIG_0,), (GPU_0,), (), False),
        ((), (GPU_0,), (GPU_0,), False),
    ],
)
def test_only_holders_of_the_gpus_in_scope_are_touched(
    named: tuple[str, ...] | None, held: tuple[str, ...], family_holds: tuple[str, ...], inside: bool
) -> None:
    """A server is one: whoever of it holds one of the GPUs brings the rest along. No GPU named is none touched."""
    one = case(gpus=frozenset(held), family=family(100), family_gpus=frozenset(family_holds))
    found = judge(one, ALL, gpus=None if named is None else frozenset(named))
    outside = (KEEP, "holds none of the GPUs in scope", None)
    assert said(found) == ((END, "scope all", GRACEFULLY) if inside else outside)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize(
    ("after_s", "kept"), [(0.0, True), (100.0, True), (-4.9, True), (-5.0, True), (-5.1, False)], ids=str
)
def test_what_started_after_the_plans_time_less_its_margin_is_kept(after_s: float, kept: bool, scope: Scope) -> None:
    """The plan cannot know it: in either scope it is nobody's leftover."""
    late = case(belongs_to=pod(OTHER_POD), started_at_s=NOW_S + after_s)
    found = judge(late, scope, plan=plan(margin_s=5.0))
    after_plan = (KEEP, "started after the plan was made", None)
    assert said(found) == (after_plan if kept else (END, "its pod is gone", AT_ONCE))
    assert not kept or f"{after_s:+.1f} s" in found.evidence


# In the order in which they are asked: what makes a rule fit, and what it then says.
FITS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Verdict, str, Manner | None]]] = {
    "protected": ({"protection": "PID 1"}, {}, (KEEP, "protected", None)),
    "dead": ({"of": ZOMBIE}, {}, (KEEP, "a zombie, dead already", None)),
    "monitor": (
        {"nvml_listed": False, "holds_uvm": False},
        {},
        (KEEP, "a monitor, which holds no GPU memory", None),
    ),
    "outside the GPUs": ({}, {"gpus": frozenset({GPU_1})}, (KEEP, "holds none of the GPUs in scope", None)),
    "started after the plan": (
        {"started_at_s": NOW_S},
        {"plan": plan()},
        (KEEP, "started after the plan was made", None),
    ),
    "condemned": (
        {"belongs_to": pod()},
        {"plan": plan(condemned=(POD,))},
        (END, "its pod is condemned by the plan", GRACEFULLY),
    ),
    "orphaned worker": ({"family": family(100, orphaned=ORPHANED)}, {}, (END, "orphaned worker", AT_ONCE)),
    "no context": (
        {"nvml_listed": False, "lists_complete": True},
        {},
        (KEEP, "a monitor, which holds no GPU memory", None),
    ),
    "owner": ({}, {}, (KEEP, "belongs to the host itself, and no proof that it is left over", None)),
}
NEVER_TOGETHER = {("monitor", "orphaned worker"), ("orphaned worker", "no context")}  # a monitor has no family
PAIRS = [pair for pair in combinations(FITS, 2) if pair not in NEVER_TOGETHER]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[f"{one} before {two}" for one, two in PAIRS])
def test_the_first_rule_that_fits_decides(first: str, second: str) -> None:
    """Of two rules that both fit, the one that stands first in the design speaks."""
    of_process, of_ground, expected = FITS[first]
    process_too, ground_too, _ = FITS[second]
    found = judge(case(**of_process | process_too), **of_ground | ground_too)
    assert said(found) == expected


def test_every_rule_fits_where_it_should() -> None:
    """The table above holds for each rule alone, so that the pairs test the order and nothing else."""
    alone = {rule: said(judge(case(**of_process), **ground)) for rule, (of_process, ground, _) in FITS.items()}
    assert alone == {rule: expected for rule, (_, _, expected) in FITS.items()}
    assert len(FITS) == len(verdicts.RULES)


def test_judge_all_judges_each() -> None:
    """One verdict a process."""
    cases = {Pid(1): case(process(1), protection="PID 1"), Pid(100): case(belongs_to=UNKNOWN)}
    found = verdicts.judge_all(cases, Ground(scope=ALL))
    assert {pid: one.reason for pid, one in found.items()} == {1: "protected", 100: "its owner is unknown"}
