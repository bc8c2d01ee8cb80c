"""A cluster in memory, for the operator's own code: an API server with versions, UIDs and preconditions, a DaemonSet
controller, kubelets that run reset pods, and a garbage collector. It refuses what a real one refuses, and can lose the operator
at any write: before it is done (`Killed` is raised and nothing is written), or after.
"""

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cleanslate_operator import controller, names, settings
from cleanslate_operator.api import Cause, Conflict, NotFound, Throttled
from cleanslate_operator.metrics import Metrics

Object = dict[str, Any]
RESETS = "/apis/cleanslate.dev/v1alpha1/gpunoderesets"
SPACE = "cleanslate-resets"
PODS = f"/api/v1/namespaces/{SPACE}/pods"
DAEMON_SETS = f"/apis/apps/v1/namespaces/{SPACE}/daemonsets"
MAPS = f"/api/v1/namespaces/{SPACE}/configmaps"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SPACE}/leases"
NODES = "/api/v1/nodes"
BEATS = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
BEGIN_S = 1_800_000_000.0


class Killed(BaseException):
    """The operator's end, at a write."""


def summary(node: str, *, result: str = "Clean", code: int = 0, **more: Any) -> str:
    """What the node program leaves as its result."""
    gpus = [{"index": 0, "uuid": "GPU-0", "result": "Clean", "usedBytes": 0, "message": ""}]
    files = {"removedCount": 0, "keptCount": 0, "bytesFreed": 0}
    found = {
        "schema": "cleanslate.dev/report/v1",
        "verb": "reset",
        "startedAt": "2027-01-15T08:00:00Z",
        "durationSeconds": 0.2,
        "result": result,
        "exitCode": code,
        "host": node,
        "message": f"{result.lower()} as measured",
        "sharedMemory": files,
        "caches": files,
        "logs": files,
        "gpus": gpus,
        "processes": [],
        "warnings": [],
        "omitted": {},
    }
    return json.dumps(found | more)


class Cluster:
    """The API server and what runs behind it. Time stands still but for `pass_s`."""

    def __init__(self, *nodes: str) -> None:
        self.now_s = BEGIN_S
        self.objects: dict[str, Object] = {}
        self.counter = itertools.count(1)
        self.writes = 0
        self.kill: tuple[int, str] | None = None  # the number of a write, and `before` or `after`
        self.fail: Callable[[str, str], None] = lambda verb, path: None
        self.runs: list[str] = []  # the nodes of whatever resets ran, in order
        self.budgets: dict[str, str] = {}  # pods that may not be evicted, and by which budget
        self.answers: dict[str, Callable[[], str | None]] = {}  # what a node's reset tells; None: nothing yet
        for node in nodes:
            self.add_node(node)

    # What a test makes.

    def add_node(self, name: str, **labels: str) -> None:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2027-01-01T00:00:00Z"}
        metadata = {"name": name, "labels": labels}
        self._put(f"{NODES}/{name}", {"metadata": metadata, "spec": {}, "status": {"conditions": [ready]}})
        self._put(f"{BEATS}/{name}", {"metadata": {"name": name}, "spec": {"renewTime": _time(self.now_s - 2)}})

    def add_reset(self, name: str, **spec: Any) -> str:
        metadata = {"name": name, "generation": 1, "creationTimestamp": _time(self.now_s)}
        return str(self._put(f"{RESETS}/{name}", {"metadata": metadata, "spec": spec})["metadata"]["uid"])

    def add_pod(self, name: str, node: str, *, gpus: int = 1) -> None:
        container = {"name": "server", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
        metadata = {"name": name, "namespace": "default"}
        self._put(
            f"/api/v1/namespaces/default/pods/{name}",
            {
                "metadata": metadata,
                "spec": {"nodeName": node, "containers": [container]},
                "status": {"phase": "Running"},
            },
        )

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds

    def beat(self) -> None:
        """All kubelets renew their leases."""
        for path, one in self.objects.items():
            if path.startswith(BEATS):
                one["spec"]["renewTime"] = _time(self.now_s)

    # What a test looks at.

    def reset(self, name: str) -> Object | None:
        return self.objects.get(f"{RESETS}/{name}")

    def status(self, name: str) -> Object:
        return dict(self.objects[f"{RESETS}/{name}"].get("status", {}))

    def left(self) -> list[str]:
        """Whatever a reset makes that is there now."""
        made = [path for path in self.objects if path.startswith((PODS, DAEMON_SETS, MAPS, LEASES))]
        tainted = [path for path, one in self.objects.items() if path.startswith(NODES) and one["spec"].get("taints")]
        held = [
            path for path, one in self.objects.items() if path.startswith(RESETS) and one["metadata"].get("finalizers")
        ]
        return sorted(made + tainted + held)

    # What runs by itself.

    def settle(self) -> None:
        """DaemonSet controller, kubelets and garbage collector, until nothing changes."""
        while any([self._daemon_sets(), self._collect(), self._kubelets()]):
            pass

    def _daemon_sets(self) -> bool:
        changed = False
        for path, one in list(self.objects.items()):
            if not path.startswith(DAEMON_SETS):
                continue
            terms = one["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]["nodeSelectorTerms"]
            wanted = {term["matchFields"][0]["values"][0] for term in terms if "matchFields" in term}
            wanted = {node for node in wanted if f"{NODES}/{node}" in self.objects}
            uid = one["metadata"]["uid"]
            have = {pod["spec"]["nodeName"]: name for name, pod in self._of(PODS) if _owner(pod) == uid}
            for node in sorted(wanted - have.keys()):
                changed = True
                self._make_pod(one, node)
            for node in have.keys() - wanted:
                changed = True
                del self.objects[have[node]]
        return changed

    def _make_pod(self, daemon_set: Object, node: str) -> None:
        template = copy.deepcopy(daemon_set["spec"]["template"])
        owner = {"kind": "DaemonSet", "uid": daemon_set["metadata"]["uid"], "controller": True}
        name = f"{daemon_set['metadata']['name']}-{next(self.counter)}"
        metadata = {
            "name": name,
            "namespace": SPACE,
            "ownerReferences": [owner],
            "creationTimestamp": _time(self.now_s),
        }
        metadata["labels"] = template["metadata"]["labels"]
        spec = template["spec"] | {"nodeName": node}
        self._put(f"{PODS}/{name}", {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})

    def _kubelets(self) -> bool:
        changed = False
        for _, pod in self._of(PODS):
            node = pod["spec"]["nodeName"]
            if "initContainerStatuses" in pod["status"] or not self._has_plan(pod, node):
                continue
            answer = self.answers.get(node, lambda node=node: summary(node))()
            if answer is None:
                continue
            changed = True
            self.runs.append(node)
            ended = {"exitCode": 0, "message": answer, "finishedAt": _time(self.now_s)[:19] + "Z"}
            pod["status"] = {
                "phase": "Running",
                "initContainerStatuses": [{"name": "reset", "state": {"terminated": ended}}],
            }
        return changed

    def _has_plan(self, pod: Object, node: str) -> bool:
        volume = next(one for one in pod["spec"]["volumes"] if one["name"] == "plans")
        sources = [source["configMap"] for source in volume["projected"]["sources"]]
        named = {(source["name"], item["key"]) for source in sources for item in source["items"]}
        return any(
            f"{node}.json" == key and key in self.objects.get(f"{MAPS}/{name}", {}).get("data", {})
            for name, key in named
        ) and all(f"{MAPS}/{source['name']}" in self.objects for source in sources)

    def _collect(self) -> bool:
        uids = {one["metadata"]["uid"] for one in self.objects.values()}
        orphans = [path for path, one in self.objects.items() if (owner := _owner(one)) and owner not in uids]
        for path in orphans:
            del self.objects[path]
        return bool(orphans)

    def _of(self, prefix: str) -> list[tuple[str, Object]]:
        return [(path, one) for path, one in self.objects.items() if path.startswith(prefix)]

    def _put(self, path: str, body: Object) -> Object:
        metadata = body["metadata"]
        metadata.setdefault("uid", f"{next(self.counter):08x}-0000-4000-8000-000000000000")
        metadata["resourceVersion"] = str(next(self.counter))
        self.objects[path] = body
        return body


class FakeApi:
    """The operator's client of a Cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def get(self, path: str) -> Object:
        self.cluster.fail("get", path)
        return copy.deepcopy(self._at(path))

    async def list(self, path: str, params: dict[str, str] | None = None) -> tuple[list[Object], str]:
        self.cluster.fail("list", path)
        params = params or {}
        prefix = "/api/v1/namespaces/" if path == "/api/v1/pods" else f"{path}/"
        found = [one for at, one in self.cluster.objects.items() if at.startswith(prefix) and _is_listed(path, at)]
        return [copy.deepcopy(one) for one in found if _selected(one, params)], "1"

    async def create(self, path: str, body: Object) -> Object:
        return await self._write("create", path, lambda: self._create(path, body))

    async def replace(self, path: str, body: Object) -> Object:
        return await self._write("replace", path, lambda: self._replace(path, body))

    async def apply(self, path: str, body: Object) -> Object:
        return await self._write("apply", path, lambda: self._apply(path, body))

    async def merge_patch(self, path: str, patch: Object) -> Object:
        return await self._write("patch", path, lambda: self._patch(path, patch))

    async def delete(self, path: str, *, uid: str | None = None) -> Object:
        return await self._write("delete", path, lambda: self._delete(path, uid))

    async def delete_collection(self, path: str, label_selector: str) -> Object:
        return await self._write("deletecollection", path, lambda: self._delete_all(path, label_selector))

    async def _write(self, verb: str, path: str, do: Callable[[], Object]) -> Object:
        self.cluster.fail(verb, path)
        self.cluster.writes += 1
        if self.cluster.kill == (self.cluster.writes, "before"):
            raise Killed
        done = copy.deepcopy(do())
        if self.cluster.kill == (self.cluster.writes, "after"):
            raise Killed
        return done

    def _at(self, path: str) -> Object:
        if path not in self.cluster.objects:
            raise NotFound(request=path, status=404, reason="NotFound", message="not found")
        return self.cluster.objects[path]

    def _create(self, path: str, body: Object) -> Object:
        if path.endswith("/eviction"):
            return self._evict(path.removesuffix("/eviction"))
        at = f"{path}/{body['metadata']['name']}"
        if at in self.cluster.objects:
            raise Conflict(request=path, status=409, reason="AlreadyExists", message="already exists")
        body = copy.deepcopy(body)
        body["metadata"].pop("resourceVersion", None)
        return self.cluster._put(at, body)

    def _evict(self, path: str) -> Object:
        pod = self._at(path)
        if budget := self.cluster.budgets.get(pod["metadata"]["name"]):
            cause = Cause(reason="DisruptionBudget", message=f"The disruption budget {budget} needs 1 healthy pods")
            raise Throttled(request=path, status=429, message="Cannot evict pod", causes=(cause,))
        del self.cluster.objects[path]
        return {"kind": "Status"}

    def _replace(self, path: str, body: Object) -> Object:
        now = self._at(path)
        _check(now, body["metadata"])
        assert body["metadata"].get("resourceVersion"), f"{path} is replaced without a version"
        kept = {key: now["metadata"][key] for key in ("uid",)}
        return self.cluster._put(path, copy.deepcopy(body) | {"metadata": copy.deepcopy(body["metadata"]) | kept})

    def _apply(self, path: str, body: Object) -> Object:
        at = path.removesuffix("/status")
        now = self._at(at)
        _check(now, body["metadata"])
        return self.cluster._put(at, now | {"status": copy.deepcopy(body["status"])})

    def _patch(self, path: str, patch: Object) -> Object:
        now = self._at(path)
        _check(now, patch["metadata"])
        changed = _merged(now, patch)
        done = self.cluster._put(path, changed)
        if "deletionTimestamp" in changed["metadata"] and not changed["metadata"].get("finalizers"):
            del self.cluster.objects[path]
        return done

    def _delete(self, path: str, uid: str | None) -> Object:
        now = self._at(path)
        if uid is not None and now["metadata"]["uid"] != uid:
            raise Conflict(
                request=path, status=409, reason="Conflict", message="the UID in the precondition does not match"
            )
        if now["metadata"].get("finalizers"):
            now["metadata"]["deletionTimestamp"] = _time(self.cluster.now_s)
        else:
            del self.cluster.objects[path]
        return {"kind": "Status"}

    def _delete_all(self, path: str, label_selector: str) -> Object:
        chosen = [
            at
            for at, one in self.cluster.objects.items()
            if at.startswith(f"{path}/") and _selected(one, {"labelSelector": label_selector})
        ]
        for at in chosen:
            del self.cluster.objects[at]
        return {"kind": "Status"}


@dataclasses.dataclass
class FakeRecorder:
    """Remembers what was told."""

    told: list[tuple[str, str, bool]] = dataclasses.field(default_factory=list)

    def post(self, *, name: str, uid: str, reason: str, message: str, warning: bool = False) -> None:
        assert name and uid
        self.told.append((reason, message, warning))


class Operator:
    """One process of the operator, which dies at `Killed`."""

    def __init__(self, cluster: Cluster) -> None:
        self.recorder = FakeRecorder()
        chosen = settings.Settings(image="cleanslate:test")
        self.cluster = cluster
        self.controller = controller.Controller(
            FakeApi(cluster),  # type: ignore[arg-type]
            chosen,
            self.recorder,  # type: ignore[arg-type]
            Metrics(),
            lambda: cluster.now_s,
        )

    async def look(self, name: str) -> float | None:
        return await self.controller.reconcile(name)

    async def run(self, name: str, *, looks: int = 60, until: Callable[[], bool] = lambda: False) -> None:
        """Look again and again as the queue would, the cluster going on in between, until there is nothing more to do."""
        for _ in range(looks):
            self.cluster.settle()
            if until():
                return
            again_s = await self.look(name)
            self.cluster.settle()
            one = self.cluster.reset(name)
            if one is None or (
                names.ENDED in one["metadata"].get("annotations", {}) and not one["metadata"].get("finalizers")
            ):
                return
            self.cluster.pass_s(min(again_s if again_s is not None else 1.0, 2.0))
        raise AssertionError(f"{name} came to no end in {looks} looks: {self.cluster.status(name)}")


def _check(now: Object, stated: Object) -> None:
    for key in ("uid", "resourceVersion"):
        if key in stated and stated[key] != now["metadata"][key]:
            raise Conflict(request=now["metadata"]["name"], status=409, reason="Conflict", message=f"{key} differs")


def _merged(now: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(now, dict):
        return copy.deepcopy(patch)
    merged = {key: value for key, value in now.items() if key not in patch}
    changed = {key: _merged(now.get(key, {}), value) for key, value in patch.items() if value is not None}
    return merged | changed


def _selected(one: Object, params: dict[str, str]) -> bool:
    labels = one["metadata"].get("labels", {})
    wanted = [part.split("=") for part in params.get("labelSelector", "").split(",") if part]
    key, _, value = params.get("fieldSelector", "").partition("=")
    fields = {"": "", "spec.nodeName": one.get("spec", {}).get("nodeName"), "metadata.name": one["metadata"]["name"]}
    return all(labels.get(label) == text for label, text in wanted) and fields[key] == value


def _is_listed(path: str, at: str) -> bool:
    return "/pods/" in at if path == "/api/v1/pods" else at.count("/") == path.count("/") + 1


def _owner(one: Object) -> str | None:
    return next((owner["uid"] for owner in one["metadata"].get("ownerReferences", ())), None)


def _time(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
