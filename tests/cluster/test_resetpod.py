"""The reset pod as the operator renders it, on a real cluster: what it sees, what it has, and what its status tells."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cleanslate_operator import daemonset, names, nodeplan, results
from cleanslate_operator.noderesult import NodeResult, NodeVerdict
from cleanslate_operator.reset import Reset, ResetSpec
from cleanslate_operator.results import Progress, Stage
from cleanslate_operator.settings import Settings
from cleanslate_operator.views import Started
from cluster.kubectl import Kubectl, Object
from cluster.nodes import GPUS, Node
from cluster.tenants import Tenant, container, pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

UID = "5e1c7f3a-1b2c-4d5e-8f90-a1b2c3d4e5f6"
RESET = Reset(name="pool-a", uid=UID, generation=1, spec=ResetSpec(verify_timeout_s=30, shm_min_age_s=0))
NAME = names.daemon_set(RESET.name, RESET.uid)
DEADLINE_S = 60.0

Reading = NodeResult | Progress


def settings_of(tenant: Tenant, **known: Any) -> Settings:
    """The operator's settings for a tenant's namespace, with the images that the nodes have."""
    ordinary = {"image": tenant.images("node-program"), "image_pull_policy": "Never"}
    where = {"resets_namespace": tenant.name, "reset_service_account": "default"}
    return Settings(**{**ordinary, **where, **known})


def alone(made: Object) -> Object:
    """The object without its owner: there is no GPUNodeReset here, and what has no owner any more is collected."""
    del made["metadata"]["ownerReferences"]
    return made


def make_plans(tenant: Tenant, *nodes: str) -> dict[str, Started]:
    """Plans of nodes as the cluster is now, in their ConfigMaps."""
    now_s = time.time()
    plans = {}
    for node in nodes:
        pods = tenant.kubectl.items("pods", "--all-namespaces", f"--field-selector=spec.nodeName={node}")
        plans[node] = nodeplan.document(pods, (), snapshot_time_s=now_s, margin_s=0)  # one machine, one clock
    covered = {}
    for one in nodeplan.config_maps(RESET, plans):
        tenant.kubectl.apply(alone(one))
        covered |= {node: Started(plan=one["metadata"]["name"], planned_s=now_s) for node in nodeplan.nodes_of(one)}
    return covered


def run(tenant: Tenant, covered: dict[str, Started], reset: Reset = RESET, **known: Any) -> Object:
    """Makes the DaemonSet cover these nodes; returns it as the API has it."""
    tenant.kubectl.apply(alone(daemonset.render(reset, covered, settings_of(tenant, **known))))
    return tenant.kubectl.get("daemonset", NAME)


def pods_of(kubectl: Kubectl) -> list[Object]:
    """The reset's pods."""
    return kubectl.items("pods", f"--selector={names.RESET_UID}={UID}")


def until(tenant: Tenant, made: Object, node: str, is_so: Callable[[Reading], bool]) -> Reading:
    """What the reset's pod on a node tells, once that is so. Fails with the last word if it never is."""
    deadline, last = time.monotonic() + DEADLINE_S, None
    while time.monotonic() < deadline:
        for one in pods_of(tenant.kubectl):
            last = results.read(one, node, made["metadata"]["uid"])
            if last is not None and is_so(last):
                return last
        time.sleep(0.1)
    raise AssertionError(f"node {node}: last heard {last}")


def result_of(tenant: Tenant, made: Object, node: Node) -> NodeResult:
    """The result of a node."""
    found = until(tenant, made, node.name, lambda one: isinstance(one, NodeResult))
    assert isinstance(found, NodeResult)
    return found


def server(tenant: Tenant, node: Node) -> Object:
    """A live server on one GPU of the node, with a PID 1 that outlives its front end."""
    command = ["/opt/server/outlive", "python3", "/opt/server/vllm", "serve", "tiny-model"]
    return tenant.run(
        pod("server", container("server", tenant.images("server"), gpus=1, command=command), node=node.name)
    )


def test_the_reset_of_two_idle_nodes_is_clean(tenant: Tenant, node: Node, other_node: Node) -> None:
    """Each node's own result, under the name that Kubernetes has for it, with every GPU measured."""
    made = run(tenant, make_plans(tenant, node.name, other_node.name))
    for one in (node, other_node):
        found = result_of(tenant, made, one)
        assert (found.result, found.reason, found.node) == (NodeVerdict.CLEAN, "Clean", one.name)
        assert len(found.gpus) + found.omitted.gpus == GPUS
        assert found.finished_at is not None
        assert found.duration_s is not None
        assert not found.warnings


def test_a_live_server_is_kept_and_a_leak_is_ended(tenant: Tenant, node: Node) -> None:
    """First the node is busy with a live server, which goes on; then its front end is killed, and what stays is ended."""
    server(tenant, node)
    told = json.loads(tenant.first_line("server"))
    made = run(tenant, make_plans(tenant, node.name))
    found = result_of(tenant, made, node)
    assert found.result is NodeVerdict.BUSY, found
    assert {(process.verdict, process.outcome) for process in found.processes} == {("Keep", "Kept")}
    tenant.kubectl.delete("daemonset", NAME)
    tenant.kubectl.execute("server", "kill", "-KILL", str(told["front_end"]))
    found = result_of(tenant, run(tenant, make_plans(tenant, node.name)), node)
    assert found.result is NodeVerdict.CLEAN, found
    assert "Ended" in {process.outcome for process in found.processes}
    assert found.gpu_bytes_freed > 0
    assert tenant.kubectl.get("pod", "server")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_dry_run_says_what_it_would_do(tenant: Tenant, node: Node) -> None:
    """And leaves it."""
    server(tenant, node)
    told = json.loads(tenant.first_line("server"))
    tenant.kubectl.execute("server", "kill", "-KILL", str(told["front_end"]))
    reset = replace(RESET, spec=replace(RESET.spec, dry_run=True))
    found = result_of(tenant, run(tenant, make_plans(tenant, node.name), reset), node)
    assert (found.result, found.dry_run) == (NodeVerdict.NOT_CLEAN, True)
    assert "WouldEnd" in {process.outcome for process in found.processes}
    assert found.gpu_bytes_freed == 0


def test_the_reset_pod_has_no_credentials(tenant: Tenant, node: Node) -> None:
    """No token in any container, and no other service's address; its log is read without naming a container."""
    service = {"ports": [{"port": 80}], "selector": {"app": "none"}}
    manifest = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "neighbour"}, "spec": service}
    tenant.kubectl.create(manifest)
    made = run(tenant, make_plans(tenant, node.name))
    result_of(tenant, made, node)
    (one,) = pods_of(tenant.kubectl)
    name = one["metadata"]["name"]
    assert {volume["name"] for volume in one["spec"]["volumes"]} == {"host", "plans"}
    tenant.kubectl.wait("condition=Ready", f"pod/{name}")
    look = "import json, os; print(json.dumps([*os.environ, os.getuid(), os.path.exists('/var/run/secrets')]))"
    *variables, uid, secrets = json.loads(tenant.kubectl.execute(name, "python3", "-c", look, container="idle"))
    assert uid == 65534
    assert not secrets
    assert not [variable for variable in variables if variable.startswith("NEIGHBOUR")]
    assert "clean" in tenant.logs(name)


def test_a_reset_without_its_plan_does_not_start(tenant: Tenant, node: Node) -> None:
    """The kubelet waits for it, and the reset runs once it is there."""
    covered = make_plans(tenant, node.name)
    (plan,) = {one.plan for one in covered.values()}
    kept = tenant.kubectl.get("configmap", plan)
    tenant.kubectl.delete("configmap", plan)
    made = run(tenant, covered)
    until(tenant, made, node.name, lambda one: isinstance(one, Progress) and one.reason is Stage.STARTING)
    tenant.kubectl.first_line(
        "get", "events", "--watch", "--field-selector=reason=FailedMount", "--output=name", timeout_s=DEADLINE_S
    )
    found = until(tenant, made, node.name, lambda one: isinstance(one, Progress))
    assert isinstance(found, Progress)
    assert (found.reason, found.started) == (Stage.STARTING, False)
    again = {"name": plan, "labels": kept["metadata"]["labels"]}
    tenant.kubectl.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": again, "data": kept["data"]})
    assert result_of(tenant, made, node).result is NodeVerdict.CLEAN


def test_a_missing_image_is_told(tenant: Tenant, node: Node) -> None:
    """As progress that says why: the image may still come."""
    made = run(tenant, make_plans(tenant, node.name), image="cleanslate.example/none:1")
    found = until(tenant, made, node.name, lambda one: isinstance(one, Progress) and one.reason is Stage.IMAGE_PULL)
    assert "ErrImageNeverPull" in found.message


def test_too_little_memory_is_told(tenant: Tenant, node: Node) -> None:
    """With the limit that was too low."""
    few = {"limits": {"memory": "12Mi"}}
    made = run(tenant, make_plans(tenant, node.name), reset_resources=few)
    found = result_of(tenant, made, node)
    assert (found.result, found.reason) == (NodeVerdict.FAILED, "OutOfMemory"), found
    assert "limit of 12Mi" in found.message


def test_an_image_of_another_program_is_told(tenant: Tenant, node: Node) -> None:
    """One that has no such program cannot start it, whatever else it has."""
    made = run(tenant, make_plans(tenant, node.name), image=tenant.images("python"))
    found = result_of(tenant, made, node)
    assert (found.result, found.reason) == (NodeVerdict.FAILED, "Crashed"), found
    assert "cleanslate" in found.message


def test_nodes_come_and_go_and_a_repeated_step_changes_nothing(tenant: Tenant, node: Node, other_node: Node) -> None:
    """A wave more makes a pod more and touches no other; no node makes no pod; the same again is no new generation."""
    covered = make_plans(tenant, node.name)
    made = run(tenant, covered)
    result_of(tenant, made, node)
    (first,) = pods_of(tenant.kubectl)
    assert run(tenant, covered)["metadata"]["generation"] == made["metadata"]["generation"]
    covered |= make_plans(tenant, other_node.name)
    result_of(tenant, run(tenant, covered), other_node)
    assert first["metadata"]["uid"] in {one["metadata"]["uid"] for one in pods_of(tenant.kubectl)}
    run(tenant, {})
    tenant.kubectl.wait("delete", "pod", f"--selector={names.RESET_UID}={UID}")
    time.sleep(1)
    assert pods_of(tenant.kubectl) == []
    assert tenant.kubectl.get("daemonset", NAME)["status"]["desiredNumberScheduled"] == 0
