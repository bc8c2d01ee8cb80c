"""Nodes that are lost in the middle of their reset: they fall silent, or are taken out of the cluster. The others are done."""

from collections.abc import Iterator

import pytest

from cluster import conftest, operatorworld
from cluster.fakenodes.behaviours import Behaviour
from cluster.faultproxy import FaultProxy
from cluster.kubectl import Object
from cluster.operatorworld import END_S, NODES, OperatorWorld, operator_world
from cluster.resets import row, summary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SOUND, SILENT, GONE = NODES
LOST_S = (
    200.0  # 20 s until the cluster calls it silent, 60 s until the operator does; what it finds out then takes its time
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorWorld]:
    with operator_world(f"{conftest.PLACE.name}-lost", tmp_path_factory.mktemp("lost")) as one:
        yield one


@pytest.fixture
def proxy(world: OperatorWorld) -> Iterator[FaultProxy]:
    """An operator behind this proxy."""
    with world.proxy() as one, world.operator(one):
        yield one


def tells(one: Object, node: str) -> bool:
    """Whether there is a result of that node."""
    return node in {found["node"] for found in one.get("status", {}).get("results", ())}


def test_nodes_lost_in_mid_reset_are_told_and_the_other_is_done(world: OperatorWorld, proxy: FaultProxy) -> None:
    """One is deleted: NodeGone. One is silent: NodeUnreachable, and what it says when it comes back changes nothing."""
    world.fakes.set_behaviour(Behaviour(), *only(SOUND), operatorworld.resets_never_end())
    uid = world.begin("lost", rollout={"maxConcurrent": 3})
    world.until("lost", lambda one: tells(one, SOUND))
    world.fakes.silence(SILENT)
    world.fakes.remove(GONE)
    world.until("lost", lambda one: tells(one, GONE) and tells(one, SILENT), timeout_s=LOST_S)
    world.fakes.set_behaviour(Behaviour(), *operatorworld.resets_take(0.2))
    world.fakes.wake(SILENT)
    done = world.until("lost", operatorworld.is_let_go)
    assert summary(done)[0] == "Failed"
    assert {one["node"]: one["reason"] for one in done["status"]["results"]} == {
        SOUND: "Clean",
        SILENT: "NodeUnreachable",
        GONE: "NodeGone",
    }
    assert row(done, GONE)["message"] == "the node is no longer in the cluster"
    assert row(done, SILENT)["message"].startswith("its kubelet has been silent since 20")
    assert world.witness.of(uid) == dict.fromkeys(NODES, 1)
    assert world.left() == []
    world.forget("lost")
    world.fakes.register(GONE)
    world.fakes.wait_registered(END_S)


def only(node: str) -> list[operatorworld.Rule]:
    """The rule that ends the resets of one node."""
    return [rule for rule in operatorworld.resets_take(0.2) if rule.node == node]
