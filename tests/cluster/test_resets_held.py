"""Resets that do not run through at once: suspended, waiting for a lock, deleted half-way. And the operator's own pods."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cleanslate_operator import names
from cluster import faults
from cluster import resets as resets_module
from cluster.cluster import Cluster
from cluster.kubectl import Kubectl, Object
from cluster.nodes import Node
from cluster.resets import Resets, conditions, summary
from cluster.tenants import Tenant, container, pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

DIRTY_BYTES = 8 << 30
OPERATORS = "--selector=app.kubernetes.io/component=operator"


@contextmanager
def never_clean(node: Node) -> Iterator[None]:
    """A GPU of the node has memory in use that no process holds, so that a reset waits for it to become clean."""
    with faults.gpu(node, 7, residual_bytes=DIRTY_BYTES):
        yield


def patient(node: Node) -> Object:
    """The spec of a reset that waits long for clean GPUs."""
    return {"nodeName": node.name, "verify": {"timeoutSeconds": 600}}


def made_for(kubectl: Kubectl, uid: str) -> set[str]:
    """The kinds of what is there for a reset."""
    found = kubectl.within(resets_module.SPACE)(
        "get", "daemonsets,configmaps,leases,pods", f"--selector={names.RESET_UID}={uid}", "-o", "name"
    )
    return {line.partition("/")[0].partition(".")[0] for line in found.split()}


def test_suspended_reset_touches_nothing_until_it_is_let_go(resets: Resets, node: Node) -> None:
    """It says that it is held, and nothing is there for it; when suspend is cleared it runs."""
    uid = resets.apply("held", nodeName=node.name, suspend=True)["metadata"]["uid"]
    message = resets.says("held", "Suspended", "Suspended")
    assert message == "held by spec.suspend, and nothing was touched; set it to false to let it go"
    held = resets.kubectl.get("gnr", "held")
    assert conditions(held)["Suspended"] == "True"
    assert "finalizers" not in held["metadata"]
    assert made_for(resets.kubectl, uid) == set()
    resets.kubectl("patch", "gnr", "held", "--type=merge", "--patch", '{"spec":{"suspend":false}}')
    done = resets.ended("held")
    assert summary(done)[:2] == ("Complete", "Clean")
    assert conditions(done)["Suspended"] == "False"
    assert done["status"]["observedGeneration"] == 2
    resets.kubectl("patch", "gnr", "held", "--type=merge", "--patch", '{"spec":{"suspend":true}}')
    resets.kubectl.wait("condition=Complete", "gnr/held")  # which takes no condition of an older generation


def test_second_reset_of_a_node_waits_for_the_first(resets: Resets, node: Node) -> None:
    """It names the first one, touches nothing, and starts by itself when that one ends."""
    with never_clean(node):
        resets.apply("first", **patient(node))
        resets.covers("first")
        uid = resets.apply("second", nodeName=node.name)["metadata"]["uid"]
        message = resets.says("second", "Waiting", "WaitingForLock")
        assert message.startswith(f"node {node.name} is held by GPUNodeReset first since 20")
        assert message.endswith("; starts by itself when that one ends")
        assert made_for(resets.kubectl, uid) == {"configmap"}  # its record
        assert summary(resets.kubectl.get("gnr", "first"))[0] == "Running"
    first, second = resets.ended("first"), resets.ended("second")
    assert summary(first)[:2] == summary(second)[:2] == ("Complete", "Clean")
    ends = [resets_module.row(one, node.name)["finishedAt"] for one in (first, second)]
    assert ends == sorted(ends)
    assert resets.left() == []


def test_deleted_while_it_runs_it_leaves_nothing(resets: Resets, tenant: Tenant, node: Node) -> None:
    """Its pod is stopped, and DaemonSet, ConfigMaps, Lease and finalizer go before it does. Live work goes on."""
    running = tenant.run(pod("server", container("server", tenant.images("server"), gpus=1), node=node.name))
    told = tenant.first_line("server")
    with never_clean(node):
        uid = resets.apply("doomed", **patient(node))["metadata"]["uid"]
        covering = resets.covers("doomed")
        assert made_for(resets.kubectl, uid) == {"daemonset", "configmap", "lease", "pod"}
        resets.delete("doomed")
        assert resets.left() == []
        assert node.pids(covering["metadata"]["uid"]) == []
    after = tenant.kubectl.get("pod", "server")
    assert after["status"]["containerStatuses"] == running["status"]["containerStatuses"]
    assert tenant.logs("server").splitlines() == [told]


def test_deleted_in_the_foreground_it_takes_its_taint_away(resets: Resets, node: Node) -> None:
    """With scope All the node is tainted while the reset runs; the garbage collector's order does not keep that."""
    with never_clean(node):
        resets.apply("doomed", scope="All", **patient(node))
        resets.covers("doomed")
        assert resets.taints(node.name) == {names.TAINT}
        resets.delete("doomed", "--cascade=foreground")
        assert resets.left() == []
        assert resets.taints(node.name) == set()
    assert summary(resets.run("next", nodeName=node.name))[:2] == ("Complete", "Clean")


def replicas(operator: Kubectl) -> list[Object]:
    """The operator's pods."""
    return operator.items("pods", OPERATORS)


def asked(operator: Kubectl, replica: Object, path: str) -> str:
    """What a replica answers, through the API server's proxy. Raises KubectlError for any status but 200."""
    name, ports = replica["metadata"]["name"], replica["spec"]["containers"][0]["ports"]
    pods = f"/api/v1/namespaces/{resets_module.SYSTEM}/pods"
    return operator("get", "--raw", f"{pods}/{name}:{ports[0]['containerPort']}/proxy{path}")


def test_one_replica_leads_and_both_are_well(operator: Kubectl, cluster: Cluster) -> None:
    """Alive and ready, each on a node of its own, under the restricted level and not as root."""
    pods = replicas(operator)
    assert sorted(asked(operator, one, "/readyz") for one in pods) == ["leader\n", "standby\n"]
    assert {asked(operator, one, "/livez") for one in pods} == {"ok\n"}
    space = operator.get("namespace", resets_module.SYSTEM)["metadata"]["labels"]
    assert space["pod-security.kubernetes.io/enforce"] == "restricted"
    for one in pods:
        node = cluster.nodes[one["spec"]["nodeName"]]
        _, *processes = node.pids(one["metadata"]["uid"])
        assert processes
        assert 0 not in {Path(f"/proc/{pid}").stat().st_uid for pid in processes}


def test_log_is_json_and_tells_of_a_reset(operator: Kubectl, resets: Resets, node: Node) -> None:
    """Each line an object with time, level and message, and how a reset ended among them."""
    resets.run("logged", nodeName=node.name)
    lines = [line for one in replicas(operator) for line in operator("logs", one["metadata"]["name"]).splitlines()]
    told = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= one.keys() for one in told)
    assert [one for one in told if "logged" in json.dumps(one)]
    assert [one for one in told if one["level"] in {"error", "critical"}] == []


def test_a_status_that_a_human_edits_decides_nothing(resets: Resets, node: Node) -> None:
    """While the reset runs it is written anew; afterwards it is left as it is, and nothing runs a second time."""
    said = {"phase": "Complete", "reason": "Clean", "message": "trust me", "nodes": {"total": 7}, "results": []}
    with never_clean(node):
        uid = resets.apply("edited", **patient(node))["metadata"]["uid"]
        resets.says("edited", "Running", "Running")
        edit_status(resets.kubectl, "edited", said)
        resets.kubectl.until("gnr", "edited", lambda one: one["status"]["message"] == "0 of 1 node done")
        assert resets.kubectl.get("gnr", "edited")["status"]["nodes"]["total"] == 1
    assert summary(resets.ended("edited"))[:2] == ("Complete", "Clean")
    edit_status(resets.kubectl, "edited", said | {"phase": "Pending"})
    assert summary(resets.run("next", nodeName=node.name))[:2] == ("Complete", "Clean")
    assert resets.kubectl.get("gnr", "edited")["status"]["phase"] == "Pending"
    assert "daemonset" not in made_for(resets.kubectl, uid)


def edit_status(kubectl: Kubectl, name: str, status: Object) -> None:
    """Writes parts of a status as a human with the right to it can."""
    kubectl("patch", "gnr", name, "--subresource=status", "--type=merge", "--patch", json.dumps({"status": status}))
