"""Simulated nodes on a real API server, with the real scheduler: what they do is seen where an operator would see it."""

import datetime as dt
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import tenants
from cluster.fakenodes import behaviours
from cluster.fakenodes.behaviours import OUT_OF_MEMORY, Behaviour, Rule, Run, Start
from cluster.fakenodes.handle import FakeNodes, FakeNodesError
from cluster.fakenodes.nodes import FLEET_LABEL
from cluster.kubectl import Kubectl, KubectlError
from cluster.tenants import Tenant

pytestmark = pytest.mark.cluster

NODES = 3
SOON_S = 30.0


@pytest.fixture
def prefix(tenant: Tenant) -> str:
    """Of this test's nodes alone."""
    return f"sim-{tenant.name[-6:]}"


@pytest.fixture
def fakes(tenant: Tenant, prefix: str) -> Iterator[FakeNodes]:
    """Three simulated nodes, registered."""
    with FakeNodes(tenant.kubectl.kubeconfig, count=NODES, prefix=prefix) as nodes:
        nodes.wait_registered(SOON_S)
        yield nodes


def reset_pod(name: str, node: str, **fields: Any) -> dict[str, Any]:
    """A pod with an init container, for one node."""
    init, main = ({"name": one, "image": f"localhost/{one}:1"} for one in ("reset", "idle"))
    return tenants.pod(name, main, init=[init], node=node, **fields)


def init_of(pod: dict[str, Any]) -> dict[str, Any]:
    """The status of its init container."""
    return pod["status"]["initContainerStatuses"][0]


def waiting_reason(status: dict[str, Any]) -> str:
    """Why a container waits; empty if it does not."""
    return status["state"].get("waiting", {}).get("reason", "")


def ready(object_: dict[str, Any]) -> str:
    """Status of the condition Ready, of a node or a pod."""
    return next((one["status"] for one in object_["status"]["conditions"] if one["type"] == "Ready"), "")


def fleet(kubectl: Kubectl, prefix: str) -> list[str]:
    """The nodes and leases that are left of a fleet."""
    selector = f"--selector={FLEET_LABEL}={prefix}"
    found = kubectl.items("nodes", selector) + kubectl.items("leases", "--namespace=kube-node-lease", selector)
    return [f"{one['kind']} {one['metadata']['name']}" for one in found]


def test_nodes_look_real(tenant: Tenant, fakes: FakeNodes) -> None:
    """Eight GPUs to ask for, labels and addresses; each has a lease that the node owns."""
    nodes = tenant.kubectl.items("nodes", f"--selector={FLEET_LABEL}={fakes.prefix}")
    assert [one["metadata"]["name"] for one in nodes] == list(fakes.names)
    for node in nodes:
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
        assert node["metadata"]["labels"]["kubernetes.io/hostname"] == node["metadata"]["name"]
        lease = tenant.kubectl.get("lease", node["metadata"]["name"], "--namespace=kube-node-lease")
        assert lease["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]


@pytest.mark.parametrize(
    ("behaviour", "phase"),
    [
        (behaviours.init_says('{"verdict":"Clean"}', after_s=0.5), "Running"),
        (behaviours.init_says('{"verdict":"Dirty"}', exit_code=1), "Failed"),
        (behaviours.garbage(exit_code=1), "Failed"),
        (behaviours.overlong(), "Running"),
        (behaviours.init_says(""), "Running"),
        (Behaviour(main=(Run(message="done", after_s=0.2),)), "Succeeded"),
        (Behaviour(main=(Run(exit_code=9),)), "Failed"),
    ],
    ids=["clean", "dirty", "garbage", "overlong", "empty", "completes", "crashes"],
)
def test_pod_comes_to_the_chosen_end(tenant: Tenant, fakes: FakeNodes, behaviour: Behaviour, phase: str) -> None:
    """The init container's code and message are in the API, byte for byte."""
    fakes.set_behaviour(behaviour)
    pod = tenant.run(reset_pod("p", fakes.names[1]), phase=phase, timeout_s=SOON_S)
    ended = init_of(pod)["state"]["terminated"]
    assert ended["exitCode"] == behaviour.init[0].exit_code
    assert ended.get("message", "") == behaviour.init[0].message
    assert pod["spec"]["nodeName"] == fakes.names[1]
    assert ready(pod) == str(phase == "Running")


def test_init_container_that_hangs_can_be_let_go(tenant: Tenant, fakes: FakeNodes) -> None:
    """Pending until the test says otherwise; then the same pod goes on."""
    fakes.set_behaviour(behaviours.init_never_ends())
    tenant.kubectl.create(reset_pod("p", fakes.names[0]))
    hanging = tenant.kubectl.until(
        "pod", "p", is_so=lambda one: "initContainerStatuses" in one["status"], timeout_s=SOON_S
    )
    assert hanging["status"]["phase"] == "Pending"
    assert "running" in init_of(hanging)["state"]
    fakes.set_behaviour(behaviours.init_says("late"))
    pod = tenant.await_phase("p", "Running", timeout_s=SOON_S)
    assert init_of(pod)["state"]["terminated"]["message"] == "late"
    assert pod["metadata"]["uid"] == hanging["metadata"]["uid"]


def test_missing_image_backs_off(tenant: Tenant, fakes: FakeNodes) -> None:
    """ErrImagePull and then ImagePullBackOff, as from a registry that has it not."""
    fakes.set_behaviour(Behaviour(start=Start.IMAGE_MISSING))
    tenant.kubectl.create(reset_pod("p", fakes.names[0]))
    seen = []
    for pod in tenant.kubectl.watch("pod", "p", timeout_s=SOON_S):
        seen += [waiting_reason(one) for one in pod["status"].get("initContainerStatuses", ())]
        if seen and seen[-1] == "ImagePullBackOff":
            break
    assert list(dict.fromkeys(seen)) == ["ErrImagePull", "ImagePullBackOff"]


def test_crashing_container_is_restarted_and_counted(tenant: Tenant, fakes: FakeNodes) -> None:
    """OOMKilled with 137, then CrashLoopBackOff with the count."""
    fakes.set_behaviour(Behaviour(main=(OUT_OF_MEMORY,), backoff_s=0.5))
    tenant.kubectl.create(reset_pod("p", fakes.names[0], restartPolicy="Always"))
    pod = tenant.kubectl.until("pod", "p", is_so=lambda one: _restarts(one) >= 2, timeout_s=SOON_S)
    ended = pod["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def _restarts(pod: dict[str, Any]) -> int:
    return sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ()))


def test_rules_tell_pods_apart(tenant: Tenant, fakes: FakeNodes) -> None:
    """One node's pods fail, the others' do not."""
    rule = Rule(node=fakes.names[2], behaviour=behaviours.init_says("no", exit_code=1))
    fakes.set_behaviour(behaviours.init_says("yes"), rule)
    phases = ["Running", "Running", "Failed"]
    for number, phase in enumerate(phases):
        tenant.run(reset_pod(f"p{number}", fakes.names[number]), phase=phase, timeout_s=SOON_S)
    assert [one["status"]["phase"] for one in tenant.kubectl.items("pods")] == phases


def test_slow_deletion_takes_its_time(tenant: Tenant, fakes: FakeNodes) -> None:
    """The pod is there with a deletion timestamp for as long as its containers need, and then is gone."""
    fakes.set_behaviour(Behaviour(deletion_s=2.0))
    tenant.run(reset_pod("p", fakes.names[0]), timeout_s=SOON_S)
    begun_s = time.monotonic()
    tenant.kubectl("delete", "pod", "p", "--wait=false")
    assert "deletionTimestamp" in tenant.kubectl.get("pod", "p")["metadata"]
    tenant.kubectl.wait("delete", "pod/p", timeout_s=SOON_S)
    assert 2.0 <= time.monotonic() - begun_s < 10.0


def test_silent_node_says_nothing_until_it_wakes(tenant: Tenant, fakes: FakeNodes) -> None:
    """Its new pod is left as the scheduler bound it, another node's is not; awake, it catches up."""
    silent, other = fakes.names[0], fakes.names[1]
    assert fakes.silence(silent) == 1
    tenant.kubectl.create(reset_pod("unheard", silent))
    tenant.run(reset_pod("heard", other), timeout_s=SOON_S)
    unheard = tenant.kubectl.until("pod", "unheard", is_so=lambda one: "nodeName" in one["spec"], timeout_s=SOON_S)
    assert "startTime" not in unheard["status"]
    assert fakes.figures["silent"] == 1
    assert fakes.wake(silent) == 1
    tenant.await_phase("unheard", "Running", timeout_s=SOON_S)


def test_silent_node_becomes_unknown_and_comes_back(tenant: Tenant, fakes: FakeNodes) -> None:
    """The controller-manager notices by itself, as it would with a machine that lost its power."""
    tenant.run(reset_pod("p", fakes.names[0]), timeout_s=SOON_S)
    fakes.silence(fakes.names[0])
    tenant.kubectl.until("node", fakes.names[0], is_so=lambda one: ready(one) == "Unknown", timeout_s=90)
    tenant.kubectl.until("pod", "p", is_so=lambda one: ready(one) == "False", timeout_s=SOON_S)
    fakes.wake("*-0000")
    node = tenant.kubectl.until(
        "node", fakes.names[0], is_so=lambda one: not one["spec"].get("taints"), timeout_s=SOON_S
    )
    assert ready(node) == "True"
    tenant.kubectl.until("pod", "p", is_so=lambda one: ready(one) == "True", timeout_s=SOON_S)


def test_node_that_is_not_ready_is_tainted_and_still_answers(tenant: Tenant, fakes: FakeNodes) -> None:
    """Ready is False with the message; afterwards all is as before."""
    fakes.set_not_ready(fakes.names[1], message="runtime is down")
    node = tenant.kubectl.until("node", fakes.names[1], is_so=lambda one: one["spec"].get("taints"), timeout_s=SOON_S)
    [condition] = [one for one in node["status"]["conditions"] if one["type"] == "Ready"]
    assert (condition["status"], condition["message"]) == ("False", "runtime is down")
    fakes.set_ready(fakes.names[1])
    tenant.kubectl.until("node", fakes.names[1], is_so=lambda one: not one["spec"].get("taints"), timeout_s=SOON_S)
    tenant.run(reset_pod("p", fakes.names[1]), timeout_s=SOON_S)


def test_skewed_clock_is_in_all_that_the_node_writes(tenant: Tenant, fakes: FakeNodes) -> None:
    """An hour ahead."""
    fakes.skew(fakes.names[0], seconds=3600)
    pod = tenant.run(reset_pod("p", fakes.names[0]), timeout_s=SOON_S)
    started = dt.datetime.fromisoformat(init_of(pod)["state"]["terminated"]["startedAt"])
    assert 3500 < (started - dt.datetime.now(dt.UTC)).total_seconds() < 3700


def test_node_that_is_given_back_can_come_again(tenant: Tenant, fakes: FakeNodes) -> None:
    """Node and lease go; registered again, it is another Node of that name."""
    name = fakes.names[0]
    before = tenant.kubectl.get("node", name)["metadata"]["uid"]
    fakes.remove(name)
    tenant.kubectl.wait("delete", f"node/{name}", timeout_s=SOON_S)
    assert fakes.register(name) == 1
    fakes.wait_registered(SOON_S)
    assert tenant.kubectl.get("node", name)["metadata"]["uid"] != before
    tenant.run(reset_pod("p", name), timeout_s=SOON_S)


def test_odd_commands_are_refused_and_nothing_stops(tenant: Tenant, fakes: FakeNodes) -> None:
    """The answer names what was wrong; the nodes go on."""
    with pytest.raises(FakeNodesError, match="cannot find"):
        fakes.silence("nobody")
    tenant.run(reset_pod("p", fakes.names[0]), timeout_s=SOON_S)


def test_nothing_is_left_at_the_end(tenant: Tenant, prefix: str) -> None:
    """Nodes, leases and the pods on them are removed, also one that never ends."""
    with FakeNodes(
        tenant.kubectl.kubeconfig, count=NODES, prefix=prefix, behaviour=Behaviour(deletion_s=None)
    ) as nodes:
        nodes.wait_registered(SOON_S)
        tenant.run(reset_pod("p", nodes.names[0]), timeout_s=SOON_S)
    assert fleet(tenant.kubectl, prefix) == []
    with pytest.raises(KubectlError, match="NotFound"):
        tenant.kubectl.get("pod", "p")


ENDLESS = """
import pathlib, sys, time
from cluster.fakenodes.handle import FakeNodes
with FakeNodes(pathlib.Path(sys.argv[1]), count=2, prefix=sys.argv[2]) as nodes:
    nodes.wait_registered(60)
    print("registered", flush=True)
    time.sleep(600)
"""


def test_killed_test_leaves_no_nodes(tenant: Tenant, prefix: str) -> None:
    """The process of the nodes sees the end of its standard input, and removes them."""
    argv = [sys.executable, "-c", ENDLESS, str(tenant.kubectl.kubeconfig), prefix]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as killed:
        assert killed.stdout
        assert killed.stdout.readline() == "registered\n"
        killed.send_signal(signal.SIGKILL)
    left = tenant.kubectl.within("kube-node-lease")
    for number in range(2):
        left.wait("delete", f"node/{prefix}-{number:04d}", f"lease/{prefix}-{number:04d}", timeout_s=SOON_S)
    assert fleet(tenant.kubectl, prefix) == []
