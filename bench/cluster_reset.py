"""(f) A reset on the test cluster, from its creation to Complete, with its parts, beside a bare DaemonSet; the operator's memory.

Real API server, scheduler, kubelet and containerd; two nodes, images present. Run by `run.py`.
"""

import json
import pathlib
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import figures
from cleanslate_operator import daemonset, names, nodeplan
from cleanslate_operator.reset import Reset, ResetSpec
from cleanslate_operator.settings import Settings
from cleanslate_operator.views import Started
from cluster import binaries, cluster, images, installed, tenants
from cluster.fakenodes.plainapi import PlainApi
from cluster.helm import Helm
from cluster.kubectl import Kubectl
from cluster.places import Place

ROUNDS = 15
GOAL_S, GOAL_MB = 2.0, 130.0
# What began in the last 5 s, and since the kubelet's last sign of life (10 s at most), is nobody's leftover.
OLD_ENOUGH_S = 16.0
LIMIT_S = 60.0
SPACE = "bench"
OPERATORS = "--selector=app.kubernetes.io/component=operator"
RESETS = f"/apis/{names.API_VERSION}/{names.PLURAL}"
PODS = "/api/v1/namespaces/cleanslate-resets/pods"
DAEMON_SETS = "/apis/apps/v1/namespaces/cleanslate-resets/daemonsets"
CONFIG_MAPS = "/api/v1/namespaces/cleanslate-resets/configmaps"
ROLLUP = "print(open('/proc/1/smaps_rollup').read())"
Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One reset in seconds; all together they are its time."""

    schedule_s: float
    start_s: float
    reset_s: float
    report_s: float

    @property
    def total_s(self) -> float:
        """From creation to Complete."""
        return self.schedule_s + self.start_s + self.reset_s + self.report_s


class Marks:
    """When a reset pod was bound to its node, and when its result was told, as a watch of the API sees it."""

    def __init__(self) -> None:
        self.bound_s = self.told_s = 0.0

    def see(self, pod: Object) -> bool:
        """Whether this was the last that is waited for."""
        now_s = time.monotonic()
        if pod["spec"].get("nodeName"):
            self.bound_s = self.bound_s or now_s
        states = pod["status"].get("initContainerStatuses", ())
        if any("terminated" in one["state"] for one in states):
            self.told_s = now_s
        return bool(self.told_s)


class Bench:
    """The cluster with Clean Slate installed, and leftovers to be made on it."""

    def __init__(self, running: cluster.Cluster, workers: ThreadPoolExecutor) -> None:
        self.api, self.kubectl, self._workers = PlainApi(running.kubeconfig), running.kubectl, workers
        self._leaks: dict[str, tuple[str, float]] = {}
        self._count = 0

    def leak(self, node: str) -> None:
        """One engine on one GPU whose front end is dead, and its resource tracker; what was there before is gone."""
        self.drop(node)
        self._count += 1
        name = f"server-{self._count}"
        command = ["/opt/server/outlive", "python3", "/opt/server/vllm", "serve", "tiny-model"]
        server = tenants.container("server", images.reference("server"), gpus=1, command=command)
        kubectl = self.kubectl.within(SPACE)
        kubectl.create(tenants.pod(name, server, node=node))
        told = json.loads(_first_line(kubectl, name))
        kubectl.execute(name, "kill", "-KILL", str(told["front_end"]))
        self._leaks[node] = (name, time.monotonic())

    def drop(self, node: str) -> None:
        """Takes the leaking pod away."""
        if node in self._leaks:
            self.kubectl.within(SPACE).delete("pod", self._leaks.pop(node)[0])

    def reset(self, node: str) -> Parts:
        """Resets a node whose leftover is old enough, once it is."""
        marks, watch = self._watch()
        time.sleep(max(0.5, self._leaks[node][1] + OLD_ENOUGH_S - time.monotonic()))
        begun_s = time.monotonic()
        made = self.api.ask("POST", RESETS, _reset(f"bench-{self._count}", node))
        found = self._complete(made["metadata"]["name"])
        end_s = time.monotonic()
        self._told(watch)
        self.kubectl.within("cleanslate-resets").wait("delete", "pods", f"--selector={names.RESET_UID}")
        (result,) = found["status"]["results"]
        _must_have_ended([one["outcome"] for one in result["processes"]], result)
        self.kubectl.delete("gnr", made["metadata"]["name"])
        took_s = float(result["durationSeconds"])
        return Parts(
            schedule_s=marks.bound_s - begun_s,
            start_s=marks.told_s - marks.bound_s - took_s,
            reset_s=took_s,
            report_s=end_s - marks.told_s,
        )

    def bare(self, node: str) -> float:
        """The same pod by a bare DaemonSet: seconds from its creation until its message is in the API."""
        self.leak(node)
        one = Reset(name="bare", uid=str(uuid.uuid4()), generation=1, spec=ResetSpec())
        covered = self._plan(one, node)
        made = daemonset.render(one, covered, settings())
        marks, watch = self._watch()
        time.sleep(0.5)  # the watch has begun by then
        begun_s = time.monotonic()
        self.api.ask("POST", DAEMON_SETS, _alone(made))
        last = self._told(watch)
        (message,) = tenants.messages(last).values()
        _must_have_ended([one["outcome"] for one in message["processes"]], message)
        self._undo(one, made)
        return marks.told_s - begun_s

    def _plan(self, one: Reset, node: str) -> dict[str, Started]:
        """A plan without a margin: the leftover need not be old."""
        now_s = time.time()
        pods = self.kubectl.items("pods", "--all-namespaces", f"--field-selector=spec.nodeName={node}")
        plans = {node: nodeplan.document(pods, (), snapshot_time_s=now_s, margin_s=0)}
        (made,) = nodeplan.config_maps(one, plans)
        self.api.ask("POST", CONFIG_MAPS, _alone(made))
        return {node: Started(plan=made["metadata"]["name"], planned_s=now_s)}

    def _undo(self, one: Reset, made: Object) -> None:
        kubectl, mine = self.kubectl.within("cleanslate-resets"), f"--selector={names.RESET_UID}={one.uid}"
        kubectl.delete("daemonset", made["metadata"]["name"])
        kubectl.delete("configmap", mine)
        kubectl.wait("delete", "pod", mine)

    def _watch(self) -> tuple[Marks, Future[Object]]:
        """Looks out for the next reset pod; none is there."""
        marks = Marks()
        return marks, self._workers.submit(self.api.until, PODS, marks.see, timeout_s=2 * LIMIT_S)

    def _told(self, watch: Future[Object]) -> Object:
        """The reset pod once it has told its result. Raises RuntimeError with what it is if it never does."""
        try:
            return watch.result(LIMIT_S)
        except TimeoutError as error:
            said = self.kubectl.within("cleanslate-resets")("describe", "daemonsets,pods")
            raise RuntimeError(f"reset pod: no result in {LIMIT_S:.0f} s: {said[-4000:]}") from error

    def _complete(self, name: str) -> Object:
        selector = {"fieldSelector": f"metadata.name={name}"}
        found = self.api.until(RESETS, _has_ended, timeout_s=LIMIT_S, **selector)
        if found["status"]["phase"] != "Complete":
            raise RuntimeError(f"gnr {name}: {found['status']['phase']}: {found['status']['message']}")
        return found


def settings() -> Settings:
    """The operator's, as the chart gives them."""
    return Settings(image=images.reference("node-program"), image_pull_policy="Never")


def memory_kb(kubectl: Kubectl) -> list[tuple[int, int]]:
    """Resident and proportional memory of each replica, from its own smaps_rollup."""
    space, taken = kubectl.within("cleanslate-system"), []
    for pod in space.items("pods", OPERATORS):
        text = space.execute(pod["metadata"]["name"], "python3", "-c", ROLLUP)
        rows = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if ":" in line}
        taken.append((int(rows["Rss"]), int(rows["Pss"])))
    return taken


def memory_figure(what: str, taken: list[tuple[int, int]]) -> figures.Figure:
    """The larger replica, which is the one that leads."""
    megabytes = [(rss * 1024 / 1e6, pss * 1024 / 1e6) for rss, pss in taken]
    largest = max(rss for rss, _ in megabytes)
    note = "; ".join(f"RSS {rss:.1f} PSS {pss:.1f} MB" for rss, pss in megabytes)
    return figures.Figure(
        what=what,
        ours=f"{largest:.1f} MB",
        goal=f"<= {GOAL_MB:.0f} MB",
        met=largest <= GOAL_MB,
        note=f"replicas: {note}",
    )


def time_figures(resets: list[Parts], bares: list[float]) -> None:
    """The whole against the goal, the whole against a bare DaemonSet, and each part."""
    what = "apply to Complete, one node, one leftover engine"
    totals = [one.total_s for one in resets]
    figures.within(what, totals, limit_s=GOAL_S, note=f"{len(totals)} rounds").emit()
    figures.Figure(
        what=f"{what}, against a bare pod",
        ours=figures.spread(totals),
        against="DaemonSet with the same pod, until its message is in the API",
        theirs=figures.spread(bares),
        ratio=f"{statistics.median(totals) / statistics.median(bares):.2f} x as long",
    ).emit()
    parts: Mapping[str, list[float]] = {
        "schedule: creation until a reset pod is bound to the node": [one.schedule_s for one in resets],
        "start: until the program runs, and from its end until the API has its message": [
            one.start_s for one in resets
        ],
        "reset: the node program's own time": [one.reset_s for one in resets],
        "report: from the message to Complete": [one.report_s for one in resets],
    }
    for part, taken in parts.items():
        figures.Figure(what=f"  {part}", ours=figures.spread(taken)).emit()


def measure(bench: Bench) -> None:
    """All rounds, on the two nodes in turn: the one's leftover gets old while the other is reset. The first does not count."""
    first, second = "node-1", "node-2"
    resets, bares = [], []
    bench.leak(first)
    for _ in range(ROUNDS + 1):
        bench.leak(second)
        resets.append(bench.reset(first))
        bares.append(bench.bare(first))
        print(f"bench: {resets[-1]}, bare {bares[-1]:.2f} s", file=sys.stderr, flush=True)
        first, second = second, first
    time_figures(resets[1:], bares[1:])


def _reset(name: str, node: str) -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {"nodeName": node},
    }


def _has_ended(one: Object) -> bool:
    return one.get("status", {}).get("phase") in {"Complete", "Failed"}


def _must_have_ended(outcomes: list[str], result: Object) -> None:
    """Both ways must give the right answer."""
    if "Ended" not in outcomes:
        raise RuntimeError(f"the leftover was not ended: {json.dumps(result)[:2000]}")


def _alone(made: Object) -> Object:
    """Without its owner, since there is no GPUNodeReset for it."""
    metadata = {key: value for key, value in made["metadata"].items() if key != "ownerReferences"}
    return made | {"metadata": metadata | {"namespace": "cleanslate-resets"}}


def _first_line(kubectl: Kubectl, pod: str) -> str:
    kubectl.wait("condition=Ready", f"pod/{pod}")
    return kubectl.first_line("logs", pod, "--follow")


def main() -> int:
    """A cluster of its own, gone at the end."""
    place = Place(name="bench")
    try:
        running = cluster.start(place)
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as workers:
            helm = Helm(program=binaries.helm(), folder=pathlib.Path(folder), kubeconfig=running.kubeconfig)
            installed.install(running.kubectl, helm)
            running.kubectl("create", "namespace", SPACE)
            memory_figure("operator, idle, two nodes, resident memory (RSS)", memory_kb(running.kubectl)).emit()
            measure(Bench(running, workers))
            memory_figure(f"the same after {ROUNDS + 1} resets", memory_kb(running.kubectl)).emit()
    finally:
        cluster.stop(place)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
