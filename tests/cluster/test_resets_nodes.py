"""GPUNodeResets of nodes that are not as they should be, or that do not exist: each says what is wrong with which."""

import pytest

from cluster import faults
from cluster.cluster import SILENCE_S
from cluster.nodes import DRIVER_DIRECTORY, GPUS, Node
from cluster.resets import Resets, conditions, row, summary
from cluster.tenants import Tenant

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ALL_GPUS = rf"jsonpath={{.status.allocatable.nvidia\.com/gpu}}={GPUS}"


def test_cordoned_node_is_reset_and_stays_cordoned(resets: Resets, node: Node) -> None:
    """A cordon keeps new pods away, and no reset."""
    resets.kubectl("cordon", node.name)
    try:
        done = resets.run("cordoned", nodeName=node.name)
        assert summary(done)[:2] == ("Complete", "Clean")
        assert resets.kubectl.get("node", node.name)["spec"]["unschedulable"]
    finally:
        resets.kubectl("uncordon", node.name)


def test_nodes_are_found_by_their_label(resets: Resets, tenant: Tenant, node: Node, other_node: Node) -> None:
    """Both at once, one by one, and each has its row."""
    selector = tenant.label(node.name)
    tenant.label(other_node.name)
    done = resets.run("pool", nodeSelector=selector, rollout={"maxConcurrent": 1})
    assert summary(done) == ("Complete", "Clean", "2 nodes: 2 clean")
    first, second = row(done, node.name), row(done, other_node.name)
    assert len({gpu["uuid"] for one in (first, second) for gpu in one["gpus"]}) == 2 * GPUS
    assert done["status"]["nodes"]["total"] == done["status"]["nodes"]["clean"] == 2


def test_node_without_gpus_cannot_be_told_clean(resets: Resets, node: Node) -> None:
    """No driver is no clean node: Failed, with what to look at."""
    with faults.moved(node.space.path(DRIVER_DIRECTORY), node.space.path("/usr/local/nvidia/aside")):
        done = resets.run("without", nodeName=node.name, verify={"timeoutSeconds": 10})
    resets.kubectl.wait(ALL_GPUS, f"node/{node.name}")
    assert summary(done)[:2] == ("Failed", "CannotTell")
    assert (row(done, node.name)["result"], row(done, node.name)["reason"]) == ("Failed", "CannotTell")
    assert "libnvidia-ml" in summary(done)[2]
    assert done["status"]["nodes"]["failed"] == 1


def test_gpu_that_stays_dirty_is_named(resets: Resets, node: Node) -> None:
    """Memory that no process holds: Failed, NotClean, with the GPU and how much it is."""
    with faults.gpu(node, 3, residual_bytes=2 << 30):
        done = resets.run("dirty", nodeName=node.name, verify={"timeoutSeconds": 10})
    assert summary(done)[:2] == ("Failed", "NotClean")
    found = row(done, node.name)
    (dirty,) = [gpu for gpu in found["gpus"] if gpu["result"] != "Clean"]
    assert (dirty["result"], dirty["index"], dirty["uuid"]) == ("Residual", 3, node.driver.gpus[3].uuid)
    assert dirty["usedBytes"] == 2 << 30
    assert done["status"]["nodes"]["notClean"] == 1


def test_unknown_node_is_told(resets: Resets) -> None:
    """It did not begin, and says how to see what nodes there are."""
    done = resets.run("nowhere", nodeName="node-17")
    assert summary(done) == ("Failed", "NodeNotFound", "there is no node node-17; see kubectl get nodes")
    assert conditions(done)["Accepted"] == "False"
    assert done["status"]["nodes"]["total"] == 0


def test_unknown_label_is_told(resets: Resets) -> None:
    """With the label."""
    done = resets.run("nothing", nodeSelector={"pool": "none-such"})
    message = "no node has the labels pool=none-such; see kubectl get nodes -l pool=none-such"
    assert summary(done) == ("Failed", "NoNodes", message)
    assert resets.left() == []


def test_silent_node_is_unreachable_and_another_is_reset(resets: Resets, tenant: Tenant, other_node: Node) -> None:
    """Its kubelet is silent: nothing is started there. The other node of the same reset is done, and the result says both."""
    nodes = resets.nodes()
    for name in nodes:
        selector = tenant.label(name)
    with faults.kubelet_stopped(other_node):
        resets.kubectl.wait("condition=Ready=unknown", f"node/{other_node.name}", timeout_s=SILENCE_S + 60)
        done = resets.run("half", nodeSelector=selector)
        assert resets.left() == []
    resets.kubectl.wait("condition=Ready", f"node/{other_node.name}")
    assert summary(done)[:2] == ("Failed", "NodeUnreachable")
    found = row(done, other_node.name)
    assert (found["result"], found["reason"]) == ("Failed", "NodeUnreachable")
    assert found["message"].startswith("its kubelet has been silent since 20")
    (other,) = [name for name in nodes if name != other_node.name]
    assert row(done, other)["result"] == "Clean"
    assert [one["node"] for one in done["status"]["results"]] == [other_node.name, other]
