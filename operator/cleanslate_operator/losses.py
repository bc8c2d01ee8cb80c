"""Nodes of which nothing more can come: gone, silent, out of time, or not to be tried any more. Pure.

A node's own word, which `results.py` reads, comes first; this is for those that have none.
"""

from cleanslate_operator import status
from cleanslate_operator.noderesult import NodeResult, NodeVerdict
from cleanslate_operator.record import Record
from cleanslate_operator.results import Progress
from cleanslate_operator.times import rfc3339
from cleanslate_operator.views import Snapshot, Started

NODE_LIMIT_S = 840.0  # from the plan to the result; the node program refuses plans of more than 900 s
UNREACHABLE_S = 60.0  # a kubelet that was silent for so long has not merely been restarted


def given_up(snapshot: Snapshot, record: Record) -> list[NodeResult]:
    """The results of nodes of which nothing more can come: gone, silent, out of time, or not to be tried any more."""
    found = [one for node in record.pending if (one := _lost(snapshot, node) or _overdue(snapshot, record, node))]
    record = record.with_results(found)
    limit = snapshot.reset.spec.stop_after_failures
    failures = sum(map(status.fails, record.done))
    if limit is not None and failures >= limit:
        why = f"not tried: {failures} nodes had failed, and spec.rollout.stopAfterFailures is {limit}"
        untried = [node for node in record.pending if node not in snapshot.mine]
        found += [result(snapshot, node, "StoppedAfterFailures", why, NodeVerdict.SKIPPED) for node in untried]
    return found


def _lost(snapshot: Snapshot, node: str) -> NodeResult | None:
    if node not in snapshot.nodes or node not in snapshot.mine:
        return None
    view = snapshot.nodes[node]
    if view is None:
        return result(snapshot, node, "NodeGone", "the node is no longer in the cluster")
    covered = node in snapshot.covered
    if view.ready != "Unknown" or (covered and snapshot.now_s - view.ready_since_s < UNREACHABLE_S):
        return None
    since = rfc3339(view.ready_since_s)
    why = f"its kubelet has been silent since {since}; see to the node, or delete it, and apply a new reset"
    return result(snapshot, node, "NodeUnreachable", why)


def _overdue(snapshot: Snapshot, record: Record, node: str) -> NodeResult | None:
    """The result of a node at the reset's deadline, or at its own."""
    over = snapshot.now_s >= record.started_s + snapshot.reset.spec.timeout_s
    started = snapshot.covered.get(node)
    if started and (over or snapshot.now_s - started.planned_s >= NODE_LIMIT_S):
        return result(snapshot, node, *_last_word(snapshot, node, started))
    if not over:
        return None
    limit = f"after {snapshot.reset.spec.timeout_s} s (spec.timeoutSeconds)"
    if node in snapshot.mine:
        if node in snapshot.blocked:
            return result(snapshot, node, "EvictionBlocked", f"{snapshot.blocked[node]} {limit}")
        return result(
            snapshot, node, "DeadlineExceeded", f"its pods had not left {limit}; see them with kubectl get pods -A"
        )
    if node in snapshot.locks:
        why = f"{limit} still held by {status.holder(snapshot.locks[node])}"
        return result(snapshot, node, "WaitingForLock", f"not tried: {why}", NodeVerdict.SKIPPED)
    return result(snapshot, node, "DeadlineExceeded", f"not tried: no time was left {limit}", NodeVerdict.SKIPPED)


def _last_word(snapshot: Snapshot, node: str, started: Started) -> tuple[str, str]:
    waited = f"no result {snapshot.now_s - started.planned_s:.0f} s after its plan was made"
    reading = snapshot.reading(node)
    if isinstance(reading, Progress) and reading.reason in status.TELLING:
        return str(reading.reason), f"{waited}: {reading.message}"
    return "NoResult", f"{waited}; {reading.message if reading else 'there is no reset pod on it'}"


def result(
    snapshot: Snapshot, node: str, reason: str, message: str, verdict: NodeVerdict = NodeVerdict.FAILED
) -> NodeResult:
    """A result that the operator makes itself, at this moment."""
    return NodeResult(node=node, result=verdict, reason=reason, message=message, finished_at=rfc3339(snapshot.now_s))
