"""GPUs in pods, as NVIDIA's device plugin and runtime give them: particular ones, to init containers and containers alike."""

import json
from typing import Any

import pytest

from cluster import faults
from cluster.kubectl import Object
from cluster.nodes import DRIVER_DIRECTORY, GPUS, Node
from cluster.tenants import Tenant, container, pod, python

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

# What a container sees of GPUs, by every way there is. NVML is asked by the node program itself.
SEEN = (
    "import json, os; from glob import glob; "
    "print(json.dumps({'env': os.environ.get('NVIDIA_VISIBLE_DEVICES'), 'nodes': sorted(glob('/dev/nvidia[0-9]*')), "
    "'control': sorted(glob('/dev/nvidia[a-z-]*')), 'proc': sorted(os.listdir('/proc/driver/nvidia/gpus')), "
    "'devices': 'nvidia-uvm' in open('/proc/devices').read(), 'library': os.path.exists('"
    + DRIVER_DIRECTORY
    + "/libnvidia-ml.so.1')}))"
)


def uuids(node: Node) -> list[str]:
    return [gpu.uuid for gpu in node.driver.gpus]


def inspected(text: str) -> list[tuple[int, str]]:
    """Index and UUID of each GPU in a report of the node program."""
    return [(gpu["index"], gpu["uuid"]) for gpu in json.loads(text)["gpus"]]


def inspection(tenant: Tenant, name: str, gpus: int, **fields: Any) -> Object:
    return container(name, tenant.images("node-program"), "inspect", "--output", "json", gpus=gpus, **fields)


def look(tenant: Tenant, **fields: Any) -> Object:
    return python("look", tenant.images("python"), SEEN, **fields)


def test_a_pod_gets_its_own_gpus_and_its_init_container_the_same(tenant: Tenant, node: Node) -> None:
    """Two of eight, by index and UUID, in both; a second pod gets others."""
    first = pod("first", inspection(tenant, "main", 2), init=[inspection(tenant, "early", 2)], node=node.name)
    holder = python("main", tenant.images("python"), "import signal; signal.pause()", gpus=2)
    second = pod("second", holder, init=[inspection(tenant, "early", 2)], node=node.name)
    tenant.run(second)
    tenant.run(first, phase="Succeeded")
    early, main = (inspected(tenant.logs("first", name)) for name in ("early", "main"))
    others = inspected(tenant.logs("second", "early"))
    assert [index for index, _ in early] == [0, 1]
    assert early == main
    assert [index for index, _ in others] == [0, 1]
    given = {uuid for _, uuid in (*main, *others)}
    assert len(given) == 4
    assert given < set(uuids(node))


def test_devices_environment_and_proc_agree(tenant: Tenant, node: Node) -> None:
    """A container that was given two GPUs has their nodes, their UUIDs in its environment, and only them in /proc."""
    tenant.run(pod("two", look(tenant, gpus=2), node=node.name), phase="Succeeded")
    seen = json.loads(tenant.logs("two"))
    chosen = [gpu for gpu in node.driver.gpus if gpu.uuid in seen["env"].split(",")]
    assert len(chosen) == 2
    assert seen["nodes"] == sorted(f"/dev/nvidia{gpu.minor}" for gpu in chosen)
    assert seen["control"] == ["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"]
    assert seen["proc"] == sorted(gpu.pci_address[4:].lower() for gpu in chosen)
    assert seen["devices"]
    assert seen["library"]


def test_a_container_without_gpus_sees_the_kernels_driver_and_nothing_else(tenant: Tenant, node: Node) -> None:
    """/proc/driver/nvidia is the kernel's and everybody's; nodes and library are for those who asked."""
    tenant.run(pod("none", look(tenant), node=node.name), phase="Succeeded")
    seen = json.loads(tenant.logs("none"))
    assert seen["nodes"] == seen["control"] == []
    assert seen["env"] is None
    assert not seen["library"]
    assert len(seen["proc"]) == GPUS


def test_all_visible_devices_are_all_of_the_node(tenant: Tenant, node: Node) -> None:
    """An image that sets NVIDIA_VISIBLE_DEVICES=all sees every GPU of the node without asking for any, as CUDA's do."""
    every = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    tenant.run(pod("all", inspection(tenant, "main", 0, env=every), node=node.name), phase="Succeeded")
    assert inspected(tenant.logs("all")) == list(enumerate(uuids(node)))


def test_more_gpus_than_there_are_stay_pending(tenant: Tenant, node: Node) -> None:
    """The scheduler says why, and the pod waits."""
    selector = tenant.label(node.name)
    asked = python("main", tenant.images("python"), "", gpus=GPUS + 1)
    tenant.kubectl.create(pod("greedy", asked, nodeSelector=selector))
    tenant.kubectl.wait("jsonpath={.status.conditions[0].reason}=Unschedulable", "pod/greedy")
    status = tenant.kubectl.get("pod", "greedy")["status"]
    assert status["phase"] == "Pending"
    assert "Insufficient nvidia.com/gpu" in status["conditions"][0]["message"]


def test_a_gpu_that_fails_is_no_longer_given_out(tenant: Tenant, node: Node) -> None:
    """The device plugin takes a GPU that fell off the bus out of the node's allocatable ones, and gives it back later."""
    gone = node.space.path(f"/proc/driver/nvidia/gpus/{node.driver.gpus[5].pci_address[4:].lower()}")
    aside = node.space.path("/run/fallen-off")
    with faults.moved(gone, aside):
        tenant.kubectl.wait(allocatable(GPUS - 1), f"node/{node.name}", timeout_s=30)
    tenant.kubectl.wait(allocatable(GPUS), f"node/{node.name}", timeout_s=30)
    assert tenant.kubectl.get("node", node.name)["status"]["allocatable"]["nvidia.com/gpu"] == str(GPUS)


def test_the_plugin_registers_again_with_a_new_kubelet(tenant: Tenant, node: Node) -> None:
    """After a kubelet's restart GPUs are given out as before."""
    with faults.kubelet_down(node):
        pass
    tenant.kubectl.wait("condition=Ready", f"node/{node.name}")
    tenant.kubectl.wait(allocatable(GPUS), f"node/{node.name}", timeout_s=30)
    tenant.run(pod("after", inspection(tenant, "main", 1), node=node.name), phase="Succeeded")
    assert len(inspected(tenant.logs("after"))) == 1


def test_the_nodes_have_gpus_of_their_own(node: Node, other_node: Node) -> None:
    """No UUID is on two nodes."""
    assert len({*uuids(node), *uuids(other_node)}) == 2 * GPUS


def allocatable(count: int) -> str:
    return rf"jsonpath={{.status.allocatable.nvidia\.com/gpu}}={count}"
