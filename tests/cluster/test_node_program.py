"""The node program in pods: as a reset pod it sees the whole node, as an unprivileged one no more than it was given."""

import json
from typing import Any

import pytest

from cluster.kubectl import Object
from cluster.nodes import GPUS, Node
from cluster.tenants import Tenant, as_reset_pod, container, messages, pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

GIB = 1 << 30


def server(tenant: Tenant, gpus: int) -> Object:
    """The container of a server as vLLM is one, with a worker for each of its GPUs, under a PID 1 that outlives it."""
    command = ["/opt/server/outlive", "python3", "/opt/server/vllm", "serve", "tiny-model", "--gpu-bytes", str(GIB)]
    return container("server", tenant.images("server"), gpus=gpus, command=command)


def run_server(tenant: Tenant, node: Node, gpus: int) -> tuple[Object, dict[str, Any]]:
    """A server's pod on a node, and what the server told once it was up: its pids, in its own PID namespace."""
    running = tenant.run(pod("server", server(tenant, gpus), node=node.name))
    told = tenant.first_line("server")
    return running, dict(json.loads(told))


def survey(tenant: Tenant, node: Node) -> dict[str, Any]:
    """The report of a privileged hostPID pod on the node."""
    program = container("survey", tenant.images("node-program"), "inspect", "--host-root", "/host", "--output", "json")
    manifest = as_reset_pod(pod("survey", program, node=node.name))
    name = tenant.kubectl.create(manifest)["metadata"]["name"]
    tenant.kubectl.until("pod", name, is_so=lambda one: one["status"]["phase"] in {"Succeeded", "Failed"})
    return dict(json.loads(tenant.logs(name)))


def test_a_reset_pod_sees_the_other_pods_processes_memory_and_gpus(tenant: Tenant, node: Node) -> None:
    """Each process with its pod's UID and container ID, each pod's own shared memory, every GPU and who holds it."""
    running, _ = run_server(tenant, node, 2)
    uid = running["metadata"]["uid"]
    container_id = running["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    report = survey(tenant, node)
    seen = [one for one in report["processes"] if one["owner"]["name"] == uid]
    assert {one["title"] for one in seen} >= {"VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1"}
    assert {one["owner"]["container"] for one in seen} == {container_id}
    assert {one["verdict"] for one in seen} == {"Keep"}
    assert len(report["gpus"]) == GPUS
    held = [gpu for gpu in report["gpus"] if gpu["holders"]]
    assert {holder["pid"] for gpu in held for holder in gpu["holders"]} <= {one["pid"] for one in seen}
    assert [gpu["usedBytes"] for gpu in held] == [GIB, GIB]
    roots = report["sharedMemory"]["roots"]
    assert "/dev/shm" in roots
    assert any("/sandboxes/" in root for root in roots)
    assert report["sharedMemory"]["removedCount"] == 0
    assert report["sharedMemory"]["keptCount"] >= 3


def test_an_unprivileged_pod_sees_its_own_gpus_only(tenant: Tenant, node: Node) -> None:
    """As user 1000 without any capability, on a read-only root: its one GPU, none of the others' processes."""
    run_server(tenant, node, 2)
    restricted = {
        "runAsUser": 1000,
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    program = container("gate", tenant.images("node-program"), "gate", "--output", "json", gpus=1)
    tenant.run(pod("gate", program | {"securityContext": restricted}, node=node.name), phase="Succeeded")
    report = json.loads(tenant.logs("gate"))
    assert [(gpu["index"], gpu["result"]) for gpu in report["gpus"]] == [(0, "Clean")]
    assert report["processes"] == []
    assert report["sharedMemory"]["keptCount"] == 0


def test_a_leak_in_a_live_pod_is_ended_by_a_reset_pod(tenant: Tenant, node: Node) -> None:
    """The front end is SIGKILLed and its engine stays; the reset pod ends it, and says so in its termination message."""
    _, told = run_server(tenant, node, 1)
    tenant.kubectl.execute("server", "kill", "-KILL", str(told["front_end"]))
    program = container("reset", tenant.images("node-program"), "reset", "--host-root", "/host")
    program["args"] += ["--termination-message", "/dev/termination-log"]
    tenant.kubectl.create(as_reset_pod(pod("reset", program, node=node.name)))
    done = tenant.await_phase("reset", "Succeeded")
    summary = messages(done)["reset"]
    assert summary["result"] == "Clean"
    after = tenant.kubectl.get("pod", "server")["status"]
    assert after["containerStatuses"][0]["restartCount"] == 0


def test_the_survey_of_one_node_knows_nothing_of_another(tenant: Tenant, node: Node, other_node: Node) -> None:
    """This node, not that one: the server on the second node is not in the first one's report."""
    running, _ = run_server(tenant, other_node, 1)
    uid = running["metadata"]["uid"]
    here = survey(tenant, node)
    assert uid not in {one["owner"]["name"] for one in here["processes"]}
    assert all(gpu["usedBytes"] == 0 for gpu in here["gpus"])
    tenant.kubectl.delete("pod", "survey")
    there = survey(tenant, other_node)
    assert uid in {one["owner"]["name"] for one in there["processes"]}
