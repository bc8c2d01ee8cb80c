"""What to do next with a reset: a pure function of what is known. Nothing else in the operator decides anything.

The rules are asked in order, and the first that has an answer decides; `RULES` is the life of a reset, backwards from its
end. The order within an answer matters too: what a crash may interrupt at any point has to leave something that the next look
understands. Hence: a result is recorded before its node leaves the DaemonSet; a node leaves the DaemonSet before its lock is
released; the lock is taken before the taint is set, and released after it is removed; a reset is marked ended before its
record goes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cleanslate_operator import actions, names, nodeplan, status
from cleanslate_operator.actions import Action
from cleanslate_operator.noderesult import NodeResult, NodeVerdict
from cleanslate_operator.record import Record
from cleanslate_operator.reset import Pods, Scope
from cleanslate_operator.results import Progress
from cleanslate_operator.times import rfc3339, unix_s
from cleanslate_operator.views import GpuPod, NodeView, Refusal, Snapshot, Started

PREPARED_AT_ONCE = 20  # nodes whose pods are listed in one look: a megabyte each
NODE_LIMIT_S = 840.0  # from the plan to the result; the node program refuses plans of more than 900 s
UNREACHABLE_S = 60.0  # a kubelet that was silent for so long has not merely been restarted
LEFT_BEHIND_S = 60.0  # a pod that outlives its deletion by so much is on a node that nobody can reach
STUCK_S = 30.0  # a pod that outlives its own grace period by so much will not go by itself
STALLED_S = 10.0  # a node whose pod has said nothing for so long is looked at
MARGIN_S = 5.0  # clocks' fractions, and what a kubelet takes from a container's start to its report
BLIND_MARGIN_S = 300.0  # the margin where a kubelet's last word is unknown
LOCK_AGAIN_S = 2.0
EVICT_AGAIN_S = 5.0
WATCH_AGAIN_S = 10.0
EVENTS_OF_NODES = 10  # no more Events about single nodes of a reset than this


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, in this order. `again_s`: when to look again if nothing happens before; None: only when something does.

    `more`: the world is another one after the actions, so decide again at once.
    """

    actions: tuple[Action, ...] = ()
    again_s: float | None = None
    more: bool = False


def plan(snapshot: Snapshot) -> Decision:
    """The next step of a reset."""
    return next(decision for rule in RULES if (decision := rule(snapshot)))


def to_prepare(snapshot: Snapshot) -> tuple[str, ...]:
    """The nodes whose pods have to be known before the next step: locked, and not yet covered by the DaemonSet."""
    if not snapshot.record or _is_over(snapshot):
        return ()
    covered = snapshot.daemon_set.nodes if snapshot.daemon_set else {}
    return tuple(node for node in _in_hand(snapshot) if node not in covered)[:PREPARED_AT_ONCE]


def to_look_at(snapshot: Snapshot) -> tuple[str, ...]:
    """The nodes to be known before the next step, without their pods: those that may have gone, or may carry the taint."""
    stalled = [node for node, started in _covered(snapshot) if snapshot.now_s - started.planned_s > STALLED_S]
    pending = set(snapshot.record.pending) if snapshot.record else set()
    tainted = [node for node in snapshot.mine if node not in pending] if _taints(snapshot) else []
    return tuple(dict.fromkeys([node for node in stalled if node in pending] + tainted))


def sweeps(snapshot: Snapshot) -> bool:
    """Whether every node that carries the reset's taint has to be known: at the end, in case a lock was lost."""
    ending = snapshot.reset.deleting or (snapshot.record is not None and not snapshot.record.pending)
    return ending and _taints(snapshot) and snapshot.reset.has_finalizer and not snapshot.reset.ended


# The rules.


def ended(snapshot: Snapshot) -> Decision | None:
    """Over for good: take away what a crash or an elder leader may have left, and the object itself when its time has come."""
    reset = snapshot.reset
    if not reset.ended:
        return None
    stray: list[Action] = [actions.DeleteDaemonSet()] if snapshot.daemon_set else []
    stray += [actions.ReleaseLock(node=node) for node in snapshot.mine]
    stray += [actions.DeleteConfigMaps()] if snapshot.strays else []
    if reset.has_finalizer:
        return Decision(actions=(*stray, actions.RemoveFinalizer()), again_s=_life_left(snapshot))
    if reset.spec.ttl_s is not None and not reset.deleting and _life_left(snapshot) == 0:
        return Decision(actions=(*stray, actions.DeleteReset()))
    return Decision(actions=tuple(stray), again_s=_life_left(snapshot))


def deleted(snapshot: Snapshot) -> Decision | None:
    """Somebody deletes it: undo what there is to undo, and let it go."""
    if not snapshot.reset.deleting:
        return None
    if not snapshot.reset.has_finalizer:
        return Decision()
    return _undo(snapshot, then=(actions.DeleteConfigMaps(), actions.RemoveFinalizer()))


def not_understood(snapshot: Snapshot) -> Decision | None:
    """The spec makes no sense, or the record: Failed, with the reason."""
    if not snapshot.problem:
        return None
    return _undo(snapshot, then=_end(snapshot, Refusal(reason="InvalidSpec", message=snapshot.problem)))


def held(snapshot: Snapshot) -> Decision | None:
    """Suspended before it began."""
    if snapshot.record or not snapshot.reset.spec.suspend:
        return None
    return Decision(actions=_status(snapshot))


def impossible(snapshot: Snapshot) -> Decision | None:
    """There are no nodes to reset."""
    if snapshot.record or not isinstance(snapshot.targets, Refusal):
        return None
    return Decision(actions=_end(snapshot, snapshot.targets))


def begins(snapshot: Snapshot) -> Decision | None:
    """The list of nodes is frozen; from here on there is something to undo."""
    if snapshot.record or isinstance(snapshot.targets, Refusal) or not snapshot.targets:
        return None
    first = () if snapshot.reset.has_finalizer else (actions.AddFinalizer(),)
    count = len(snapshot.targets)
    told = actions.Announce(
        reason="Started", message=f"resetting {count} node{'s'[: count > 1]}: {_some(snapshot.targets)}"
    )
    return Decision(actions=(*first, actions.BeginRecord(nodes=snapshot.targets), told), more=True)


def records(snapshot: Snapshot) -> Decision | None:
    """Nodes are done: by their own word, or because nothing more can come of them."""
    if not snapshot.record:
        return None
    told = {node: _reading(snapshot, node) for node in snapshot.record.pending}
    results = [reading for reading in told.values() if isinstance(reading, NodeResult)]
    results += _given_up(snapshot, snapshot.record.with_results(results))
    if not results:
        return None
    left = EVENTS_OF_NODES - sum(map(status.fails, snapshot.record.done))
    bad = [result for result in results if status.fails(result)][: max(left, 0)]
    events = tuple(
        actions.Announce(reason=one.reason, message=f"node {one.node}: {one.message}", warning=True) for one in bad
    )
    return Decision(actions=(actions.RecordResults(results=tuple(results)), *events), more=True)


def finishes(snapshot: Snapshot) -> Decision | None:
    """Every node is done: undo, say so, and be over."""
    if not snapshot.record or snapshot.record.pending:
        return None
    return _undo(snapshot, then=_end(snapshot))


def locks(snapshot: Snapshot) -> Decision | None:
    """There is room for more nodes, and some that nobody holds."""
    if not snapshot.record or snapshot.reset.spec.suspend:
        return None
    room = snapshot.reset.spec.max_concurrent - len(_in_hand(snapshot))
    void = [lock for node in snapshot.record.pending if (lock := snapshot.locks.get(node)) and lock.void]
    if void and room > 0:
        return Decision(actions=tuple(actions.BreakLock(lock=lock) for lock in void), more=True)
    free = [node for node in snapshot.record.pending if node not in snapshot.locks]
    if room <= 0 or not free:
        return None
    return Decision(actions=tuple(actions.TakeLock(node=node) for node in free[:room]), more=True)


def moves(snapshot: Snapshot) -> Decision | None:
    """Nodes are made ready and join the DaemonSet; those that are done leave it, and their locks are released."""
    if not snapshot.record:
        return None
    views = [view for node in to_prepare(snapshot) if (view := snapshot.nodes.get(node))]
    plans = _plans(snapshot, [view for view in views if _is_ready(snapshot, view)])
    refused = tuple(one for one in plans.values() if isinstance(one, NodeResult))
    if refused:
        return Decision(actions=(actions.RecordResults(results=refused),), more=True)
    readying = [action for view in views for action in _ready(snapshot, view)]
    changes = _cover(snapshot, snapshot.record, {node: one for node, one in plans.items() if isinstance(one, bytes)})
    steps = (*readying, *changes, *_releases(snapshot, snapshot.record))
    return Decision(actions=steps, more=True) if steps else None


def waits(snapshot: Snapshot) -> Decision | None:
    """Nothing to do but to show how it stands, and to look again later."""
    if not snapshot.record:
        return Decision(actions=_status(snapshot), again_s=WATCH_AGAIN_S)
    in_hand = _in_hand(snapshot)
    busy = bool(to_prepare(snapshot))
    again_s = EVICT_AGAIN_S if busy else WATCH_AGAIN_S
    if not snapshot.reset.spec.suspend and len(in_hand) < min(
        snapshot.reset.spec.max_concurrent, len(snapshot.record.pending)
    ):
        again_s = LOCK_AGAIN_S
    left_s = max(snapshot.record.started_s + snapshot.reset.spec.timeout_s - snapshot.now_s, 0.0) + 0.01
    return Decision(actions=_status(snapshot), again_s=min(again_s, left_s))


RULES: tuple[Callable[[Snapshot], Decision | None], ...] = (
    ended,
    deleted,
    not_understood,
    held,
    impossible,
    begins,
    records,
    finishes,
    locks,
    moves,
    waits,
)


# How nodes are done without a word of their own.


def _given_up(snapshot: Snapshot, record: Record) -> list[NodeResult]:
    """The results of nodes of which nothing more can come: gone, silent, out of time, or not to be tried any more."""
    found = [result for node in record.pending if (result := _lost(snapshot, node) or _overdue(snapshot, node))]
    record = record.with_results(found)
    limit = snapshot.reset.spec.stop_after_failures
    failures = sum(map(status.fails, record.done))
    if limit is not None and failures >= limit:
        why = f"not tried: {failures} nodes had failed, and spec.rollout.stopAfterFailures is {limit}"
        untried = [node for node in record.pending if node not in snapshot.mine]
        found += [_result(snapshot, node, "StoppedAfterFailures", why, NodeVerdict.SKIPPED) for node in untried]
    return found


def _lost(snapshot: Snapshot, node: str) -> NodeResult | None:
    if node not in snapshot.nodes or node not in snapshot.mine:
        return None
    view = snapshot.nodes[node]
    if view is None:
        return _result(snapshot, node, "NodeGone", "the node is no longer in the cluster")
    covered = node in dict(_covered(snapshot))
    if view.ready != "Unknown" or (covered and snapshot.now_s - view.ready_since_s < UNREACHABLE_S):
        return None
    since = rfc3339(view.ready_since_s)
    why = f"its kubelet has been silent since {since}; see to the node, or delete it, and apply a new reset"
    return _result(snapshot, node, "NodeUnreachable", why)


def _overdue(snapshot: Snapshot, node: str) -> NodeResult | None:
    """The result of a node at the reset's deadline, or at its own."""
    assert snapshot.record
    over = snapshot.now_s >= snapshot.record.started_s + snapshot.reset.spec.timeout_s
    started = dict(_covered(snapshot)).get(node)
    if started and (over or snapshot.now_s - started.planned_s >= NODE_LIMIT_S):
        return _result(snapshot, node, *_last_word(snapshot, node, started))
    if not over:
        return None
    limit = f"after {snapshot.reset.spec.timeout_s} s (spec.timeoutSeconds)"
    if node in snapshot.mine:
        if node in snapshot.blocked:
            return _result(snapshot, node, "EvictionBlocked", f"{snapshot.blocked[node]} {limit}")
        return _result(
            snapshot, node, "DeadlineExceeded", f"its pods had not left {limit}; see them with kubectl get pods -A"
        )
    if node in snapshot.locks:
        why = f"{limit} still held by {status.holder(snapshot.locks[node])}"
        return _result(snapshot, node, "WaitingForLock", f"not tried: {why}", NodeVerdict.SKIPPED)
    return _result(snapshot, node, "DeadlineExceeded", f"not tried: no time was left {limit}", NodeVerdict.SKIPPED)


def _last_word(snapshot: Snapshot, node: str, started: Started) -> tuple[str, str]:
    waited = f"no result {snapshot.now_s - started.planned_s:.0f} s after its plan was made"
    reading = _reading(snapshot, node)
    if isinstance(reading, Progress) and reading.reason in status.TELLING:
        return str(reading.reason), f"{waited}: {reading.message}"
    return "NoResult", f"{waited}; {reading.message if reading else 'there is no reset pod on it'}"


def _result(
    snapshot: Snapshot, node: str, reason: str, message: str, verdict: NodeVerdict = NodeVerdict.FAILED
) -> NodeResult:
    return NodeResult(node=node, result=verdict, reason=reason, message=message, finished_at=rfc3339(snapshot.now_s))


# How a node is made ready.


def _ready(snapshot: Snapshot, view: NodeView) -> Iterator[Action]:
    """What has still to be done before a node may join, other than to wait."""
    if _taints(snapshot) and not _tainted(snapshot, view):
        yield actions.SetTaint(node=view)
        return
    for pod in _to_leave(snapshot, view):
        if pod.leaving_until_s is None and snapshot.now_s - snapshot.asked.get(pod.uid, 0.0) >= EVICT_AGAIN_S:
            kind = actions.EvictPod if snapshot.reset.spec.pods is Pods.EVICT else actions.DeletePod
            yield kind(node=view.name, pod=pod)


def _is_ready(snapshot: Snapshot, view: NodeView) -> bool:
    tainted = _tainted(snapshot, view) or not _taints(snapshot)
    return tainted and all(_is_stuck(snapshot, pod) for pod in _to_leave(snapshot, view))


def _to_leave(snapshot: Snapshot, view: NodeView) -> tuple[GpuPod, ...]:
    sends = snapshot.reset.spec.pods is not Pods.KEEP and not snapshot.reset.spec.dry_run
    return view.gpu_pods if sends else ()


def _is_stuck(snapshot: Snapshot, pod: GpuPod) -> bool:
    return pod.leaving_until_s is not None and snapshot.now_s > pod.leaving_until_s + STUCK_S


def _plans(snapshot: Snapshot, ready: list[NodeView]) -> dict[str, bytes | NodeResult]:
    """The plan of each node that is ready, or why there can be none."""
    plans: dict[str, bytes | NodeResult] = {}
    for view in ready:
        try:
            one = _plan_of(snapshot, view)
            nodeplan.config_maps(snapshot.reset, {view.name: one})  # that it fits
            plans[view.name] = one
        except nodeplan.PlanError as error:
            plans[view.name] = _result(snapshot, view.name, "Refused", f"{error}; nothing was touched")
    return plans


def _cover(snapshot: Snapshot, record: Record, plans: Mapping[str, bytes]) -> list[Action]:
    """The plans of the nodes that are ready, and the DaemonSet with them and without those that are done."""
    before = dict(snapshot.daemon_set.nodes) if snapshot.daemon_set else {}
    after = {node: started for node, started in before.items() if node in set(record.pending)}
    config_maps = nodeplan.config_maps(snapshot.reset, plans)
    for one in config_maps:
        made = {node: snapshot.nodes[node] for node in nodeplan.nodes_of(one)}
        after |= {
            node: Started(plan=one["metadata"]["name"], planned_s=view.seen_s) for node, view in made.items() if view
        }
    if after == before:
        return []
    found: list[Action] = [actions.CreatePlans(config_maps=tuple(config_maps))] if config_maps else []
    found.append(actions.SetDaemonSet(nodes=after))
    unused = {started.plan for started in before.values()} - {started.plan for started in after.values()}
    return [*found, actions.DeletePlans(plans=tuple(sorted(unused)))] if unused else found


def _plan_of(snapshot: Snapshot, view: NodeView) -> bytes:
    """The cluster's view of a node for the node program, with a margin for all that the cluster cannot know yet.

    A kubelet renews its lease by its own clock. So the lease's age, taken by ours, holds both how long nothing was heard of the
    node's containers and how far its clock is behind.
    """
    margin_s = BLIND_MARGIN_S if view.heard_s is None else MARGIN_S + max(view.seen_s - view.heard_s, 0.0)
    condemned = [pod.uid for pod in _to_leave(snapshot, view)]
    return nodeplan.document(view.pods, condemned, snapshot_time_s=view.seen_s, margin_s=min(margin_s, 3600.0))


# How a node is left.


def _releases(snapshot: Snapshot, record: Record) -> Iterator[Action]:
    """For the nodes that are done: the taint goes, then the lock, once nothing of the reset can touch them any more."""
    pending = set(record.pending)
    for node in snapshot.mine:
        if node not in pending and _is_quiet(snapshot, node):
            yield from _release(snapshot, node)


def _release(snapshot: Snapshot, node: str) -> Iterator[Action]:
    view = snapshot.nodes.get(node)
    if view and _tainted(snapshot, view):
        yield actions.RemoveTaint(node=view)
    yield actions.ReleaseLock(node=node)


def _is_quiet(snapshot: Snapshot, node: str) -> bool:
    pod = snapshot.pods.get(node)
    if pod is None or pod.over:
        return True
    return pod.leaving_since_s is not None and snapshot.now_s - pod.leaving_since_s > LEFT_BEHIND_S


def _undo(snapshot: Snapshot, *, then: tuple[Action, ...]) -> Decision:
    """Undo all that was done to nodes, and only then go on: the DaemonSet, what its pods may still do, taints, locks."""
    loud = [node for node in snapshot.pods if not _is_quiet(snapshot, node)]
    first: tuple[Action, ...] = (actions.DeleteDaemonSet(),) if snapshot.daemon_set else ()
    if loud:
        return Decision(actions=(*first, *_status(snapshot)), again_s=LOCK_AGAIN_S)
    tainted = [view for view in snapshot.nodes.values() if view and _tainted(snapshot, view)]
    untaint = tuple(actions.RemoveTaint(node=view) for view in tainted)
    release = tuple(actions.ReleaseLock(node=node) for node in snapshot.mine)
    return Decision(actions=(*first, *untaint, *release, *then))


def _end(snapshot: Snapshot, refusal: Refusal | None = None) -> tuple[Action, ...]:
    """The last word, and the marks that there is nothing left to do. `refusal`: why it did not even begin."""
    final = status.final(snapshot, refusal)
    told = actions.Announce(reason=final["reason"], message=final["message"], warning=final["phase"] != "Complete")
    plans = (actions.DeleteConfigMaps(role=names.ROLE_PLAN),) if snapshot.reset.has_finalizer else ()
    said = (actions.SetStatus(status=final),) if final != snapshot.status else ()
    over = (actions.MarkEnded(at=final["completionTime"]),)
    undone = (actions.DeleteConfigMaps(), actions.RemoveFinalizer()) if snapshot.reset.has_finalizer else ()
    return (*plans, *said, told, *over, *undone)


# Small words.


def _status(snapshot: Snapshot) -> tuple[Action, ...]:
    wanted = status.current(snapshot)
    return (actions.SetStatus(status=wanted),) if wanted != snapshot.status else ()


def _taints(snapshot: Snapshot) -> bool:
    return snapshot.reset.spec.scope is Scope.ALL and not snapshot.reset.spec.dry_run


def _tainted(snapshot: Snapshot, view: NodeView) -> bool:
    return names.taint(snapshot.reset.uid) in [(taint.get("key"), taint.get("value")) for taint in view.taints]


def _in_hand(snapshot: Snapshot) -> tuple[str, ...]:
    pending = set(snapshot.record.pending) if snapshot.record else set()
    return tuple(node for node in snapshot.mine if node in pending)


def _covered(snapshot: Snapshot) -> tuple[tuple[str, Started], ...]:
    return tuple(snapshot.daemon_set.nodes.items()) if snapshot.daemon_set else ()


def _is_over(snapshot: Snapshot) -> bool:
    return bool(snapshot.reset.ended) or snapshot.reset.deleting


def _reading(snapshot: Snapshot, node: str) -> NodeResult | Progress | None:
    pod = snapshot.pods.get(node)
    return pod.reading if pod else None


def _life_left(snapshot: Snapshot) -> float | None:
    ttl_s, at_s = snapshot.reset.spec.ttl_s, unix_s(snapshot.reset.ended)
    return None if ttl_s is None or at_s is None else max(at_s + ttl_s - snapshot.now_s, 0.0)


def _some(nodes: tuple[str, ...]) -> str:
    return ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
