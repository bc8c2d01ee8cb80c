"""Carries out one action of a decision: one write to the API server, and what is known after it. Decides nothing.

Every write names the version or the UID that the decision was made on, so that a process that no longer leads, or a decision
that came too late, changes nothing: the API server refuses it, the step is abandoned, and the next look starts anew.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from cleanslate_operator import actions, daemonset, names, paths, record, reset, snapshot
from cleanslate_operator.actions import Action
from cleanslate_operator.api import Api, Conflict, NotFound, Throttled
from cleanslate_operator.events import Recorder
from cleanslate_operator.noderesult import printable
from cleanslate_operator.reset import Reset
from cleanslate_operator.settings import Settings
from cleanslate_operator.views import GpuPod, NodeView, Snapshot

_T = TypeVar("_T")


class Executor:
    """Writes, and says what is known then. Every method raises ApiError for a write that was not done."""

    def __init__(self, api: Api, settings: Settings, recorder: Recorder, clock_s: Callable[[], float]) -> None:
        self._api, self._settings, self._recorder, self._clock_s = api, settings, recorder, clock_s

    async def carry_out(self, action: Action, known: Snapshot) -> Snapshot:
        """Do it, and return the snapshot as it is now."""
        done: Snapshot = await _DOERS[type(action)](self, action, known)
        return done

    # The GPUNodeReset itself.

    async def _add_finalizer(self, _: actions.AddFinalizer, known: Snapshot) -> Snapshot:
        return await self._patch_metadata(known, {"finalizers": [*known.reset.other_finalizers, names.FINALIZER]})

    async def _remove_finalizer(self, _: actions.RemoveFinalizer, known: Snapshot) -> Snapshot:
        try:
            return await self._patch_metadata(known, {"finalizers": list(known.reset.other_finalizers) or None})
        except NotFound:
            return known  # somebody else has let it go

    async def _mark_ended(self, action: actions.MarkEnded, known: Snapshot) -> Snapshot:
        return await self._patch_metadata(known, {"annotations": {names.ENDED: action.at}})

    async def _patch_metadata(self, known: Snapshot, changes: Mapping[str, Any]) -> Snapshot:
        of = {"uid": known.reset.uid, "resourceVersion": known.reset.version}
        done = await self._api.merge_patch(paths.reset(known.reset.name), {"metadata": {**of, **changes}})
        return replace(known, reset=replace(reset.identify(done), spec=known.reset.spec))

    async def _set_status(self, action: actions.SetStatus, known: Snapshot) -> Snapshot:
        head = {"apiVersion": names.API_VERSION, "kind": names.KIND}
        one = {"name": known.reset.name, "uid": known.reset.uid, "resourceVersion": known.reset.version}
        body = {**head, "metadata": one, "status": dict(action.status)}
        done = await self._api.apply(paths.reset_status(known.reset.name), body)
        now = replace(reset.identify(done), spec=known.reset.spec)
        return replace(known, status=action.status, reset=now)

    async def _delete_reset(self, _: actions.DeleteReset, known: Snapshot) -> Snapshot:
        await _gone(self._api.delete(paths.reset(known.reset.name), uid=known.reset.uid))
        return known

    async def _announce(self, action: actions.Announce, known: Snapshot) -> Snapshot:
        who = {"name": known.reset.name, "uid": known.reset.uid}
        self._recorder.post(**who, reason=action.reason, message=action.message, warning=action.warning)
        return known

    # The record.

    async def _begin_record(self, action: actions.BeginRecord, known: Snapshot) -> Snapshot:
        new = record.begin(known.reset, action.nodes, now_s=self._clock_s())
        versions = [await self._make_shard(new, known.reset, shard) for shard in range(new.shards())]
        return replace(known, record=replace(new, versions=tuple(versions)))

    async def _make_shard(self, new: record.Record, reset: Reset, shard: int) -> str:
        """Make one; what an interrupted beginning has left is written over, for no node was touched before all are there."""
        body = record.config_map(new, reset, shard, self._settings.resets_namespace)
        try:
            made = await self._api.create(paths.config_maps(self._settings.resets_namespace), body)
        except Conflict:
            path = paths.config_map(self._settings.resets_namespace, body["metadata"]["name"])
            found = await self._present(paths.config_maps(self._settings.resets_namespace), body)
            if not snapshot.owned_by(found, reset.uid):
                raise
            body["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
            made = await self._api.replace(path, body)
        return str(made["metadata"]["resourceVersion"])

    async def _record_results(self, action: actions.RecordResults, known: Snapshot) -> Snapshot:
        new = _there(known.record).with_results(action.results)
        versions = list(new.versions)
        for shard in sorted({new.shard_of(result.node) for result in action.results}):
            body = record.config_map(new, known.reset, shard, self._settings.resets_namespace)
            done = await self._api.replace(
                paths.config_map(self._settings.resets_namespace, body["metadata"]["name"]), body
            )
            versions[shard] = str(done["metadata"]["resourceVersion"])
        return replace(known, record=replace(new, versions=tuple(versions)))

    # Locks.

    async def _take_lock(self, action: actions.TakeLock, known: Snapshot) -> Snapshot:
        body = self._lease(action.node, known.reset)
        try:
            made = await self._api.create(paths.leases(self._settings.resets_namespace), body)
        except Conflict:
            made = await self._present(paths.leases(self._settings.resets_namespace), body)
        lock = _there(snapshot.lock_view(made))
        return replace(known, locks=dict(known.locks) | {action.node: lock})

    def _lease(self, node: str, reset: Reset) -> dict[str, Any]:
        metadata = {
            "name": names.node_lease(node),
            "labels": names.labels(reset.name, reset.uid) | {names.ROLE: names.ROLE_LOCK},
            "annotations": {names.NODE: node},
            "ownerReferences": [names.owner(reset.name, reset.uid)],
        }
        spec = {"holderIdentity": f"{reset.name}/{reset.uid}", "acquireTime": _micro(self._clock_s())}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    async def _release_lock(self, action: actions.ReleaseLock, known: Snapshot) -> Snapshot:
        path = paths.lease(self._settings.resets_namespace, names.node_lease(action.node))
        await _gone(self._api.delete(path, uid=known.locks[action.node].uid))
        return replace(known, locks={node: lock for node, lock in known.locks.items() if node != action.node})

    async def _break_lock(self, action: actions.BreakLock, known: Snapshot) -> Snapshot:
        path = paths.lease(self._settings.resets_namespace, names.node_lease(action.lock.node))
        await _gone(self._api.delete(path, uid=action.lock.uid))
        return replace(known, locks={node: lock for node, lock in known.locks.items() if node != action.lock.node})

    # Nodes and pods.

    async def _set_taint(self, action: actions.SetTaint, known: Snapshot) -> Snapshot:
        key, value = names.taint(known.reset.uid)
        others = [taint for taint in action.node.taints if taint.get("key") != key]
        await self._write_taints(action.node, [*others, {"key": key, "value": value, "effect": "NoSchedule"}])
        return _unseen(known, action.node.name)

    async def _remove_taint(self, action: actions.RemoveTaint, known: Snapshot) -> Snapshot:
        mine = names.taint(known.reset.uid)
        others = [taint for taint in action.node.taints if (taint.get("key"), taint.get("value")) != mine]
        await _gone(self._write_taints(action.node, others))
        return _unseen(known, action.node.name)

    async def _write_taints(self, node: NodeView, taints: list[Mapping[str, Any]]) -> dict[str, Any]:
        patch = {"metadata": {"resourceVersion": node.version}, "spec": {"taints": taints or None}}
        return await self._api.merge_patch(paths.node(node.name), patch)

    async def _evict_pod(self, action: actions.EvictPod, known: Snapshot) -> Snapshot:
        pod, blocked = action.pod, dict(known.blocked)
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        try:
            await _gone(self._api.create(paths.eviction(pod.namespace, pod.name), body))
            blocked.pop(action.node, None)
        except Throttled as error:
            blocked[action.node] = _budget(pod, error)
        return _asked(replace(known, blocked=blocked), action.node, pod, self._clock_s())

    async def _delete_pod(self, action: actions.DeletePod, known: Snapshot) -> Snapshot:
        await _gone(self._api.delete(paths.pod(action.pod.namespace, action.pod.name), uid=action.pod.uid))
        return _asked(known, action.node, action.pod, self._clock_s())

    # The DaemonSet and its plans.

    async def _create_plans(self, action: actions.CreatePlans, known: Snapshot) -> Snapshot:
        for one in action.config_maps:
            try:
                await self._api.create(paths.config_maps(self._settings.resets_namespace), dict(one))
            except Conflict:
                found = await self._present(paths.config_maps(self._settings.resets_namespace), one)
                if not snapshot.owned_by(found, known.reset.uid):
                    raise
        return known

    async def _delete_plans(self, action: actions.DeletePlans, known: Snapshot) -> Snapshot:
        for name in action.plans:
            await _gone(self._api.delete(paths.config_map(self._settings.resets_namespace, name)))
        return known

    async def _set_daemon_set(self, action: actions.SetDaemonSet, known: Snapshot) -> Snapshot:
        body = daemonset.render(known.reset, action.nodes, self._settings)
        body["metadata"]["annotations"][names.KEPT] = json.dumps(action.kept, separators=(",", ":"))
        if known.daemon_set:
            body["metadata"] |= {"uid": known.daemon_set.uid, "resourceVersion": known.daemon_set.version}
            path = paths.daemon_set(self._settings.resets_namespace, body["metadata"]["name"])
            done = await self._api.replace(path, body)
        else:
            done = await self._api.create(paths.daemon_sets(self._settings.resets_namespace), body)
        gone = known.covered.keys() - action.nodes.keys()
        return replace(known, daemon_set=snapshot.daemon_set_view(done), uncovered=known.uncovered | gone)

    async def _delete_daemon_set(self, _: actions.DeleteDaemonSet, known: Snapshot) -> Snapshot:
        uid = _there(known.daemon_set).uid
        name = names.daemon_set(known.reset.name, known.reset.uid)
        await _gone(self._api.delete(paths.daemon_set(self._settings.resets_namespace, name), uid=uid))
        return replace(known, daemon_set=None)

    async def _delete_config_maps(self, action: actions.DeleteConfigMaps, known: Snapshot) -> Snapshot:
        selector = f"{names.RESET_UID}={known.reset.uid}" + (f",{names.ROLE}={action.role}" if action.role else "")
        await self._api.delete_collection(paths.config_maps(self._settings.resets_namespace), selector)
        return known

    async def _present(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The object that is there under the name of one that could not be made. Raises NotFound where it is gone again."""
        name = body["metadata"]["name"]
        found, _ = await self._api.list(path, {"fieldSelector": f"metadata.name={name}"})
        if not found:
            raise NotFound(request=f"{path}/{name}", status=404, reason="NotFound", message="gone again")
        return found[0]


_DOERS: Mapping[type[Any], Callable[..., Any]] = {
    actions.AddFinalizer: Executor._add_finalizer,
    actions.BeginRecord: Executor._begin_record,
    actions.RecordResults: Executor._record_results,
    actions.TakeLock: Executor._take_lock,
    actions.ReleaseLock: Executor._release_lock,
    actions.BreakLock: Executor._break_lock,
    actions.SetTaint: Executor._set_taint,
    actions.RemoveTaint: Executor._remove_taint,
    actions.EvictPod: Executor._evict_pod,
    actions.DeletePod: Executor._delete_pod,
    actions.CreatePlans: Executor._create_plans,
    actions.SetDaemonSet: Executor._set_daemon_set,
    actions.DeletePlans: Executor._delete_plans,
    actions.DeleteDaemonSet: Executor._delete_daemon_set,
    actions.DeleteConfigMaps: Executor._delete_config_maps,
    actions.SetStatus: Executor._set_status,
    actions.MarkEnded: Executor._mark_ended,
    actions.RemoveFinalizer: Executor._remove_finalizer,
    actions.DeleteReset: Executor._delete_reset,
    actions.Announce: Executor._announce,
}


async def _gone(write: Awaitable[Any]) -> None:
    """Wait for a write to something that may be gone by now, or be another one of the same name: then there is nothing to do."""
    try:
        await write
    except NotFound:
        return
    except Conflict as error:
        if "UID" not in error.message:
            raise


def _there(one: _T | None) -> _T:
    """What an action is about, which the decision saw. Raises LookupError if it is not there."""
    if one is None:
        raise LookupError("an action was decided on something that is not there")
    return one


def _unseen(known: Snapshot, node: str) -> Snapshot:
    """The node has changed: it has to be looked at again before anything is decided about it."""
    return replace(known, nodes={name: view for name, view in known.nodes.items() if name != node})


def _asked(known: Snapshot, node: str, pod: GpuPod, now_s: float) -> Snapshot:
    return _unseen(replace(known, asked=dict(known.asked) | {pod.uid: now_s}), node)


def _budget(pod: GpuPod, error: Throttled) -> str:
    """What forbids an eviction, with the budget's name, which the API server tells in a cause."""
    causes = [cause.message for cause in error.causes if cause.reason == "DisruptionBudget"]
    why = "; ".join(causes) or error.message
    return printable(f"cannot evict {pod}: {why}", 500)


def _micro(moment_s: float) -> str:
    """A moment as metav1.MicroTime writes it."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
