"""What a dead LLM server leaves on a node: a pod whose container has ended while its workers live on, and one that lives.

Both are as vLLM's production stack makes them with LMCache: hostPID, shared memory in a memory `emptyDir`, names in the host's
/dev/shm too. A container runtime that kills what is left in a container's cgroup leaves nothing, so the workers are out of
that cgroup when their container ends, and are put back into one of its name: as if SIGKILL had not reached them in time.
"""

import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cluster.kubectl import Object
from cluster.nodes import Node
from cluster.tenants import Tenant, container, pod

GPUS_EACH = 2
GPU_BYTES = 1 << 30
_MARGIN_S = 6  # the operator's own and a fraction
# Its segment in the host's /dev/shm is open for as long as the front end lives. A second start fails: the GPUs are taken.
_START = """
import os, sys
os.mkdir("/state/begun")
segment = os.open("/host-shm/" + sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_EXCL)
os.ftruncate(segment, 1 << 20)
os.set_inheritable(segment, True)
os.execvp("python3", ["python3", "/opt/server/vllm", "serve", "tiny-model", *sys.argv[2:]])
"""
_LEAVE = 'for group in /sys/fs/cgroup/*; do for pid in "$@"; do echo $pid >$group/cgroup.procs; done; done'
# $1: the cgroup. A new one of cpuset is empty, and takes no process before it is filled.
_ENTER = """
cgroup=$1; shift
for group in /sys/fs/cgroup/*; do
    mkdir -p $group$cgroup
    for key in cpuset.cpus cpuset.mems; do
        if [ -e $group/$key ]; then cat $group$(dirname $cgroup)/$key >$group$cgroup/$key; fi
    done
    for pid in "$@"; do echo $pid >$group$cgroup/cgroup.procs; done
done
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server's pod on a node. `told`: its processes, by the node's pids, and its names; `segment`: the one of the host's."""

    tenant: Tenant
    node: Node
    name: str
    uid: str
    container: str
    told: dict[str, Any]
    segment: str

    @property
    def front_end(self) -> int:
        """The container's first process."""
        return int(self.told["front_end"])

    @property
    def workers(self) -> list[int]:
        """The engine and its workers, which hold the GPUs."""
        return [int(self.told["engine"]), *map(int, self.told["workers"])]

    @property
    def memory(self) -> Path:
        """The pod's own shared memory, as this machine sees it."""
        return self.node.space.path(f"/var/lib/kubelet/pods/{self.uid}/volumes/kubernetes.io~empty-dir/shm")

    def names(self) -> set[str]:
        """The names in its shared memory that are there now, the host's among them."""
        return {path.name for path in [*self.memory.iterdir(), self._host_segment] if path.exists()}

    def forget_segment(self) -> None:
        """Takes its name out of the host's /dev/shm, where it outlives the pod."""
        self._host_segment.unlink(missing_ok=True)

    @property
    def _host_segment(self) -> Path:
        return self.node.space.path(f"/dev/shm/{self.segment}")

    def processes(self) -> dict[int, str]:
        """Its processes that live, each with when it was started (in ticks): a pid alone may be another one's."""
        found = {}
        for pid in [self.front_end, int(self.told["tracker"]), *self.workers]:
            status = self.node.space.path(f"/proc/{pid}/stat")
            if status.exists() and (words := status.read_text().rpartition(")")[2].split())[0] not in "ZX":
                found[pid] = words[19]
        return found


def start(tenant: Tenant, node: Node, name: str) -> Server:
    """A server that serves, with two GPUs. Raises KubectlError if it does not start."""
    segment = f"psm_{secrets.token_hex(4)}"
    manifest = _manifest(tenant, node, name, segment)
    running = tenant.run(manifest)
    told = json.loads(tenant.first_line(name))
    identity = running["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    return Server(
        tenant=tenant,
        node=node,
        name=name,
        uid=running["metadata"]["uid"],
        container=identity,
        told=told,
        segment=segment,
    )


def kill_container(server: Server) -> None:
    """The front end is killed and its container ends, as the cluster sees it; engine and workers live on."""
    space, pids = server.node.space, [str(pid) for pid in server.workers]
    lines = space.run("cat", f"/proc/{server.workers[0]}/cgroup").splitlines()
    (cgroup,) = {line.split(":", 2)[2] for line in lines if server.container in line}
    space.run("sh", "-ec", _LEAVE, "sh", *pids)
    space.run("kill", "-KILL", str(server.front_end))
    server.tenant.kubectl.until("pod", server.name, is_so=lambda one: _has_ended(one, server.container))
    space.run("sh", "-ec", _ENTER, "sh", cgroup, *pids)


def _has_ended(one: Object, identity: str) -> bool:
    """Whether the kubelet has told that this container is over, and no other of its pod runs."""
    (status,) = one["status"]["containerStatuses"]
    ended = status["lastState"].get("terminated", {}).get("containerID", "")
    return ended.endswith(identity) or "waiting" in status["state"]


def _manifest(tenant: Tenant, node: Node, name: str, segment: str) -> Object:
    mounts = {"shm": "/dev/shm", "host-shm": "/host-shm", "state": "/state"}
    server = container(
        "server",
        tenant.images("server"),
        gpus=GPUS_EACH,
        command=["python3", "-c", _START, segment, "--gpu-bytes", str(GPU_BYTES)],
        volumeMounts=[{"name": volume, "mountPath": path} for volume, path in mounts.items()],
    )
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "host-shm", "hostPath": {"path": "/dev/shm"}},
        {"name": "state", "emptyDir": {}},
    ]
    return pod(name, server, node=node.name, hostPID=True, restartPolicy="Always", volumes=volumes)


def await_old_enough(server: Server) -> None:
    """Until whatever is planned from now on takes its processes for leftovers.

    What may have been started after the kubelet's last word, or within five seconds before it, is kept.
    """
    past = datetime.now(UTC) + timedelta(seconds=_MARGIN_S)
    leases = server.tenant.kubectl.within("kube-node-lease")
    leases.until("lease", server.node.name, is_so=lambda one: datetime.fromisoformat(one["spec"]["renewTime"]) > past)
