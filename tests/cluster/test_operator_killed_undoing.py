"""The operator is killed while pods are sent away, and while a reset that was deleted is undone."""

import itertools
from collections.abc import Iterator

import pytest

from cluster import conftest, killing, operatorworld
from cluster.fakenodes.behaviours import Behaviour
from cluster.killing import Victim
from cluster.kubectl import Object
from cluster.operatorworld import NODES, RESETS, WORK, OperatorWorld, operator_world
from cluster.tenants import GPU

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# What is written to nodes and pods with scope All beyond what test_operator_killed.py has, and what comes between.
SENDING_AWAY = (
    "patch nodes",
    "create pods/eviction",
    "create leases",
    "create daemonsets",
    "update configmaps",
    "delete leases",
)
UNDOING = (
    "delete daemonsets",
    "patch gpunoderesets/status",
    "delete leases",
    "deletecollection configmaps",
    "patch gpunoderesets",
)
SERVERS = f"/api/v1/namespaces/{WORK}/pods"
before_and_after = pytest.mark.parametrize("done", [pytest.param(False, id="before"), pytest.param(True, id="after")])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorWorld]:
    with operator_world(f"{conftest.PLACE.name}-undoing", tmp_path_factory.mktemp("undoing")) as one:
        yield one


@pytest.fixture(autouse=True)
def cleared(world: OperatorWorld) -> Iterator[None]:
    yield
    world.clear()


@pytest.fixture(scope="module")
def victim(world: OperatorWorld) -> Iterator[Victim]:
    with killing.victim(world) as one:
        yield one


@pytest.fixture
def endless(world: OperatorWorld) -> Iterator[None]:
    """Resets that go on until their pods are deleted."""
    world.fakes.set_behaviour(Behaviour(), operatorworld.resets_never_end())
    yield
    world.fakes.set_behaviour(Behaviour(), *operatorworld.resets_take(0.2))


def server(node: str) -> Object:
    """A pod that uses GPUs on this node."""
    main = {"name": "server", "image": "localhost/server:1", "resources": {"limits": {GPU: "1"}}}
    return {"metadata": {"name": f"server-{node}"}, "spec": {"nodeName": node, "containers": [main]}}


def is_running_two(one: Object) -> bool:
    """Whether the first wave's resets run, and the status tells it."""
    return bool(one.get("status", {}).get("nodes", {}).get("running") == 2)


@pytest.mark.parametrize("kind", SENDING_AWAY)
def test_operator_killed_while_pods_are_sent_away_goes_on(world: OperatorWorld, victim: Victim, kind: str) -> None:
    """After every write of the kind: the pods are gone, the taints too, and each node is reset once."""
    for number in itertools.count(1):
        for node in NODES:
            world.api.ask("POST", SERVERS, server(node))
        name, uids = f"killed-{number}", []
        ended = world.ended(name)
        spec = {"scope": "All", "pods": "Evict"}
        killed = victim.killed(
            kind,
            number,
            ended,
            lambda name=name, uids=uids, spec=spec: uids.append(world.begin(name, **spec)),
            done=True,
        )
        world.assert_reset_once(uids[0], ended.result(), f"killed at {kind} number {number}")
        assert world.api.ask("GET", SERVERS)["items"] == []
        world.forget(name)
        if not killed:
            break
    assert number > 1, f"no reset came to {kind}"


@before_and_after
@pytest.mark.parametrize("kind", UNDOING)
def test_operator_killed_while_a_deleted_reset_is_undone_lets_it_go(
    world: OperatorWorld, victim: Victim, endless: None, kind: str, done: bool
) -> None:
    """Deleted while its first wave runs: the reset goes, and with it all that was made; no pod is made again."""
    for number in itertools.count(1):
        name = f"deleted-{number}"
        uid = world.begin(name)
        running = world.until(name, is_running_two)
        gone = world.gone(running)
        killed = victim.killed(
            kind, number, gone, lambda name=name: world.api.ask("DELETE", f"{RESETS}/{name}"), done=done
        )
        assert gone.result()["metadata"]["uid"] == uid
        where = f"killed at {kind} number {number}"
        assert world.left() == [], where
        assert world.witness.of(uid) == {"sim-0000": 1, "sim-0001": 1}, where
        if not killed:
            break
    assert number > 1, f"no reset came to {kind}"
