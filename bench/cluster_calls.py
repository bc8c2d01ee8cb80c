"""(g) API calls for a reset of N nodes, counted by a proxy between the operator and a real API server; nodes are simulated."""

import collections
import json
import pathlib
import tempfile
import time
from contextlib import ExitStack

import figures
from cleanslate_operator import names
from cluster import cluster, operatorworld, places
from cluster.fakenodes import behaviours
from cluster.fakenodes.behaviours import Rule
from cluster.fakenodes.handle import FakeNodes
from cluster.fakenodes.plainapi import PlainApi
from cluster.faultproxy import FaultProxy
from cluster.kubectl import Kubectl
from cluster.operatorprocess import OperatorProcess
from cluster.places import Place

COUNTS = (10, 100)
SPACES = ("cleanslate-system", "cleanslate-resets")
RESETS = f"/apis/{names.API_VERSION}/{names.PLURAL}"
CRD = places.CHECKOUT / "crds" / "gpunodereset.yaml"
IN_POOL = "bench.cleanslate.dev/pool"
LIMIT_S = 240.0


def prepare(kubectl: Kubectl) -> None:
    """What the chart would have made."""
    kubectl("apply", "--server-side", "-f", str(CRD))
    kubectl.wait("condition=Established", "crd/gpunoderesets.cleanslate.dev")
    for space in SPACES:
        kubectl("create", "namespace", space)
    kubectl.within(SPACES[1])("create", "serviceaccount", "cleanslate-reset")


def make_nodes(running: cluster.Cluster) -> FakeNodes:
    """Each resets itself in 0.2 s and says that it is clean."""
    count = max(COUNTS)
    resets = [
        Rule(node=node, namespace=SPACES[1], behaviour=behaviours.init_says(operatorworld.summary(node), after_s=0.2))
        for node in (f"sim-{index:04d}" for index in range(count))
    ]
    subsets = {"sim-000?": {f"{IN_POOL}-10": "yes"}, "sim-*": {f"{IN_POOL}-100": "yes"}}
    return FakeNodes(running.kubeconfig, count=count, subsets=subsets, rules=resets, keep=True)


def make_proxy(running: cluster.Cluster, folder: pathlib.Path) -> FaultProxy:
    """It hands everything on, and remembers it."""
    keys = running.authority.folder
    return FaultProxy(
        upstream=json.loads(running.kubeconfig.read_text())["clusters"][0]["cluster"]["server"],
        ca=running.authority.certificate,
        certificate=keys / "apiserver.crt",
        key=keys / "apiserver.key",
        identity=running.kubeconfig,
        folder=folder,
    )


def reset(api: PlainApi, proxy: FaultProxy, count: int) -> figures.Figure:
    """One reset with the default waves of ten; everything that the operator asks meanwhile counts, its Lease too."""
    name, begun_s, clock_s = f"calls-{count}", time.time(), time.monotonic()
    body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}}
    api.ask("POST", RESETS, body | {"spec": {"nodeSelector": {f"{IN_POOL}-{count}": "yes"}}})
    found = api.until(RESETS, operatorworld.is_let_go, timeout_s=LIMIT_S, fieldSelector=f"metadata.name={name}")
    took_s = time.monotonic() - clock_s
    if found["status"]["nodes"]["clean"] != count:
        raise RuntimeError(f"gnr {name}: {found['status']['nodes']}: {found['status']['message']}")
    return figure(count, [f"{one.verb} {one.resource}" for one in proxy.requests(since_s=begun_s)], took_s)


def figure(count: int, asked: list[str], took_s: float) -> figures.Figure:
    """The number against the goal, and what it consists of."""
    most = 12 * count + 60
    kinds = ", ".join(f"{number} {kind}" for kind, number in collections.Counter(asked).most_common(12))
    return figures.Figure(
        what=f"API calls for a reset of {count} nodes",
        ours=str(len(asked)),
        ratio=f"{len(asked) / count:.1f} a node",
        goal=f"<= {most}",
        met=len(asked) <= most,
        note=f"{took_s:.1f} s in waves of 10, simulated nodes that take 0.2 s; {kinds}",
    )


def measure(running: cluster.Cluster, stack: ExitStack) -> None:
    """The operator as a process of this machine, with rights that leave nothing out; it leads before the first reset."""
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    prepare(running.kubectl)
    nodes = stack.enter_context(make_nodes(running))
    nodes.wait_registered(LIMIT_S)
    proxy = stack.enter_context(make_proxy(running, folder))
    log = folder / "operator.log"
    stack.enter_context(OperatorProcess(kubeconfig=proxy.kubeconfig(), image="localhost/reset:1", log=log))
    api = PlainApi(running.kubeconfig)
    proxy.wait_for_requests(verb="watch", resource=names.PLURAL, deadline_s=LIMIT_S)
    for count in COUNTS:
        reset(api, proxy, count).emit()


def main() -> int:
    """A control plane of its own, gone at the end."""
    place = Place(name="bench-calls")
    with ExitStack() as stack:
        stack.callback(cluster.stop, place)
        measure(cluster.start(place, node_count=0), stack)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
