"""One simulated node, and the objects that stand for it in the API: Node and Lease."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

from cluster.fakenodes.timestamps import rfc3339, rfc3339_micro

NODES = "/api/v1/nodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
FLEET_LABEL = (
    "tests.cleanslate.dev/fleet"  # whose value is the fleet's prefix: by it all of a fleet is found and removed
)
LEASE_DURATION_S = 40  # the kubelet's default

GPUS = 8
RESOURCES = {
    "cpu": "96",
    "memory": "1056Gi",
    "ephemeral-storage": "3500Gi",
    "pods": "110",
    "nvidia.com/gpu": str(GPUS),
}
HEALTHY = (
    ("MemoryPressure", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
)


class Node:
    """What the process knows of one node that it plays."""

    def __init__(self, prefix: str, index: int, labels: Mapping[str, str]) -> None:
        self.name = f"{prefix}-{index:04d}"
        self.fleet = prefix
        self.labels = labels
        self.host_ip = f"10.{64 + (index >> 8)}.{index & 255}.1"
        self.uid = ""
        self.lease_version = ""
        self.skew_s = 0.0
        self.awake = asyncio.Event()
        self.awake.set()
        self.is_gone = False
        self.not_ready = ""  # the message of its Ready condition while that is False
        self._index = index
        self._pods_seen = 0

    @property
    def path(self) -> str:
        """Where it is in the API."""
        return f"{NODES}/{self.name}"

    @property
    def lease_path(self) -> str:
        """Where its lease is in the API."""
        return f"{LEASES}/{self.name}"

    def clock(self) -> float:
        """Unix time as this node has it."""
        return time.time() + self.skew_s

    def next_pod_ip(self) -> str:
        """An address for one more pod, from a range of the node's own."""
        self._pods_seen += 1
        return f"10.{128 + (self._index >> 8)}.{self._index & 255}.{2 + self._pods_seen % 252}"

    def object(self, kubelet_version: str) -> dict[str, Any]:
        """The Node as a kubelet registers it: with its status, Ready."""
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            "beta.kubernetes.io/os": "linux",  # left out, the controller-manager adds both: one more write for each node
            "beta.kubernetes.io/arch": "amd64",
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.product": "NVIDIA-H200",
            "nvidia.com/gpu.count": str(GPUS),
            FLEET_LABEL: self.fleet,
            **self.labels,
        }
        return {"kind": "Node", "apiVersion": "v1", "metadata": {"name": self.name, "labels": labels}} | {
            "status": {**self.status(), **self._machine(kubelet_version)}
        }

    def status(self) -> dict[str, Any]:
        """Its conditions as they are now, to be merged into the Node's status."""
        now = rfc3339(self.clock())
        times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "kubelet is posting ready status",
        }
        if self.not_ready:
            ready |= {"status": "False", "reason": "KubeletNotReady", "message": self.not_ready}
        healthy = [{"type": kind, "status": "False", "reason": why, "message": text} for kind, why, text in HEALTHY]
        return {"conditions": [{**one, **times} for one in (*healthy, ready)]}

    def lease(self) -> dict[str, Any]:
        """Its Lease, renewed now. With the version that was seen last, as an update needs it."""
        metadata: dict[str, Any] = {
            "name": self.name,
            "namespace": "kube-node-lease",
            "labels": {FLEET_LABEL: self.fleet},
            "managedFields": [{}],  # that is "none": a fifth of the server's work on a renewal was to track them
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": self.name, "uid": self.uid}],
        }
        if self.lease_version:
            metadata["resourceVersion"] = self.lease_version
        spec = {
            "holderIdentity": self.name,
            "leaseDurationSeconds": LEASE_DURATION_S,
            "renewTime": rfc3339_micro(self.clock()),
        }
        return {"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "metadata": metadata, "spec": spec}

    def _machine(self, kubelet_version: str) -> dict[str, Any]:
        """The part of the status that does not change. IDs are made from the name: the same after a restart."""
        identity = uuid.uuid5(uuid.NAMESPACE_DNS, self.name)
        return {
            "addresses": [
                {"type": "InternalIP", "address": self.host_ip},
                {"type": "Hostname", "address": self.name},
            ],
            "capacity": RESOURCES,
            "allocatable": RESOURCES,
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            "nodeInfo": {
                "machineID": identity.hex,
                "systemUUID": str(identity),
                "bootID": str(uuid.uuid5(identity, "boot")),
                "kernelVersion": "6.8.0-60-generic",
                "osImage": "Ubuntu 24.04.2 LTS",
                "containerRuntimeVersion": "containerd://2.1.4",
                "kubeletVersion": kubelet_version,
                "kubeProxyVersion": "",
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
        }
