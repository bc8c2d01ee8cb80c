"""One reset of a hundred simulated nodes: never too many at once, few calls to the API server, and it stops where it has to."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from cleanslate_operator import names
from cluster import conftest, operatorworld
from cluster.fakenodes import behaviours
from cluster.fakenodes.behaviours import Behaviour, Rule
from cluster.fakenodes.handle import FakeNodes
from cluster.faultproxy import FaultProxy
from cluster.kubectl import Object
from cluster.operatorworld import END_S, PODS, SPACE, SYSTEM, OperatorWorld, operator_world
from cluster.resets import row, summary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

COUNT = 100
HUNDRED, TEN = {"test.cleanslate.dev/many": "hundred"}, {"test.cleanslate.dev/few": "ten"}
AT_ONCE = 10
RESET_S = 0.2
CALLS_A_NODE, CALLS_A_RESET = 12, 60  # the limit that the operator was made for


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorWorld]:
    with operator_world(f"{conftest.PLACE.name}-many", tmp_path_factory.mktemp("many")) as one:
        yield one


@pytest.fixture(scope="module")
def many(world: OperatorWorld) -> Iterator[FakeNodes]:
    subsets = {"many-000?": TEN}
    how = {"labels": HUNDRED, "subsets": subsets, "within": world.cluster.control, "keep": True}
    with FakeNodes(world.cluster.inner_kubeconfig, count=COUNT, prefix="many", **how) as nodes:
        nodes.wait_registered(END_S)
        yield nodes


@pytest.fixture
def proxy(world: OperatorWorld) -> Iterator[FaultProxy]:
    """An operator that leads and watches, behind this proxy."""
    with world.proxy() as one, world.operator(one):
        one.wait_for_requests(2, verb="watch", deadline_s=END_S)
        yield one


def ends_clean(nodes: FakeNodes) -> list[Rule]:
    """Rules: each node's reset ends clean."""
    says = {name: behaviours.init_says(operatorworld.summary(name), after_s=RESET_S) for name in nodes.names}
    return [Rule(node=name, namespace=SPACE, behaviour=one) for name, one in says.items()]


def never_ends(pattern: str) -> Rule:
    """The rule of nodes whose reset goes on until its pod is deleted."""
    return Rule(node=pattern, namespace=SPACE, behaviour=behaviours.init_never_ends())


@dataclass(slots=True)
class Crowd:
    """How many resets were under way at once: the pods that were made, and whose reset container had not ended.

    One watch tells all of it in the order in which it came to be.
    """

    total: int
    most: int = 0
    _running: set[str] = field(default_factory=set)
    _over: set[str] = field(default_factory=set)

    def watch(self, world: OperatorWorld, name: str) -> Future[Object]:
        """Looks until that many resets are over."""
        which = {"labelSelector": f"{names.RESET_NAME}={name}"}
        return world.workers.submit(world.api.until, PODS, self._see, timeout_s=END_S, **which)

    def _see(self, pod: Object) -> bool:
        uid, inits = pod["metadata"]["uid"], pod.get("status", {}).get("initContainerStatuses", ())
        over = any("terminated" in one["state"] for one in inits)
        (self._over if over else self._running).add(uid)
        self.most = max(self.most, len(self._running - self._over))
        return len(self._over) == self.total


def calls(proxy: FaultProxy) -> list[str]:
    """What the operator has asked, but for its own Lease, which is renewed whether it works or not."""
    asked = [one for one in proxy.requests() if (one.resource, one.namespace) != ("leases", SYSTEM)]
    return [f"{one.verb} {one.resource}" for one in asked]


def counted(kinds: list[str]) -> dict[str, int]:
    """How often each."""
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@pytest.mark.parametrize(("count", "chosen"), [(10, TEN), (COUNT, HUNDRED)], ids=["10", "100"])
def test_waves_keep_to_their_size_and_calls_to_their_limit(
    world: OperatorWorld, many: FakeNodes, proxy: FaultProxy, count: int, chosen: dict[str, str]
) -> None:
    """Each node is reset once, at most three or ten at a time, by at most 12 calls a node and 60 more."""
    many.set_behaviour(Behaviour(), *ends_clean(many))
    proxy.forget_requests()
    crowd = Crowd(count)
    at_once = min(AT_ONCE, count // 3)
    seen = crowd.watch(world, "waves")
    uid = world.begin("waves", nodeSelector=chosen, rollout={"maxConcurrent": at_once})
    done = world.until("waves", operatorworld.is_let_go)
    asked = calls(proxy)
    seen.result()
    assert crowd.most == at_once
    assert summary(done) == ("Complete", "Clean", f"{count} nodes: {count} clean")
    world.assert_reset_once(uid, done, nodes=many.names[:count])
    assert len(asked) <= CALLS_A_NODE * count + CALLS_A_RESET, counted(asked)
    world.forget("waves")


def numbers(done: Object) -> dict[str, int]:
    """How many nodes there are of each kind that there are any of."""
    return {kind: number for kind, number in done["status"]["nodes"].items() if number}


def test_reset_stops_after_failures(world: OperatorWorld, many: FakeNodes, proxy: FaultProxy) -> None:
    """What is under way goes on to its end; no other node is touched, and each of them says why."""
    at_once, limit = 5, 3
    crash = Rule(node="many-000?", namespace=SPACE, behaviour=behaviours.init_says("", exit_code=1))
    many.set_behaviour(Behaviour(), crash, *ends_clean(many))
    rollout = {"maxConcurrent": at_once, "stopAfterFailures": limit}
    uid = world.begin("stops", nodeSelector=HUNDRED, rollout=rollout)
    done = world.until("stops", operatorworld.is_let_go)
    assert summary(done)[:2] == ("Failed", "StoppedAfterFailures")
    failed, skipped = numbers(done)["failed"], numbers(done)["skipped"]
    assert limit <= failed < limit + at_once
    assert failed + skipped == COUNT
    assert set(world.witness.of(uid)) == set(many.names[:failed])
    assert row(done, "many-0000")["reason"] == "Crashed"
    last = row(done, many.names[-1])
    assert (last["result"], last["reason"]) == ("Skipped", "StoppedAfterFailures")
    assert last["message"].startswith("not tried: ")
    assert last["message"].endswith(f" nodes had failed, and spec.rollout.stopAfterFailures is {limit}")
    assert world.left() == []
    world.forget("stops")


def test_reset_ends_at_its_deadline(world: OperatorWorld, many: FakeNodes, proxy: FaultProxy) -> None:
    """Nodes that are done keep their result; those under way have none; those after them were not tried."""
    many.set_behaviour(Behaviour(), never_ends("many-00[12]?"), *ends_clean(many))
    uid = world.begin("late", nodeSelector=HUNDRED, rollout={"maxConcurrent": 20}, timeoutSeconds=30)
    done = world.until("late", operatorworld.is_let_go)
    assert summary(done)[:2] == ("Failed", "DeadlineExceeded")
    assert numbers(done) == {"total": COUNT, "clean": 10, "failed": 20, "skipped": 70}
    assert set(world.witness.of(uid)) == set(many.names[:30])
    stuck, untried = row(done, "many-0010"), row(done, "many-0099")
    assert stuck["reason"] == "NoResult"
    assert "no result " in stuck["message"]
    assert "resets the node" in stuck["message"]
    message = "not tried: no time was left after 30 s (spec.timeoutSeconds)"
    assert (untried["result"], untried["reason"], untried["message"]) == ("Skipped", "DeadlineExceeded", message)
    assert world.left() == []
    world.forget("late")


LIES: dict[str, tuple[Behaviour, str, str]] = {
    "many-0000": (
        behaviours.init_says(operatorworld.summary("many-0000")[:200]),
        "BadResult",
        "it is not a JSON object",
    ),
    "many-0001": (behaviours.garbage(), "BadResult", "it is not a JSON object"),
    "many-0002": (
        behaviours.init_says(operatorworld.summary("many-0002").replace("report/v1", "report/v9")),
        "BadResult",
        "its schema is cleanslate.dev/report/v9, not cleanslate.dev/report/v1",
    ),
    "many-0003": (
        behaviours.init_says(operatorworld.summary("many-0050")),
        "BadResult",
        "it is about node many-0050, not about many-0003",
    ),
    "many-0004": (behaviours.init_says("killed by a fault", exit_code=9), "Crashed", "with code 9, killed by a fault"),
    "many-0005": (behaviours.overlong(), "BadResult", "it is not a JSON object"),
    "many-0006": (behaviours.init_says(""), "BadResult", "it left none"),
    "many-0007": (behaviours.init_says("[" * behaviours.MESSAGE_LIMIT_BYTES), "BadResult", "it is not a JSON object"),
    "many-0008": (
        behaviours.Behaviour(init=(behaviours.OUT_OF_MEMORY,)),
        "OutOfMemory",
        "memory than its limit of 512Mi",
    ),
}


def test_results_that_lie_are_of_no_harm_to_others(world: OperatorWorld, many: FakeNodes, proxy: FaultProxy) -> None:
    """Each is told for what it is, and no other node's result is touched: neither one after it nor one that it names."""
    lies = [Rule(node=name, namespace=SPACE, behaviour=one) for name, (one, _, _) in LIES.items()]
    many.set_behaviour(Behaviour(), *lies, *ends_clean(many))
    world.begin("lies", nodeSelector=HUNDRED, rollout={"maxConcurrent": AT_ONCE})
    done = world.until("lies", operatorworld.is_let_go)
    assert summary(done)[0] == "Failed"
    assert numbers(done) == {"total": COUNT, "clean": COUNT - len(LIES), "failed": len(LIES)}
    for name, (_, reason, message) in LIES.items():
        found: dict[str, Any] = row(done, name)
        assert (found["result"], found["reason"]) == ("Failed", reason), found
        assert message in found["message"], name
    assert row(done, "many-0050")["result"] == "Clean"
    assert world.left() == []
    world.forget("lies")
