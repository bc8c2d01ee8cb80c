"""Faults on demand, each a context manager that mends at its end what it broke. Those of the API's answers: faultproxy.py."""

import copy
import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import images, spaces
from cluster.cluster import Cluster
from cluster.nodes import Node
from cluster.places import PROGRAMS
from gpusim import building

_RUNNING_S = 0.002


@contextmanager
def stopped(component: spaces.Component) -> Iterator[None]:
    """A component that does not answer, with its connections open: SIGSTOP, and SIGCONT at the end."""
    component.send(signal.SIGSTOP)
    try:
        yield
    finally:
        component.send(signal.SIGCONT)


@contextmanager
def api_server_stopped(cluster: Cluster) -> Iterator[None]:
    """The API server takes connections and does not answer."""
    with stopped(cluster.control.component("kube-apiserver")):
        yield


@contextmanager
def api_server_down(cluster: Cluster) -> Iterator[None]:
    """The API server is gone, every connection with it; at the end it is started again and ready."""
    cluster.control.component("kube-apiserver").stop(number=signal.SIGKILL)
    try:
        yield
    finally:
        cluster.start_again("kube-apiserver")


@contextmanager
def etcd_slow(cluster: Cluster, pause_s: float) -> Iterator[None]:
    """Every write and most reads take about `pause_s` seconds longer: etcd stands still, but for 2 ms in between."""
    etcd, over = cluster.control.component("etcd"), threading.Event()

    def interrupt() -> None:
        while not over.is_set():
            with stopped(etcd):
                over.wait(pause_s)
            over.wait(_RUNNING_S)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def kubelet_stopped(node: Node) -> Iterator[None]:
    """The kubelet hangs: its node is NotReady after cluster.SILENCE_S, its containers run on."""
    with stopped(node.component("kubelet")):
        yield


@contextmanager
def kubelet_down(node: Node) -> Iterator[None]:
    """The kubelet is gone; at the end it is started again."""
    node.component("kubelet").stop()
    try:
        yield
    finally:
        node.start("kubelet")


@contextmanager
def runtime_stopped(node: Node) -> Iterator[None]:
    """containerd hangs: containers run on, none can be started, asked after or ended."""
    with stopped(node.component("containerd")):
        yield


@contextmanager
def runtime_down(node: Node) -> Iterator[None]:
    """containerd is gone; at the end it is started again and answers. Containers run on under their shims."""
    node.component("containerd").stop()
    try:
        yield
    finally:
        node.start("containerd")
        node.await_containerd()


@contextmanager
def cut_off(node: Node) -> Iterator[None]:
    """The node's network is unplugged; everything on it runs on."""
    with _unplugged(node.outside, node.name):
        yield


@contextmanager
def pod_cut_off(node: Node, pod_uid: str) -> Iterator[None]:
    """The pod's own network is unplugged; the node's is not. Raises LookupError if it has no process on this node."""
    pids = node.pids(pod_uid)
    if not pids:
        raise LookupError(f"pod {pod_uid}: no process on {node.name}")
    inside = spaces.run(["nsenter", f"--target={pids[0]}", "--net", "--", "ip", "-json", "link", "show", "eth0"])
    peer = json.loads(inside)[0]["link_index"]
    links = json.loads(spaces.run(node.space.command("ip", "-json", "link", namespaces="--net")))
    with _unplugged(node.space, next(link["ifname"] for link in links if link["ifindex"] == peer)):
        yield


@contextmanager
def _unplugged(space: spaces.Space, interface: str) -> Iterator[None]:
    """The outer end of a pair is down: the inner one keeps its addresses and routes, as with a cable that is pulled."""
    command = space.command("ip", "link", "set", interface, namespaces="--net")
    spaces.run([*command, "down"])
    try:
        yield
    finally:
        spaces.run([*command, "up"])


@contextmanager
def image_missing(node: Node, image: str) -> Iterator[None]:
    """The node has not got one of images.NAMES, and nobody to pull it from; at the end it has it again."""
    node.space.run("ctr", "--namespace", "k8s.io", "images", "rm", "--sync", images.reference(image))
    try:
        yield
    finally:
        node.load(images.archive(image))


def reboot(node: Node) -> None:
    """Everything on the node dies at once; it comes up with another boot id, an empty /run and the disk that it had.

    Returns once its kubelet runs again. The pod network's addresses are given out anew, as after a real one.
    """
    power_off(node)
    power_on(node)


def power_off(node: Node) -> None:
    """Everything on the node dies at once."""
    machine = node.outside.component(node.name)
    machine.stop(number=signal.SIGKILL)  # its PID 1 dies with it, and everything with that


def power_on(node: Node) -> None:
    """The node comes up again after `power_off`."""
    node.boot()
    node.join()


def skewed_environment(seconds: int) -> dict[str, str]:
    """Variables with which a program has a wall clock that is `seconds` ahead (behind if negative).

    For dynamic programs, Python among them. The kernel has no namespace for the real-time clock (time_namespaces(7)), so
    a whole node cannot be skewed; simulated ones can (fakenodes).
    """
    return {"LD_PRELOAD": str(building.build_program(PROGRAMS / "skew.c", library=True)), "SKEW_S": str(seconds)}


def skewed(pod: Mapping[str, Any], seconds: int) -> dict[str, Any]:
    """The pod with a wrong clock in each of its containers, as in `skewed_environment`; their images need Debian's libc."""
    changed = copy.deepcopy(dict(pod))
    spec, variables = changed["spec"], skewed_environment(seconds)
    library = variables["LD_PRELOAD"]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container.setdefault("env", []).extend({"name": name, "value": value} for name, value in variables.items())
        mount = {"name": "skew", "mountPath": library, "readOnly": True}
        container.setdefault("volumeMounts", []).append(mount)
    spec.setdefault("volumes", []).append({"name": "skew", "hostPath": {"path": library}})
    return changed


@contextmanager
def gpu(node: Node, index: int, **fields: Any) -> Iterator[None]:
    """A GPU of the node with a fault (gpusim.Gpu's fields), in programs that run already too."""
    driver = node.driver
    sound = driver.gpus[index]
    driver.update(index, **fields)
    try:
        yield
    finally:
        current = node.driver
        current.update(index, **{name: getattr(sound, name) for name in fields})


@contextmanager
def moved(path: Path, aside: Path) -> Iterator[None]:
    """A file or folder that is not in its place, and back at the end."""
    shutil.move(path, aside)
    try:
        yield
    finally:
        shutil.move(aside, path)
