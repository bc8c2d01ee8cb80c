"""What to do next with a reset: a pure function of what is known. Nothing else in the operator decides anything.

The rules are asked in order, and the first that has an answer decides; `RULES` is the life of a reset, backwards from its
end. The order within an answer matters too: what a crash may interrupt at any point has to leave something that the next look
understands. Hence: a result is recorded before its node leaves the DaemonSet; a node leaves the DaemonSet before its lock is
released; the lock is taken before the taint is set, and released after it is removed; a reset is marked ended before its
record goes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cleanslate_operator import actions, joining, losses, names, status
from cleanslate_operator.actions import Action
from cleanslate_operator.noderesult import NodeResult
from cleanslate_operator.record import Record
from cleanslate_operator.times import unix_s
from cleanslate_operator.views import Refusal, Snapshot, Started

PREPARED_AT_ONCE = 20  # nodes whose pods are listed in one look: a megabyte each
LEFT_BEHIND_S = 60.0  # a pod that outlives its deletion by so much is on a node that nobody can reach
STALLED_S = 10.0  # a node whose pod has said nothing for so long is looked at
CHECKED_S = 30.0  # and again after this: slow nodes must not cost a call a look
LOCK_AGAIN_S = 2.0
LEAVING_AGAIN_S = 2.0  # nobody tells that a pod has left: not every pod of the cluster is watched
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
    covered = snapshot.covered
    return tuple(node for node in snapshot.in_hand if node not in covered)[:PREPARED_AT_ONCE]


def to_look_at(snapshot: Snapshot) -> tuple[str, ...]:
    """The nodes to be known before the next step, without their pods: those that may have gone, or may carry the taint."""
    pending = set(snapshot.record.pending) if snapshot.record else set()
    stalled = [
        node for node, started in snapshot.covered.items() if node in pending and _is_stalled(snapshot, node, started)
    ]
    tainted = [node for node in snapshot.mine if node not in pending] if snapshot.reset.taints else []
    return tuple(dict.fromkeys(stalled + tainted))


def _is_stalled(snapshot: Snapshot, node: str, started: Started) -> bool:
    if node in snapshot.checked:
        return snapshot.now_s - snapshot.checked[node] > CHECKED_S
    return snapshot.now_s - started.planned_s > STALLED_S


def sweeps(snapshot: Snapshot) -> bool:
    """Whether every node that carries the reset's taint has to be known: at the end, in case a lock was lost."""
    if snapshot.reset.ended:
        return False
    done = snapshot.record is not None and not snapshot.record.pending
    ending = snapshot.reset.deleting or done or snapshot.problem is not None
    may_taint = snapshot.reset.taints or snapshot.problem is not None  # what can't be understood may have been once
    return ending and may_taint and snapshot.reset.has_finalizer and not snapshot.swept


# The rules.


def ended(snapshot: Snapshot) -> Decision | None:
    """Over for good: take away what a crash or an elder leader may have left, and the object itself when its time has come."""
    reset = snapshot.reset
    if not reset.ended:
        return None
    stray: list[Action] = [actions.DeleteDaemonSet()] if snapshot.daemon_set else []
    stray += [actions.ReleaseLock(node=node) for node in snapshot.mine]
    stray += [actions.DeleteConfigMaps()] if snapshot.strays else []
    stray += [actions.SetStatus(status=seen)] if (seen := status.seen(snapshot)) else []
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
    told = {node: snapshot.reading(node) for node in snapshot.record.pending}
    results = [reading for reading in told.values() if isinstance(reading, NodeResult)]
    results += losses.given_up(snapshot, snapshot.record.with_results(results))
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
    room = snapshot.reset.spec.max_concurrent - len(snapshot.in_hand)
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
    plans = joining.plans(snapshot, [view for view in views if joining.is_ready(snapshot, view)])
    refused = tuple(one for one in plans.values() if isinstance(one, NodeResult))
    if refused:
        return Decision(actions=(actions.RecordResults(results=refused),), more=True)
    readying = [action for view in views for action in joining.readying(snapshot, view)]
    changes = joining.cover(
        snapshot, snapshot.record, {node: one for node, one in plans.items() if isinstance(one, bytes)}
    )
    steps = (*readying, *changes, *_releases(snapshot, snapshot.record))
    return Decision(actions=steps, more=True) if steps else None


def waits(snapshot: Snapshot) -> Decision | None:
    """Nothing to do but to show how it stands, and to look again later."""
    if not snapshot.record:
        return Decision(actions=_status(snapshot), again_s=WATCH_AGAIN_S)
    in_hand = snapshot.in_hand
    busy = bool(to_prepare(snapshot))
    again_s = LEAVING_AGAIN_S if busy else WATCH_AGAIN_S
    if not snapshot.reset.spec.suspend and len(in_hand) < min(
        snapshot.reset.spec.max_concurrent, len(snapshot.record.pending)
    ):
        again_s = LOCK_AGAIN_S
    if set(snapshot.mine) - set(in_hand):
        again_s = LOCK_AGAIN_S  # they are to be released
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


# How a node is left.


def _releases(snapshot: Snapshot, record: Record) -> Iterator[Action]:
    """For the nodes that are done: the taint goes, then the lock, once nothing of the reset can touch them any more."""
    pending = set(record.pending)
    for node in snapshot.mine:
        if node not in pending and _is_quiet(snapshot, node):
            yield from _release(snapshot, node)


def _release(snapshot: Snapshot, node: str) -> Iterator[Action]:
    view = snapshot.nodes.get(node)
    if view and snapshot.is_tainted(view):
        yield actions.RemoveTaint(node=view)
    yield actions.ReleaseLock(node=node)


def _is_quiet(snapshot: Snapshot, node: str) -> bool:
    pod = snapshot.pods.get(node)
    if pod is None:  # one may have been made since the pods were listed, as long as the DaemonSet covered the node
        return node not in snapshot.covered and node not in snapshot.uncovered
    if pod.over:
        return True
    return pod.leaving_since_s is not None and snapshot.now_s - pod.leaving_since_s > LEFT_BEHIND_S


def _undo(snapshot: Snapshot, *, then: tuple[Action, ...]) -> Decision:
    """Undo all that was done to nodes, and only then go on: the DaemonSet, what its pods may still do, taints, locks."""
    loud = [node for node in {*snapshot.pods, *snapshot.covered} if not _is_quiet(snapshot, node)]
    first: tuple[Action, ...] = (actions.DeleteDaemonSet(),) if snapshot.daemon_set else ()
    if loud:
        return Decision(actions=(*first, *_status(snapshot)), again_s=LOCK_AGAIN_S)
    tainted = [view for view in snapshot.nodes.values() if view and snapshot.is_tainted(view)]
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


def _is_over(snapshot: Snapshot) -> bool:
    return bool(snapshot.reset.ended) or snapshot.reset.deleting


def _life_left(snapshot: Snapshot) -> float | None:
    ttl_s, at_s = snapshot.reset.spec.ttl_s, unix_s(snapshot.reset.ended)
    return None if ttl_s is None or at_s is None else max(at_s + ttl_s - snapshot.now_s, 0.0)


def _some(nodes: tuple[str, ...]) -> str:
    return ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
