"""A real node: a space with a container runtime, a kubelet, kube-proxy, eight simulated GPUs and their device plugin."""

import socket
import string
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster import binaries, components, images, imagestore, spaces
from cluster.components import NodeFacts
from cluster.places import CONFIG, Place, build_cache
from gpusim import gpusim

DRIVER_DIRECTORY = "/usr/local/nvidia/lib64"  # where the device plugins of the large clouds have it
GPUS = 8
IMAGES = ("pause", "python", "node-program", "operator", "server")
SETTINGS = "/etc/kubernetes"
COMPONENTS = ("containerd", "nvidia-device-plugin", "kubelet", "kube-proxy")
_CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
_START_DEADLINE_S = 30.0
_LOOK_AGAIN_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Node:
    """One real node of a cluster; `outside` is the control plane's space, in which its own is nested."""

    facts: NodeFacts
    place: Place
    outside: spaces.Space

    @property
    def name(self) -> str:
        """Its name in the API."""
        return self.facts.name

    @property
    def space(self) -> spaces.Space:
        """The node itself: what a hostPID pod on it takes for the host."""
        return spaces.Space(self.place.socket(self.name))

    @property
    def driver(self) -> gpusim.Driver:
        """Its simulated NVIDIA driver, to hold, break and mend GPUs with."""
        return gpusim.Driver.attach(self.space.path(DRIVER_DIRECTORY), self.space.path("/dev"))

    def component(self, name: str) -> spaces.Component:
        """One of COMPONENTS, or what a test has started. Raises SpaceError if it runs no more."""
        return self.space.component(name)

    def boot(self) -> None:
        """Makes the node's namespaces, network and GPUs, and starts its container runtime. The disk is what it was."""
        disk = self.place.state / "disk" / self.name
        self.outside.path(disk).mkdir(exist_ok=True)
        log = self.place.logs / self.name
        log.mkdir(exist_ok=True)
        cache = str(build_cache().parent)
        root = {"kind": "node", "disk": str(disk), "log": str(log), "read_only": {cache: cache}}
        root["boot_id"] = str(uuid.uuid4())
        spec = {"cgroup": f"{self.place.cgroup}/{self.name}", "hostname": self.name, "parent": 1, "listener": 3}
        with spaces.listener(self.place.socket(self.name)) as listening:
            argv = spaces.command(spec | {"root": root})
            self.outside.start(self.name, argv, log=f"{log}.log", descriptors=[listening.fileno()])
        self.space.components()  # answers once the node is furnished
        self._connect()
        self._install_gpus()
        self._write_settings()
        if not self.space.path(imagestore.FOLDER).exists():
            imagestore.unpack(imagestore.archive(IMAGES), self.space)
        self.start("containerd")

    def join(self) -> None:
        """Starts what makes it a node of the cluster, once the API server answers."""
        self.await_containerd()
        for name in COMPONENTS[1:]:
            self.start(name)

    def start(self, name: str) -> spaces.Component:
        """Starts one of COMPONENTS, for the first time or again."""
        return self.space.start(name, self._command(name), log=f"/var/log/{name}.log")

    def load(self, archive: Path) -> None:
        """Imports an image archive into the container runtime, while it runs. Raises SpaceError."""
        self.await_containerd()
        self.space.run("ctr", "--namespace", "k8s.io", "images", "import", archive)

    def image_references(self) -> set[str]:
        """The images that its container runtime has. Raises SpaceError."""
        return set(self.space.run("ctr", "--namespace", "k8s.io", "images", "ls", "--quiet").split())

    def await_containerd(self) -> None:
        """Until containerd's socket takes connections. Raises SpaceError."""
        runtime, path = self.component("containerd"), str(self.space.path(_CONTAINERD_SOCKET))
        deadline = time.monotonic() + _START_DEADLINE_S
        while not _answers(path):
            if runtime.wait(_LOOK_AGAIN_S) or time.monotonic() > deadline:
                raise spaces.SpaceError(f"{self.name}: containerd does not answer; see {self.place.logs}/{self.name}")

    def pids(self, pod_uid: str) -> list[int]:
        """The processes of a pod, by the machine's pids, its pause process first."""
        folders = self.space.path("/sys/fs/cgroup/pids/kubepods").glob(f"**/pod{pod_uid}/*/cgroup.procs")
        return sorted(int(pid) for folder in folders for pid in folder.read_text().split())

    def _command(self, name: str) -> list[str]:
        commands = {
            "containerd": ["containerd", f"--config={SETTINGS}/containerd.toml"],
            "nvidia-device-plugin": [str(binaries.small("nvidia-device-plugin"))],
            "kubelet": components.kubelet(self.facts),
            "kube-proxy": components.kube_proxy(self.facts),
        }
        return commands[name]

    def _connect(self) -> None:
        """Joins the node to the bridge of the control plane's network."""
        here, inside = self.facts, self.space
        earlier = f"! ip link show {here.name} >&- 2>&- || ip link del {here.name}"  # of a node that was switched off
        join = f"ip link add {here.name} type veth peer name eth0 netns {inside.pid}"
        raised = f"ip link set {here.name} master nodes up && ip route replace {here.pods} via {here.ip}"
        self._outer("sh", "-c", f"{earlier}; {join} && {raised}")
        lines = [f"addr add {here.ip}/{components.NODE_NETWORK} dev eth0", "link set eth0 up", "link set lo up"]
        lines += [f"route add default via {components.CONTROL_IP}"]
        inside.run("ip", "-batch", "-", input="\n".join(lines))

    def _outer(self, *argv: str) -> None:
        """Runs a command in the control plane's network, with the machine's pids."""
        spaces.run(self.outside.command(*argv, namespaces="--net"))

    def _install_gpus(self) -> None:
        space = self.space
        machine = gpusim.gpus(GPUS, machine=self.facts.number)
        driver = gpusim.Driver.install(space.path(DRIVER_DIRECTORY), space.path("/dev"), machine)
        driver.proc_driver(space.path("/proc/driver/nvidia"))
        space.path("/run/proc/devices").write_text(driver.proc_devices())
        space.run("mount", "--bind", "/run/proc/devices", "/proc/devices")

    def _write_settings(self) -> None:
        folder = self.space.path(SETTINGS)
        folder.mkdir(exist_ok=True)
        pki = self.place.state / "pki"
        for name, source in (("kubelet", self.name), ("kube-proxy", "kube-proxy")):
            _copy(pki / f"{source}.kubeconfig", folder / f"{name}.kubeconfig")
            _copy(CONFIG / f"{name}.yaml", folder / f"{name}.yaml")
        _copy(pki / "ca.crt", folder / "ca.crt")
        facts = {"pause": images.reference("pause"), "runtime": str(binaries.small("nvidia-container-runtime"))}
        _fill(CONFIG / "containerd.toml", folder / "containerd.toml", facts)
        networks = self.space.path("/etc/cni/net.d")
        networks.mkdir(parents=True, exist_ok=True)
        _fill(CONFIG / "bridge.conflist", networks / "10-bridge.conflist", {"pods": self.facts.pods})


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(path) == 0


def _copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def _fill(source: Path, target: Path, facts: Mapping[str, str]) -> None:
    target.write_text(string.Template(source.read_text()).substitute(facts))
