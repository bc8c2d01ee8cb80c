"""Reads what a decision rests on from the API server, and makes plain views of it. It only reads."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from cleanslate_operator import names, paths, plan, record, reset, results
from cleanslate_operator.api import Api, NotFound
from cleanslate_operator.noderesult import NodeResult
from cleanslate_operator.record import Record, RecordError
from cleanslate_operator.reset import Reset, SpecError
from cleanslate_operator.times import unix_s
from cleanslate_operator.views import DaemonSetView, GpuPod, Lock, NodeView, PodView, Refusal, Snapshot, Started

_GPU_RESOURCES = "nvidia.com/"
_GONE_PHASES = {"Succeeded", "Failed"}
Object = Mapping[str, Any]


class Reader:
    """Takes snapshots. Remembers nothing but the records, of which the operator is the only writer."""

    def __init__(self, api: Api, namespace: str, clock_s: Callable[[], float]) -> None:
        self._api, self._namespace, self._clock_s = api, namespace, clock_s

    async def read(self, name: str, known: Record | None = None) -> Snapshot | None:
        """What is known of a reset; None if there is none of that name. `known`: its record, if it was read before.

        Raises ApiError.
        """
        try:
            document = await self._api.get(paths.reset(name))
        except NotFound:
            return None
        one, problem = _understand(document)
        first = Snapshot(now_s=self._clock_s(), reset=one, status=_status_of(document), problem=problem)
        if one.ended:
            return await self._over(first)
        snapshot = await self._running(first, known)
        if snapshot.record or snapshot.problem or one.deleting or one.spec.suspend:
            return snapshot
        return replace(snapshot, targets=await self._targets(one))

    async def _over(self, first: Snapshot) -> Snapshot:
        """What a crash, or a write on its way when another leader took over, may have left of a reset that is over."""
        one = first.reset
        selector = {"labelSelector": f"{names.RESET_UID}={one.uid}"}
        daemon_set, locks, maps = await asyncio.gather(
            self._daemon_set(one),
            self._api.list(paths.leases(self._namespace), selector),
            self._api.list(paths.config_maps(self._namespace), selector),
        )
        return replace(first, daemon_set=daemon_set, locks=_locks(locks[0]), strays=bool(maps[0]))

    async def _running(self, first: Snapshot, known: Record | None) -> Snapshot:
        one = first.reset
        selector = {"labelSelector": f"{names.RESET_UID}={one.uid}"}
        if not one.has_finalizer:
            return first  # nothing was made yet
        daemon_set, pods, locks, found = await asyncio.gather(
            self._daemon_set(one),
            self._api.list(paths.pods(self._namespace), selector),
            self._api.list(paths.leases(self._namespace)),
            self._record(one, known),
        )
        problem = first.problem or (str(found) if isinstance(found, RecordError) else None)
        return replace(
            first,
            problem=problem,
            record=None if isinstance(found, RecordError) else found,
            daemon_set=daemon_set,
            pods=_pods(pods[0]),
            locks=await self._voided(one, _locks(locks[0])),
        )

    async def _voided(self, one: Reset, locks: dict[str, Lock]) -> dict[str, Lock]:
        """The same, with those marked whose holder is no more."""
        others = {lock.holder_name: lock.holder_uid for lock in locks.values() if lock.holder_uid not in {one.uid, ""}}
        alive = await asyncio.gather(*(self._is_alive(name, uid) for name, uid in others.items()))
        void = {uid for uid, is_alive in zip(others.values(), alive, strict=True) if not is_alive}
        return {node: replace(lock, void=lock.holder_uid in void) for node, lock in locks.items()}

    async def _is_alive(self, name: str, uid: str) -> bool:
        try:
            holder = reset.identify(await self._api.get(paths.reset(name)))
        except NotFound:
            return False
        return holder.uid == uid and not holder.ended

    async def look(self, snapshot: Snapshot) -> Snapshot:
        """The same with the nodes that the next step needs to know. Raises ApiError."""
        if plan.sweeps(snapshot):
            tainted = {view.name: view for view in await self._tainted(snapshot.reset)}
            snapshot = replace(snapshot, nodes=dict(snapshot.nodes) | tainted, swept=True)
        whole = [node for node in plan.to_prepare(snapshot) if node not in snapshot.nodes]
        brief = [node for node in plan.to_look_at(snapshot) if node not in snapshot.nodes and node not in whole]
        views = await asyncio.gather(*map(self._node_with_pods, whole), *map(self._node, brief))
        nodes = dict(snapshot.nodes) | dict(zip(whole + brief, views, strict=True))
        now_s = self._clock_s()
        return replace(snapshot, nodes=nodes, checked=dict(snapshot.checked) | dict.fromkeys(brief, now_s), now_s=now_s)

    async def _targets(self, one: Reset) -> tuple[str, ...] | Refusal:
        """The nodes that the spec names, in order, or why there are none."""
        if one.spec.node_name:
            found = await self._node(one.spec.node_name)
            missing = f"there is no node {one.spec.node_name}; see kubectl get nodes"
            return (found.name,) if found else Refusal(reason="NodeNotFound", message=missing)
        selector = ",".join(f"{key}={value}" for key, value in sorted(one.spec.node_selector.items()))
        nodes, _ = await self._api.list(paths.nodes(), {"labelSelector": selector})
        if not nodes:
            return Refusal(
                reason="NoNodes", message=f"no node has the labels {selector}; see kubectl get nodes -l {selector}"
            )
        if len(nodes) > record.NODE_LIMIT:
            why = f"{len(nodes)} nodes have the labels {selector}, more than the {record.NODE_LIMIT} of one reset; select fewer"
            return Refusal(reason="TooManyNodes", message=why)
        return tuple(sorted(node["metadata"]["name"] for node in nodes))

    async def _record(self, one: Reset, known: Record | None) -> Record | RecordError | None:
        if known and known.uid == one.uid:
            return known
        roles = f"{names.RESET_UID}={one.uid},{names.ROLE}={names.ROLE_RECORD}"
        found, _ = await self._api.list(paths.config_maps(self._namespace), {"labelSelector": roles})
        try:
            return record.parse(found, one.uid)
        except RecordError as error:
            return error

    async def _daemon_set(self, one: Reset) -> DaemonSetView | None:
        try:
            found = await self._api.get(paths.daemon_set(self._namespace, names.daemon_set(one.name, one.uid)))
        except NotFound:
            return None
        return daemon_set_view(found) if owned_by(found, one.uid) else None

    async def _node(self, name: str) -> NodeView | None:
        try:
            return _node_view(await self._api.get(paths.node(name)))
        except NotFound:
            return None

    async def _node_with_pods(self, name: str) -> NodeView | None:
        """The node, when its kubelet was last heard, and then its pods: what is started after that is kept by the margin."""
        view, heard_s = await asyncio.gather(self._node(name), self._heard(name))
        if view is None:
            return None
        seen_s = self._clock_s()
        pods, _ = await self._api.list(paths.pods(), {"fieldSelector": f"spec.nodeName={name}"})
        gpu_pods = tuple(sorted(filter(None, map(_gpu_pod, pods)), key=lambda pod: (pod.namespace, pod.name)))
        return replace(view, seen_s=seen_s, heard_s=heard_s, gpu_pods=gpu_pods, pods=tuple(pods))

    async def _heard(self, name: str) -> float | None:
        try:
            lease = await self._api.get(paths.node_heartbeat(name))
        except NotFound:
            return None
        return unix_s(lease.get("spec", {}).get("renewTime"))

    async def _tainted(self, one: Reset) -> list[NodeView]:
        nodes, _ = await self._api.list(paths.nodes(), {})
        views = [_node_view(node) for node in nodes if node.get("spec", {}).get("taints")]
        return [view for view in views if names.taint(one.uid) in [(t.get("key"), t.get("value")) for t in view.taints]]


def owned_by(document: Object, uid: str) -> bool:
    """Whether an object was made for this reset."""
    return any(owner.get("uid") == uid for owner in document["metadata"].get("ownerReferences", ()))


def daemon_set_view(document: Object) -> DaemonSetView:
    """The DaemonSet. Which nodes it covers, and by which plans, stands in annotations beside the template that follows."""
    metadata = document["metadata"]
    try:
        covered, kept = (json.loads(metadata["annotations"].get(key, "{}")) for key in (names.COVERED, names.KEPT))
        nodes = {
            node: Started(plan=str(plan), planned_s=float(planned_s)) for node, (plan, planned_s) in covered.items()
        }
        needed = {plan: tuple(map(str, nodes)) for plan, nodes in kept.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        nodes, needed = (
            {},
            {},
        )  # somebody has changed it: all is planned anew, and the new plans' time protects what is new
    return DaemonSetView(uid=metadata["uid"], version=metadata["resourceVersion"], nodes=nodes, kept=needed)


def _understand(document: Object) -> tuple[Reset, str | None]:
    try:
        return reset.read(document), None
    except SpecError as error:
        return reset.identify(document), str(error)


def _status_of(document: Object) -> Mapping[str, Any]:
    found = document.get("status")
    return found if isinstance(found, dict) else {}


def lock_view(lease: Object) -> Lock | None:
    """The lock that a Lease of this namespace is, also one that somebody made by hand; None if it is none."""
    metadata, spec = lease["metadata"], lease.get("spec") or {}
    labels = metadata.get("labels") or {}
    node = names.node_of_lease(metadata["name"], metadata.get("annotations") or {})
    if node is None:
        return None
    return Lock(
        node=node,
        holder_uid=labels.get(names.RESET_UID, ""),
        holder_name=labels.get(names.RESET_NAME) or str(spec.get("holderIdentity", "nobody known")),
        since=str(spec.get("acquireTime", "an unknown time")),
        uid=metadata["uid"],
    )


def _locks(leases: Iterable[Object]) -> dict[str, Lock]:
    return {lock.node: lock for lock in map(lock_view, leases) if lock}


def _pods(pods: Iterable[Object]) -> dict[str, PodView]:
    """The reset's pod on each node. Where one replaces another, it has no result before it is alone, or one of the two has."""
    found: dict[str, PodView] = {}
    for pod in sorted(pods, key=lambda one: str(one["metadata"].get("creationTimestamp"))):
        node = results.node_of(pod)
        view = _pod_view(pod, node) if node else None
        if node and view:
            found[node] = _both(found[node], view) if node in found else view
    return found


def _pod_view(pod: Object, node: str) -> PodView | None:
    owners = pod["metadata"].get("ownerReferences") or ()
    uid = next(
        (owner.get("uid") for owner in owners if owner.get("kind") == "DaemonSet" and owner.get("controller")), None
    )
    reading = results.read(pod, node, uid) if uid else None
    if reading is None:
        return None
    leaving_s = unix_s(pod["metadata"].get("deletionTimestamp"))
    return PodView(name=pod["metadata"]["name"], reading=reading, over=_is_over(pod), leaving_since_s=leaving_s)


def _is_over(pod: Object) -> bool:
    """Whether its reset can't run any more, or again: it told its result, or the kubelet gave the pod up."""
    status = pod.get("status") or {}
    ended = [one.get("state", {}).get("terminated") or {} for one in status.get("initContainerStatuses") or ()]
    return status.get("phase") in _GONE_PHASES or any(one.get("exitCode") == 0 for one in ended)


def _both(one: PodView, other: PodView) -> PodView:
    told = next((view for view in (one, other) if isinstance(view.reading, NodeResult)), other)
    leaving = [view.leaving_since_s for view in (one, other) if not view.over]
    since_s = None if None in leaving else max((at_s for at_s in leaving if at_s is not None), default=None)
    return replace(told, over=one.over and other.over, leaving_since_s=since_s)


def _node_view(node: Object) -> NodeView:
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready: Object = next((one for one in conditions if one.get("type") == "Ready"), {})
    return NodeView(
        name=node["metadata"]["name"],
        ready=ready.get("status", "True"),
        ready_since_s=unix_s(ready.get("lastTransitionTime")) or 0.0,
        version=node["metadata"]["resourceVersion"],
        taints=tuple((node.get("spec") or {}).get("taints") or ()),
    )


def _gpu_pod(pod: Object) -> GpuPod | None:
    """A pod that asks for GPUs and may be sent away; None for others: a DaemonSet's or a static pod would come back at once."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    owners = [owner.get("kind") for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
    stays = {"DaemonSet", "Node"}.intersection(owners) or status.get("phase") in _GONE_PHASES
    if stays or not any(map(_asks_for_gpu, [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())])):
        return None
    return GpuPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        leaving_until_s=unix_s(metadata.get("deletionTimestamp")),  # the API counts the grace period in
    )


def _asks_for_gpu(container: Object) -> bool:
    wanted = container.get("resources") or {}
    amounts = {**(wanted.get("requests") or {}), **(wanted.get("limits") or {})}
    return any(name.startswith(_GPU_RESOURCES) and str(amount) != "0" for name, amount in amounts.items())
