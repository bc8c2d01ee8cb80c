"""How a node joins a reset: tainted, its pods sent away, its plan made, and then covered by the DaemonSet. Pure."""

from collections.abc import Iterator, Mapping

from cleanslate_operator import actions, losses, nodeplan
from cleanslate_operator.actions import Action
from cleanslate_operator.noderesult import NodeResult
from cleanslate_operator.record import Record
from cleanslate_operator.reset import Pods
from cleanslate_operator.views import GpuPod, NodeView, Snapshot, Started

STUCK_S = 30.0  # a pod that outlives its own grace period by so much will not go by itself
MARGIN_S = 5.0  # clocks' fractions, and what a kubelet takes from a container's start to its report
BLIND_MARGIN_S = 300.0  # the margin where a kubelet's last word is unknown
EVICT_AGAIN_S = 5.0  # a disruption budget is asked again after this: what it allows changes with pods elsewhere


def readying(snapshot: Snapshot, view: NodeView) -> Iterator[Action]:
    """What has still to be done before a node may join, other than to wait."""
    if snapshot.reset.taints and not snapshot.is_tainted(view):
        yield actions.SetTaint(node=view)
        return
    for pod in _to_leave(snapshot, view):
        if pod.leaving_until_s is None and snapshot.now_s - snapshot.asked.get(pod.uid, 0.0) >= EVICT_AGAIN_S:
            kind = actions.EvictPod if snapshot.reset.spec.pods is Pods.EVICT else actions.DeletePod
            yield kind(node=view.name, pod=pod)


def is_ready(snapshot: Snapshot, view: NodeView) -> bool:
    """Whether a node may join now: tainted if it has to be, and its pods gone, or past all hope to go by themselves."""
    tainted = snapshot.is_tainted(view) or not snapshot.reset.taints
    return tainted and all(_is_stuck(snapshot, pod) for pod in _to_leave(snapshot, view))


def _to_leave(snapshot: Snapshot, view: NodeView) -> tuple[GpuPod, ...]:
    sends = snapshot.reset.spec.pods is not Pods.KEEP and not snapshot.reset.spec.dry_run
    return view.gpu_pods if sends else ()


def _is_stuck(snapshot: Snapshot, pod: GpuPod) -> bool:
    return pod.leaving_until_s is not None and snapshot.now_s > pod.leaving_until_s + STUCK_S


def plans(snapshot: Snapshot, ready: list[NodeView]) -> dict[str, bytes | NodeResult]:
    """The plan of each node that is ready, or why there can be none."""
    found: dict[str, bytes | NodeResult] = {}
    for view in ready:
        try:
            one = _plan_of(snapshot, view)
            nodeplan.config_maps(snapshot.reset, {view.name: one})  # that it fits
            found[view.name] = one
        except nodeplan.PlanError as error:
            found[view.name] = losses.result(snapshot, view.name, "Refused", f"{error}; nothing was touched")
    return found


def cover(snapshot: Snapshot, record: Record, ready: Mapping[str, bytes]) -> list[Action]:
    """The plans of the nodes that are ready, and the DaemonSet with them and without those that are done."""
    before = snapshot.covered
    after = {node: started for node, started in before.items() if node in set(record.pending)}
    config_maps = nodeplan.config_maps(snapshot.reset, ready)
    for one in config_maps:
        made = {node: snapshot.nodes[node] for node in nodeplan.nodes_of(one)}
        after |= {
            node: Started(plan=one["metadata"]["name"], planned_s=view.seen_s) for node, view in made.items() if view
        }
    if after == before:
        return []
    kept = _kept(snapshot, after)
    first = [actions.CreatePlans(config_maps=tuple(config_maps))] if config_maps else []
    unused = tuple(plan for plan, waiting in kept.items() if not waiting)
    last = [actions.DeletePlans(plans=unused)] if unused else []
    needed = {plan: waiting for plan, waiting in kept.items() if waiting}
    return [*first, actions.SetDaemonSet(nodes=after, kept=needed), *last]


def _kept(snapshot: Snapshot, after: Mapping[str, Started]) -> dict[str, tuple[str, ...]]:
    """The plans that no node is covered by any more, each with the nodes whose pods can't start without it.

    A pod mounts the plans of the DaemonSet as it was when the pod was made, its own and others', and waits for one that is gone.
    """
    waiting = tuple(node for node in after if node in snapshot.covered and not _has_started(snapshot, node))
    dropped = {one.plan for one in snapshot.covered.values()} - {one.plan for one in after.values()}
    known = dict(snapshot.daemon_set.kept) if snapshot.daemon_set else {}
    kept = known | dict.fromkeys(sorted(dropped), waiting)
    return {plan: tuple(node for node in nodes if node in waiting) for plan, nodes in kept.items()}


def _has_started(snapshot: Snapshot, node: str) -> bool:
    reading = snapshot.reading(node)
    return isinstance(reading, NodeResult) or (reading is not None and reading.started)


def _plan_of(snapshot: Snapshot, view: NodeView) -> bytes:
    """The cluster's view of a node for the node program, with a margin for all that the cluster cannot know yet.

    A kubelet renews its lease by its own clock. So the lease's age, taken by ours, holds both how long nothing was heard of the
    node's containers and how far its clock is behind.
    """
    margin_s = BLIND_MARGIN_S if view.heard_s is None else MARGIN_S + max(view.seen_s - view.heard_s, 0.0)
    condemned = [pod.uid for pod in _to_leave(snapshot, view)]
    return nodeplan.document(view.pods, condemned, snapshot_time_s=view.seen_s, margin_s=min(margin_s, 3600.0))
