"""A cluster of real Kubernetes on this machine: start it, find one that runs, take it down.

Everything is in spaces: the control plane in one, each node in another nested in it. So the end of one process takes all of
it along, mounts, interfaces and firewall rules too, and nothing is found by its name. See README.md.
"""

import fcntl
import os
import select
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cluster import binaries, components, images, imagestore, kubectl, packages, pki, spaces, taking_down
from cluster.components import NodeFacts
from cluster.nodes import GPUS, IMAGES, Node
from cluster.places import CONFIG, PROGRAMS, PYTHON, Place
from node.programs import cgroups

NODES = 2
READY_DEADLINE_S = 120.0
SILENCE_S = 20  # Kubernetes' own default is 50 s, which a test would have to wait
_LOOK_AGAIN_S = 0.1


class ClusterError(Exception):
    """A cluster that could not be started."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    place: Place
    node_count: int
    silence_s: int = SILENCE_S

    @property
    def control(self) -> spaces.Space:
        """The space of etcd, the API server, the controller manager and the scheduler."""
        return spaces.Space(self.place.socket("control"))

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """The real nodes by name."""
        return {node.name: node for node in map(self._node, range(1, self.node_count + 1))}

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig; it names an address of this machine."""
        return self.place.kubeconfig

    @property
    def inner_kubeconfig(self) -> Path:
        """The administrator's within the cluster's own network: for programs that are started there, with nothing between."""
        return self.place.state / "inner.kubeconfig"

    @property
    def authority(self) -> pki.Authority:
        """The certificate authority, to make more certificates with."""
        return pki.Authority(self.place.state / "pki")

    @cached_property
    def kubectl(self) -> kubectl.Kubectl:
        """kubectl as administrator."""
        return kubectl.Kubectl(program=binaries.kubectl(), kubeconfig=self.kubeconfig)

    def load(self) -> None:
        """Builds those of IMAGES whose inputs changed, and imports what a node has not got yet, while all runs."""
        for node in self.nodes.values():
            there = node.image_references()
            for name in IMAGES:
                if images.reference(name) not in there:
                    node.load(images.archive(name))

    def start_again(self, name: str) -> None:
        """Starts a component of the control plane that was ended, and waits until the API server is ready."""
        _start_component(self, name)
        _await_api_server(self)

    def components(self) -> list[spaces.Component]:
        """All that runs. Raises SpaceError with those that run no more though nobody started them again."""
        if ended := self.ended():
            raise spaces.SpaceError(f"ended early: {'; '.join(ended)}")
        every = [self.control, *(node.space for node in self.nodes.values())]
        return [space.component(name) for space in every for name in space.components()]

    def ended(self) -> list[str]:
        """The components that run no more though nobody started them again: a sound cluster has none."""
        found = [f"{name}: exit code {code}" for name, code in self.control.components().items() if code is not None]
        for node in self.nodes.values():
            if f"{node.name}: " not in " ".join(found):
                codes = node.space.components().items()
                found += [f"{node.name}/{name}: exit code {code}" for name, code in codes if code is not None]
        return found

    def answers(self) -> bool:
        """Whether the API server says that it is ready."""
        trust = ssl.create_default_context(cafile=self.authority.certificate)
        trust.load_cert_chain(self.authority.folder / "admin.crt", self.authority.folder / "admin.key")
        try:
            with urllib.request.urlopen(f"{self._server()}/readyz", timeout=5, context=trust) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _server(self) -> str:
        return f"https://127.0.0.1:{(self.place.state / 'port').read_text()}"

    def _node(self, number: int) -> Node:
        return Node(facts=NodeFacts(number=number), place=self.place, outside=self.control)


@contextmanager
def alone(place: Place) -> Iterator[None]:
    """Holds the checkout's lock: one process at a time starts its clusters or takes them down."""
    checkout = os.open(place.checkout, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(checkout, fcntl.LOCK_EX)
        yield
    finally:
        os.close(checkout)


def build(node_count: int = NODES) -> None:
    """Installs and builds what a cluster is made of. The first time on a machine that takes up to ten minutes.

    Raises ClusterError on a machine that it does not run on.
    """
    if not any("memory" in one.options.split(",") for one in cgroups.hierarchies()):
        raise ClusterError(
            "test cluster: cannot start: no memory controller of cgroup version 1; boot with the hybrid layout"
        )
    packages.ensure(packages.RUNTIME | packages.BUILDING)
    binaries.kubernetes()
    if node_count:
        for name in binaries.SMALL:
            binaries.small(name)
        binaries.helm()
        imagestore.archive(IMAGES)


def find(place: Place, node_count: int = NODES) -> Cluster | None:
    """The cluster at this place if it is sound: every component runs and the API server answers."""
    found = Cluster(place, node_count)
    try:
        return found if not found.ended() and found.answers() else None
    except (spaces.SpaceError, OSError):
        return None


def start(place: Place, node_count: int = NODES, *, silence_s: int = SILENCE_S) -> Cluster:
    """Starts a cluster, or returns the one that runs; what is left of a broken one is taken away first.

    A node that is silent for `silence_s` is NotReady.

    Blocks for seconds, and for minutes if Kubernetes is to be built. Raises ClusterError, with everything of it left in
    place to look at.
    """
    build(node_count)
    with alone(place):
        if found := find(place, node_count):
            found.load()
            return found
        if taking_down.exists(place):
            taking_down.take_down(place)
        try:
            return _start(Cluster(place, node_count, silence_s))
        except (spaces.SpaceError, kubectl.KubectlError) as error:
            raise ClusterError(f"cluster {place.name}: cannot start: {error}; logs: {place.logs}") from error


def stop(place: Place) -> None:
    """Takes a cluster down, whatever state it is in; that there is none is no error."""
    with alone(place):
        taking_down.take_down(place)


def _start(cluster: Cluster) -> Cluster:
    place = cluster.place
    facts = tuple(node.facts for node in cluster.nodes.values())
    _make_folders(place)
    with ThreadPoolExecutor(2 + cluster.node_count) as workers:
        certificates = workers.submit(components.make_certificates, cluster.authority, facts)
        _make_control(cluster)
        certificates.result()
        _start_api_server(cluster)
        booted = [workers.submit(node.boot) for node in cluster.nodes.values()]
        _await_api_server(cluster)
        _start_component(cluster, "kube-controller-manager")
        _start_component(cluster, "kube-scheduler")
        for node, one in zip(cluster.nodes.values(), booted, strict=True):
            one.result()
            node.join()
    _await_ready(cluster)
    return cluster


def _make_folders(place: Place) -> None:
    for folder in (place.logs, place.state / "disk", place.state / "pki"):
        folder.mkdir(parents=True, exist_ok=True)
    place.state.chmod(0o700)


def _make_control(cluster: Cluster) -> None:
    place = cluster.place
    root = {"kind": "control", "disk": str(place.state / "disk")}
    spec = {"cgroup": place.cgroup, "hostname": "control", "root": root}
    space = spaces.Space.make(place.socket("control"), spec, place.logs / "control.log")
    lines = ["link set lo up", "link add nodes type bridge"]
    lines += [f"addr add {components.CONTROL_IP}/{components.NODE_NETWORK} dev nodes", "link set nodes up"]
    space.run("ip", "-batch", "-", input="\n".join(lines))
    space.run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")  # from a node's pods to another's


def _start_api_server(cluster: Cluster) -> None:
    """etcd, the API server, and the way to it from the machine."""
    _start_component(cluster, "etcd")
    _start_component(cluster, "kube-apiserver")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        port = listening.getsockname()[1]
        target = (components.CONTROL_IP, str(components.API_PORT))
        _start_program(cluster, "forward", [*PYTHON, PROGRAMS / "forward.py", "3", *target], [listening.fileno()])
    (cluster.place.state / "port").write_text(str(port))
    config = cluster.authority.kubeconfig("admin", f"https://127.0.0.1:{port}")
    pki.write(cluster.kubeconfig, config)
    pki.write(cluster.inner_kubeconfig, cluster.authority.kubeconfig("admin", components.SERVER))


def _start_component(cluster: Cluster, name: str) -> None:
    folder, disk = cluster.authority.folder, cluster.place.state / "disk"
    _start_program(cluster, name, components.control_plane(folder, disk, silence_s=cluster.silence_s)[name], [])


def _start_program(cluster: Cluster, name: str, argv: list[str | Path], descriptors: list[int]) -> None:
    log = str(cluster.place.logs / f"{name}.log")
    cluster.control.start(name, argv, log=log, env=components.ENVIRONMENT, descriptors=descriptors)


def _await_api_server(cluster: Cluster) -> None:
    deadline = time.monotonic() + READY_DEADLINE_S
    server = cluster.control.component("kube-apiserver")
    while not cluster.answers():
        if server.wait(_LOOK_AGAIN_S):
            raise spaces.SpaceError("kube-apiserver: it ended")
        if time.monotonic() > deadline:
            raise spaces.SpaceError(f"kube-apiserver: not ready in {READY_DEADLINE_S:.0f} s")


def _await_ready(cluster: Cluster) -> None:
    """Until every node takes pods, and pods are let in: that needs their namespace's service account."""
    _wait(cluster, "create", "serviceaccount/default")
    if not cluster.nodes:
        return
    cluster.kubectl("apply", "--server-side", "-f", str(CONFIG / "objects.json"))
    names = [f"node/{name}" for name in cluster.nodes]
    _wait(cluster, "create", *names)
    _wait(cluster, "condition=Ready", *names)
    _wait(cluster, rf"jsonpath={{.status.allocatable.nvidia\.com/gpu}}={GPUS}", *names)


def _wait(cluster: Cluster, condition: str, *what: str) -> None:
    """`kubectl wait`, given up at once if a component ends."""
    flags = ("wait", f"--for={condition}", f"--timeout={READY_DEADLINE_S:.0f}s", *what)
    with subprocess.Popen(
        cluster.kubectl.command(*flags), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as waiting:
        own = os.pidfd_open(waiting.pid)
        running = cluster.components()
        ready, _, _ = select.select([own, *(one.pidfd for one in running)], [], [])
        os.close(own)
        if own not in ready:
            waiting.kill()
        said = waiting.stderr.read().decode().strip()
    if own not in ready:
        raise spaces.SpaceError(f"ended early: {', '.join(one.name for one in running if not one.alive)}")
    if waiting.returncode:
        raise spaces.SpaceError(f"{' '.join(what)} is not {condition} in {READY_DEADLINE_S:.0f} s: {said}")
