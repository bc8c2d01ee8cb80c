"""A control plane with simulated nodes and what the operator needs there: where tests kill it and make its API server fail."""

import json
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cleanslate_operator import names
from cluster import cluster, places
from cluster.cluster import Cluster
from cluster.fakenodes import behaviours
from cluster.fakenodes.behaviours import Rule
from cluster.fakenodes.handle import FakeNodes
from cluster.fakenodes.plainapi import PlainApi
from cluster.faultproxy import FaultProxy, Selection
from cluster.kubectl import Kubectl, Object
from cluster.operatorprocess import OperatorProcess
from cluster.places import Place

RESETS = f"/apis/{names.API_VERSION}/{names.PLURAL}"
SYSTEM, SPACE, WORK = "cleanslate-system", "cleanslate-resets", "work"
PODS = f"/api/v1/namespaces/{SPACE}/pods"
LOCKS = f"/apis/coordination.k8s.io/v1/namespaces/{SPACE}/leases"
DAEMON_SETS = f"/apis/apps/v1/namespaces/{SPACE}/daemonsets"
CONFIG_MAPS = f"/api/v1/namespaces/{SPACE}/configmaps"
NODES = ("sim-0000", "sim-0001", "sim-0002")
POOL = "test.cleanslate.dev/pool"
# What a reset writes: not the operator's own Lease, and not Events, which may be lost.
WRITES = Selection(verb=("create", "update", "patch", "delete", "deletecollection"), namespace=("", SPACE, WORK))
END_S = 120.0
_CRD = places.CHECKOUT / "crds" / "gpunodereset.yaml"
_LIFE_S = 3600.0  # of what ends with the world anyway


def summary(node: str) -> str:
    """What the node program leaves on a node that it found clean."""
    gpu = {"index": 0, "uuid": "GPU-0", "result": "Clean", "usedBytes": 0, "message": ""}
    files = {"removedCount": 0, "keptCount": 0, "bytesFreed": 0}
    head = {"schema": "cleanslate.dev/report/v1", "verb": "reset", "result": "Clean", "exitCode": 0, "host": node}
    more = {"durationSeconds": 0.2, "message": "clean as measured", "gpus": [gpu], "processes": [], "warnings": []}
    return json.dumps(head | more | {"sharedMemory": files, "caches": files, "logs": files, "omitted": {}})


def resets_take(seconds: float) -> tuple[Rule, ...]:
    """Rules: each node's reset ends clean after so long, and other pods run until they are deleted."""
    says = {node: behaviours.init_says(summary(node), after_s=seconds) for node in NODES}
    return tuple(Rule(node=node, namespace=SPACE, behaviour=one) for node, one in says.items())


def resets_never_end() -> Rule:
    """The rule of resets that go on until their pod is deleted."""
    return Rule(namespace=SPACE, behaviour=behaviours.init_never_ends())


@dataclass(slots=True)
class Witness:
    """Which resets ran: the pods whose reset container a kubelet started, by the reset's UID and the node."""

    api: PlainApi
    workers: ThreadPoolExecutor
    runs: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    _watch: Future[Any] | None = None
    _mark: str = ""

    def watch(self) -> None:
        """Begins to look, until a pod of a new name comes: by then all that was before is seen."""
        self._mark = f"mark-{secrets.token_hex(4)}"
        self._watch = self.workers.submit(self.api.until, PODS, self._see, timeout_s=_LIFE_S)

    def of(self, uid: str) -> dict[str, int]:
        """How many pods have run the reset, by node: all up to now."""
        self.api.ask("POST", PODS, _mark(self._mark))
        assert self._watch
        self._watch.result(END_S)
        self.api.ask("DELETE", f"{PODS}/{self._mark}", {"gracePeriodSeconds": 0})
        self.watch()
        return {node: len(pods) for (one, node), pods in self.runs.items() if one == uid}

    def _see(self, pod: Object) -> bool:
        ran = any({"running", "terminated"} & one["state"].keys() for one in _inits(pod))
        uid = pod["metadata"].get("labels", {}).get(names.RESET_UID)
        if ran and uid:
            self.runs.setdefault((uid, pod["spec"]["nodeName"]), set()).add(pod["metadata"]["uid"])
        return bool(pod["metadata"]["name"] == self._mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWorld:
    """Three nodes, and the means to run operators and resets on them."""

    cluster: Cluster
    api: PlainApi
    fakes: FakeNodes
    witness: Witness
    workers: ThreadPoolExecutor
    folder: Path

    @property
    def kubectl(self) -> Kubectl:
        """kubectl as administrator, past all proxies."""
        return self.cluster.kubectl

    def proxy(self) -> FaultProxy:
        """A fault proxy, not started, for one operator."""
        keys = self.cluster.authority.folder
        upstream = json.loads(self.cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        return FaultProxy(
            upstream=upstream,
            ca=self.cluster.authority.certificate,
            certificate=keys / "apiserver.crt",
            key=keys / "apiserver.key",
            identity=self.cluster.kubeconfig,
            folder=self.folder,
        )

    def operator(self, proxy: FaultProxy, *flags: str, identity: str = "operator-0") -> OperatorProcess:
        """An operator, not started, that reaches the API server through a proxy."""
        log = self.folder / f"{identity}.log"
        config, image = proxy.kubeconfig(), "localhost/reset:1"
        return OperatorProcess(
            kubeconfig=config, image=image, log=log, namespace=SYSTEM, identity=identity, flags=flags
        )

    def begin(self, name: str, **spec: Any) -> str:
        """Creates a reset of the three nodes in waves of two, or of `nodeName`; returns its UID."""
        nodes = {} if "nodeName" in spec else {"nodeSelector": {POOL: "gpu"}}
        wanted = {"rollout": {"maxConcurrent": 2}, **nodes, **spec}
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": wanted}
        return str(self.api.ask("POST", RESETS, body)["metadata"]["uid"])

    def until(self, name: str, is_so: Any, *, timeout_s: float = END_S) -> Object:
        """The reset of this name, once that is so of it. Raises TimeoutError with the last that was seen."""
        return self.api.until(RESETS, is_so, timeout_s=timeout_s, fieldSelector=f"metadata.name={name}")

    def ended(self, name: str) -> Future[Object]:
        """The reset of this name as it is once the operator is through with it."""
        return self.workers.submit(self.until, name, is_let_go)

    def gone(self, one: Object) -> Future[Object]:
        """The last that was seen of a reset, once it is no more; `one` is what it was before."""
        name, version = one["metadata"]["name"], one["metadata"]["resourceVersion"]
        which = {"fieldSelector": f"metadata.name={name}", "resourceVersion": version}
        return self.workers.submit(self.api.until, RESETS, lambda _: True, timeout_s=END_S, kinds={"DELETED"}, **which)

    def assert_reset_once(self, uid: str, one: Object, where: str = "", nodes: Sequence[str] = NODES) -> None:
        """The reset is Complete, each of the nodes was reset once, and nothing is left of it."""
        status = one["status"]
        assert (status["phase"], status["nodes"]["clean"]) == ("Complete", len(nodes)), f"{where}: {status}"
        assert self.witness.of(uid) == dict.fromkeys(nodes, 1), where
        assert self.left() == [], where

    def left(self) -> list[str]:
        """Whatever an operator makes for resets that is there now, once the garbage collector has taken the pods."""
        self.kubectl.within(SPACE).wait("delete", "pods", f"--selector={names.RESET_UID}")
        selector = f"?labelSelector={names.RESET_UID}"
        made = [
            one for path in (DAEMON_SETS, CONFIG_MAPS, LOCKS) for one in self.api.ask("GET", path + selector)["items"]
        ]
        nodes = self.api.ask("GET", "/api/v1/nodes")["items"]
        tainted = [one for one in nodes if names.TAINT in {taint["key"] for taint in one["spec"].get("taints", ())}]
        held = [one for one in self.api.ask("GET", RESETS)["items"] if one["metadata"].get("finalizers")]
        return sorted(one["metadata"]["name"] for one in (*made, *tainted, *held))

    def forget(self, name: str) -> None:
        """Deletes a reset; it goes at once if the operator has let go of it. Raises KubectlError."""
        self.kubectl.delete("gpunoderesets", name)

    def clear(self) -> None:
        """Takes away what a test that failed has left, so that the next one does not fail for it. Raises KubectlError."""
        stuck = [one["metadata"]["name"] for one in self.api.ask("GET", RESETS)["items"]]
        for name in stuck:
            self.kubectl("patch", "gpunoderesets", name, "--type=merge", "--patch", '{"metadata":{"finalizers":null}}')
            self.forget(name)
        if stuck:
            for node in NODES:
                self.kubectl("patch", "node", node, "--type=merge", "--patch", '{"spec":{"taints":null}}')
            made = ("daemonsets,configmaps,leases,pods", f"--selector={names.RESET_UID}")
            self.kubectl.within(SPACE).delete(*made)


@contextmanager
def operator_world(name: str, folder: Path) -> Iterator[OperatorWorld]:
    """A control plane at a place of its own, gone with the block."""
    place = Place(name=name)
    with ExitStack() as stack:
        stack.callback(cluster.stop, place)
        plane = cluster.start(place, node_count=0)
        _prepare(plane.kubectl)
        pool = {POOL: "gpu"}
        fakes = FakeNodes(plane.kubeconfig, count=len(NODES), labels=pool, rules=resets_take(0.2), keep=True)
        stack.enter_context(fakes)
        fakes.wait_registered(END_S)
        api, workers = PlainApi(plane.kubeconfig), ThreadPoolExecutor(8)
        witness = Witness(api, workers)
        witness.watch()
        yield OperatorWorld(cluster=plane, api=api, fakes=fakes, witness=witness, workers=workers, folder=folder)


def is_let_go(one: Object) -> bool:
    """Whether nobody will do anything for this reset any more."""
    metadata = one["metadata"]
    return names.ENDED in metadata.get("annotations", {}) and not metadata.get("finalizers")


def _prepare(kubectl: Kubectl) -> None:
    """What the chart would have made."""
    kubectl("apply", "--server-side", "-f", str(_CRD))
    kubectl.wait("condition=Established", "crd/gpunoderesets.cleanslate.dev")
    kubectl(
        "get", "--raw", f"{RESETS}?resourceVersion=0"
    )  # waits until the API server can serve watches of the new kind
    for space in (SYSTEM, SPACE, WORK):
        kubectl("create", "namespace", space)
        kubectl.within(space).wait("create", "serviceaccount/default")
    kubectl.within(SPACE)("create", "serviceaccount", "cleanslate-reset")


def _inits(pod: Object) -> list[Object]:
    return list(pod.get("status", {}).get("initContainerStatuses", ()))


def _mark(name: str) -> Object:
    """A pod that no node takes."""
    spec = {"containers": [{"name": "none", "image": "none"}], "nodeSelector": {"none": "none"}}
    return {"metadata": {"name": name}, "spec": spec}
