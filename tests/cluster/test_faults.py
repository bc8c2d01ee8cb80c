"""Each fault breaks what it says, nothing else, and is mended at its end."""

import json
import statistics
import subprocess
import sys
import time

import pytest

from cluster import faults
from cluster.cluster import SILENCE_S, Cluster
from cluster.kubectl import KubectlError, Object
from cluster.nodes import Node
from cluster.tenants import Tenant, container, pod, python

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PAUSE = "import signal; signal.pause()"
API = "import socket; socket.create_connection(('10.96.0.1', 443), 2).close()"
SOON = """
import socket, time
for attempt in range(100):
    if socket.socket().connect_ex(('10.96.0.1', 443)) == 0: break
    time.sleep(0.1)
else: raise TimeoutError
"""  # what asked while nobody was there is asked again after a second or two: net.ipv4.neigh.*.retrans_time_ms
READY = "condition=Ready"


def ready(node: Object) -> str:
    return next(one["status"] for one in node["status"]["conditions"] if one["type"] == "Ready")


def test_a_stopped_api_server_does_not_answer_and_goes_on(cluster: Cluster) -> None:
    """Connections are taken and nothing comes; afterwards it is the same process."""
    with faults.api_server_stopped(cluster), pytest.raises(KubectlError):
        cluster.kubectl("get", "nodes", "--request-timeout=1s")
    cluster.kubectl("get", "nodes")
    assert cluster.ended() == []


def test_an_api_server_that_is_down_refuses_and_comes_back(cluster: Cluster, tenant: Tenant, node: Node) -> None:
    """Every connection is gone; pods run on, and what it knew is in etcd."""
    before = tenant.run(pod("stays", python("main", tenant.images("python"), PAUSE), node=node.name))
    with faults.api_server_down(cluster):
        assert not cluster.answers()
    after = tenant.kubectl.get("pod", "stays")
    assert cluster.answers()
    assert container_ids(after) == container_ids(before)


def test_a_slow_etcd_makes_writes_slow(cluster: Cluster, tenant: Tenant) -> None:
    """A write takes as long as was asked for, and no more once it is over."""

    def write_s() -> float:
        started = time.monotonic()
        tenant.kubectl("annotate", "--overwrite", "namespace", tenant.name, f"written={started}")
        return time.monotonic() - started

    before = statistics.median(write_s() for _ in range(3))
    with faults.etcd_slow(cluster, 0.5):
        slow = [write_s() for _ in range(3)]
    after = statistics.median(write_s() for _ in range(3))
    assert min(slow) > 0.5
    assert after < statistics.median(slow)
    assert before < statistics.median(slow)


def test_a_stopped_kubelet_makes_its_node_not_ready_and_no_other(tenant: Tenant, node: Node, other_node: Node) -> None:
    """Unknown after the control plane's patience, Ready again soon after; its containers run on."""
    before = tenant.run(pod("stays", python("main", tenant.images("python"), PAUSE), node=node.name))
    with faults.kubelet_stopped(node):
        tenant.kubectl.wait("condition=Ready=unknown", f"node/{node.name}", timeout_s=SILENCE_S + 30)
        assert ready(tenant.kubectl.get("node", other_node.name)) == "True"
        assert len(node.pids(before["metadata"]["uid"])) == 2
    tenant.kubectl.wait(READY, f"node/{node.name}", timeout_s=30)
    assert container_ids(tenant.kubectl.get("pod", "stays")) == container_ids(before)


def test_a_stopped_runtime_starts_nothing(tenant: Tenant, node: Node) -> None:
    """A pod stays where it is until containerd goes on."""
    with faults.runtime_stopped(node):
        tenant.kubectl.create(pod("waits", python("main", tenant.images("python"), PAUSE), node=node.name))
        with pytest.raises(KubectlError):
            tenant.await_phase("waits", "Running", timeout_s=3)
        assert tenant.kubectl.get("pod", "waits")["status"]["phase"] == "Pending"
    assert tenant.await_phase("waits", "Running")["status"]["phase"] == "Running"


def test_containers_outlive_their_runtime(tenant: Tenant, node: Node) -> None:
    """containerd goes and comes: the container is the same one, and another can be started."""
    before = tenant.run(pod("stays", python("main", tenant.images("python"), PAUSE), node=node.name))
    pids = node.pids(before["metadata"]["uid"])
    with faults.runtime_down(node):
        assert node.pids(before["metadata"]["uid"]) == pids
    tenant.kubectl.wait(READY, f"node/{node.name}", timeout_s=60)
    tenant.run(pod("next", python("main", tenant.images("python"), ""), node=node.name), phase="Succeeded")
    assert container_ids(tenant.kubectl.get("pod", "stays")) == container_ids(before)
    assert node.pids(before["metadata"]["uid"]) == pids


def test_a_node_reboots(tenant: Tenant, node: Node, other_node: Node) -> None:
    """Another boot id, every process gone, /run and /dev/shm empty, the disk kept, pods started again; the other node stays."""
    main = python("main", tenant.images("python"), PAUSE)
    before = tenant.run(pod("comes-back", main, node=node.name, restartPolicy="Always"))
    stays = tenant.run(pod("stays", main, node=other_node.name))
    boot = tenant.kubectl.get("node", node.name)["status"]["nodeInfo"]["bootID"]
    for path in ("/var/lib/kept", "/root/kept", "/run/lost", "/dev/shm/lost"):
        node.space.path(path).touch()
    faults.reboot(node)
    tenant.kubectl.until(
        "node", node.name, is_so=lambda one: one["status"]["nodeInfo"]["bootID"] != boot and ready(one) == "True"
    )
    there = {
        path: node.space.path(path).exists() for path in ("/var/lib/kept", "/root/kept", "/run/lost", "/dev/shm/lost")
    }
    assert there == {"/var/lib/kept": True, "/root/kept": True, "/run/lost": False, "/dev/shm/lost": False}
    after = tenant.kubectl.until(
        "pod", "comes-back", is_so=lambda one: restarts(one) == 1 and "running" in states(one), timeout_s=90
    )
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert container_ids(tenant.kubectl.get("pod", "stays")) == container_ids(stays)
    tenant.kubectl.wait(r"jsonpath={.status.allocatable.nvidia\.com/gpu}=8", f"node/{node.name}")


def test_a_pod_without_network_reaches_nobody(tenant: Tenant, node: Node) -> None:
    """The API server is out of reach for this pod, not for its neighbour on the same node."""
    one = tenant.run(pod("one", python("main", tenant.images("python"), PAUSE), node=node.name))
    tenant.run(pod("two", python("main", tenant.images("python"), PAUSE), node=node.name))
    tenant.kubectl.execute("one", "python3", "-c", API)
    with faults.pod_cut_off(node, one["metadata"]["uid"]):
        with pytest.raises(KubectlError, match=r"nreachable|timed out|No route"):
            tenant.kubectl.execute("one", "python3", "-c", API)
        tenant.kubectl.execute("two", "python3", "-c", API)
    tenant.kubectl.execute("one", "python3", "-c", SOON)


def test_a_node_without_network_is_out_of_reach(cluster: Cluster, node: Node, other_node: Node) -> None:
    """The API server cannot ask its kubelet; the other node's answers."""
    healthz = "/api/v1/nodes/{}/proxy/healthz"
    with faults.cut_off(node):
        with pytest.raises(KubectlError):
            cluster.kubectl("get", "--raw", healthz.format(node.name), "--request-timeout=3s")
        assert cluster.kubectl("get", "--raw", healthz.format(other_node.name)) == "ok"
    assert cluster.kubectl("get", "--raw", healthz.format(node.name), timeout_s=30) == "ok"


@pytest.mark.parametrize("seconds", [-3600, 600])
def test_a_skewed_clock_is_wrong_by_what_was_asked(tenant: Tenant, node: Node, seconds: int) -> None:
    """In a pod and in a program beside the test; a timeout takes as long as ever."""
    code = "import time; a = time.monotonic(); time.sleep(0.05); print(time.time(), time.monotonic() - a)"
    manifest = faults.skewed(pod("wrong", python("main", tenant.images("python"), code), node=node.name), seconds)
    tenant.run(manifest, phase="Succeeded")
    done = subprocess.run(
        [sys.executable, "-c", code], env=faults.skewed_environment(seconds), capture_output=True, text=True, check=True
    )
    for text in (tenant.logs("wrong"), done.stdout):
        clock, slept = map(float, text.split())
        assert abs(clock - time.time() - seconds) < 60
        assert 0.05 <= slept < 5


def test_a_missing_image_keeps_a_pod_from_starting(tenant: Tenant, node: Node, other_node: Node) -> None:
    """ErrImageNeverPull on the node that lacks it, while the other one has it; there again, the pod starts."""
    with faults.image_missing(node, "server"):
        main = container("main", tenant.images("server"), command=["python3", "-c", PAUSE])
        with pytest.raises(KubectlError, match="ErrImageNeverPull"):
            tenant.run(pod("lacks", main, node=node.name))
        tenant.run(pod("has", main, node=other_node.name))
    assert tenant.kubectl.until("pod", "lacks", is_so=lambda one: one["status"]["phase"] == "Running", timeout_s=60)


def test_a_sick_gpu_is_seen_in_pods(tenant: Tenant, node: Node) -> None:
    """A fault of the simulated driver is what the node program reports, and is gone afterwards."""
    inspect = container("inspect", tenant.images("node-program"), "inspect", "--output", "json", gpus=8)
    with faults.gpu(node, 3, residual_bytes=1 << 30):
        tenant.run(pod("sick", inspect, node=node.name), phase="Failed")
    results = {gpu["index"]: gpu["result"] for gpu in json.loads(tenant.logs("sick"))["gpus"]}
    assert results == {index: "Residual" if index == 3 else "Clean" for index in range(8)}
    tenant.run(pod("well", inspect, node=node.name), phase="Succeeded")


def container_ids(one: Object) -> list[str]:
    return [status["containerID"] for status in one["status"]["containerStatuses"]]


def restarts(one: Object) -> int:
    return sum(status["restartCount"] for status in one["status"].get("containerStatuses", ()))


def states(one: Object) -> set[str]:
    return {state for status in one["status"].get("containerStatuses", ()) for state in status["state"]}
