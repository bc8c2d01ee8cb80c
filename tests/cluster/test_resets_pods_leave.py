"""GPUNodeResets with scope All: pods that use GPUs leave first, as their budgets allow, and the node is tainted meanwhile."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cleanslate_operator import names
from cluster.cluster import Cluster
from cluster.kubectl import Kubectl, Object
from cluster.nodes import Node
from cluster.resets import Resets, conditions, row, summary, taints_of
from cluster.tenants import Tenant, container, pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

APP = {"app": "server"}
BUDGET = "server-budget"
OPERATORS = "--selector=app.kubernetes.io/component=operator"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"


def run_server(tenant: Tenant, node: Node) -> Object:
    """A live server on one GPU, whose pod a budget may be for."""
    one = pod("server", container("server", tenant.images("server"), gpus=1), node=node.name)
    one["metadata"]["labels"] = APP
    running = tenant.run(one)
    tenant.kubectl.wait("condition=Ready", "pod/server")
    return running


def set_budget(tenant: Tenant, at_least: int) -> None:
    """A budget under which so many pods have to stay; the controller has seen it when this returns."""
    spec = {"minAvailable": at_least, "selector": {"matchLabels": APP}}
    metadata = {"name": BUDGET, "namespace": tenant.name}
    tenant.kubectl.apply({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec})
    tenant.kubectl.until("pdb", BUDGET, is_so=lambda one: _allows(one) == 1 - at_least)


def _allows(budget: Object) -> int | None:
    """How many evictions it allows; None as long as its controller has not seen it as it is."""
    status = budget.get("status", {})
    seen = status.get("observedGeneration") == budget["metadata"]["generation"]
    return int(status["disruptionsAllowed"]) if seen else None


def emptying(node: Node, pods: str) -> Object:
    """The spec of a reset that ends whatever uses the node's GPUs."""
    return {"nodeName": node.name, "scope": "All", "pods": pods}


def kill_operator(operator: Kubectl, cluster: Cluster) -> None:
    """SIGKILL for both replicas, in the middle of whatever they do; returns once both have been started again."""
    for one in operator.items("pods", OPERATORS):
        _, *processes = cluster.nodes[one["spec"]["nodeName"]].pids(one["metadata"]["uid"])
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        restarts = one["status"]["containerStatuses"][0]["restartCount"]
        operator.until("pod", one["metadata"]["name"], is_so=lambda now, before=restarts: _restarts(now) > before)


def _restarts(one: Object) -> int:
    return int(one["status"]["containerStatuses"][0]["restartCount"])


@contextmanager
def uncordoned(kubectl: Kubectl, node: Node) -> Iterator[None]:
    """The node takes pods again at the end."""
    try:
        yield
    finally:
        kubectl("uncordon", node.name)


def test_blocked_eviction_is_told_and_fails_at_the_deadline(resets: Resets, tenant: Tenant, node: Node) -> None:
    """With the budget's name both times; the pod lives, and the taint is gone."""
    running = run_server(tenant, node)
    set_budget(tenant, 1)
    resets.apply("blocked", **emptying(node, "Evict"), timeoutSeconds=30)
    message = resets.says("blocked", "Running", "Evicting")
    assert message.startswith(f"node {node.name}: cannot evict pod {tenant.name}/server: ")
    assert BUDGET in message
    assert resets.taints(node.name) == {names.TAINT}
    done = resets.ended("blocked")
    assert summary(done)[:2] == ("Failed", "EvictionBlocked")
    assert conditions(done)["Failed"] == "True"
    assert f"cannot evict pod {tenant.name}/server: " in summary(done)[2]
    assert BUDGET in summary(done)[2]
    assert summary(done)[2].endswith("after 30 s (spec.timeoutSeconds)")
    found = row(done, node.name)
    assert (found["result"], found["reason"]) == ("Failed", "EvictionBlocked")
    assert "processes" not in found
    after = tenant.kubectl.get("pod", "server")
    assert after["status"]["containerStatuses"] == running["status"]["containerStatuses"]
    assert resets.left() == []


def test_eviction_goes_on_when_the_budget_allows_it(
    resets: Resets, tenant: Tenant, node: Node, other_node: Node
) -> None:
    """The pod is evicted then, nothing is left on its GPU, and a cordon made meanwhile stays."""
    run_server(tenant, node)
    set_budget(tenant, 1)
    with uncordoned(resets.kubectl, node):
        resets.apply("patient", **emptying(node, "Evict"))
        resets.says("patient", "Running", "Evicting")
        resets.kubectl("cordon", node.name)
        set_budget(tenant, 0)
        done = resets.ended("patient")
        assert summary(done)[:2] == ("Complete", "Clean")
        assert {one["result"] for one in row(done, node.name)["gpus"]} == {"Clean"}
        assert tenant.kubectl("get", "pod", "server", "--ignore-not-found") == ""
        after = resets.kubectl.get("node", node.name)
        assert after["spec"]["unschedulable"]
        assert taints_of(after) == {UNSCHEDULABLE}
    assert resets.taints(other_node.name) == set()
    assert resets.left() == []


def test_deletion_asks_no_budget(resets: Resets, tenant: Tenant, node: Node) -> None:
    """The pod is deleted although a budget forbids its eviction; the node is tainted until the reset is over."""
    run_server(tenant, node)
    set_budget(tenant, 1)
    resets.apply("forced", **emptying(node, "Delete"))
    seen = resets.kubectl.until("node", node.name, is_so=lambda one: names.TAINT in taints_of(one))
    assert "unschedulable" not in seen["spec"]
    assert [one["effect"] for one in seen["spec"]["taints"] if one["key"] == names.TAINT] == ["NoSchedule"]
    done = resets.ended("forced")
    assert summary(done)[:2] == ("Complete", "Clean")
    assert tenant.kubectl("get", "pod", "server", "--ignore-not-found") == ""
    assert resets.taints(node.name) == set()
    assert resets.left() == []


def test_taint_goes_although_the_operator_was_killed(
    resets: Resets, tenant: Tenant, cluster: Cluster, operator: Kubectl, node: Node
) -> None:
    """Both replicas are killed while the node is tainted: the next leader goes on where they were, and takes it away.

    The cordon that was there before stays.
    """
    run_server(tenant, node)
    set_budget(tenant, 1)
    with uncordoned(resets.kubectl, node):
        resets.kubectl("cordon", node.name)
        uid = resets.apply("orphaned", **emptying(node, "Evict"))["metadata"]["uid"]
        resets.says("orphaned", "Running", "Evicting")
        kill_operator(operator, cluster)
        assert resets.taints(node.name) == {names.TAINT, UNSCHEDULABLE}
        set_budget(tenant, 0)
        done = resets.ended("orphaned")
        assert done["metadata"]["uid"] == uid
        assert summary(done)[:2] == ("Complete", "Clean")
        assert resets.taints(node.name) == {UNSCHEDULABLE}
        assert resets.left() == []


def run_daemon(tenant: Tenant, node: Node) -> Object:
    """The pod of a DaemonSet that has a GPU, on this node alone."""
    one = pod("daemon", container("main", tenant.images("pause"), gpus=1), node=node.name, restartPolicy="Always")
    template = {"metadata": {"labels": {"app": "daemon"}}, "spec": one["spec"]}
    spec = {"selector": {"matchLabels": {"app": "daemon"}}, "template": template}
    tenant.kubectl.create({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "daemon"}, "spec": spec})
    tenant.kubectl.wait("create", "pods", "--selector=app=daemon")
    tenant.kubectl.wait("condition=Ready", "pods", "--selector=app=daemon")
    return tenant.kubectl.items("pods", "--selector=app=daemon")[0]


def test_pods_without_gpus_and_those_of_daemonsets_stay(resets: Resets, tenant: Tenant, node: Node) -> None:
    """Only the server's pod is deleted: what has no GPU is in nobody's way, and a DaemonSet's would come back at once."""
    idle = tenant.run(pod("idle", container("main", tenant.images("pause")), node=node.name))
    daemon = run_daemon(tenant, node)
    run_server(tenant, node)
    done = resets.run("selective", **emptying(node, "Delete"))
    assert summary(done)[:2] == ("Complete", "Clean")
    left = tenant.kubectl.items("pods")
    assert {one["metadata"]["uid"] for one in left} == {one["metadata"]["uid"] for one in (idle, daemon)}
    assert [one["status"]["containerStatuses"][0]["restartCount"] for one in left] == [0, 0]
    tenant.kubectl.delete("daemonset", "daemon")
