"""The status of a GPUNodeReset: what people and `kubectl wait` read. Pure; derived from what is known, and never read back.

`phase`, `reason` and `message` are summaries for the columns; the conditions are what to rely on. `Complete` and `Failed` are two
types, as a Job's are, so that waiting for Complete means success.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cleanslate_operator import rows
from cleanslate_operator.noderesult import NodeResult, NodeVerdict, printable
from cleanslate_operator.record import Record
from cleanslate_operator.results import Progress, Stage
from cleanslate_operator.times import rfc3339, unix_s
from cleanslate_operator.views import Lock, Refusal, Snapshot

MESSAGE_LIMIT = 1024
TELLING = frozenset({Stage.NOT_SCHEDULED, Stage.IMAGE_PULL, Stage.NOT_STARTED})  # stages that nobody hopes to stay in
_TERMINAL = {"Complete", "Failed"}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class _Word(NamedTuple):
    """How a reset stands, in one word, one reason and one sentence."""

    phase: str
    reason: str
    message: str


def current(snapshot: Snapshot) -> dict[str, Any]:
    """The status of a reset that is not over."""
    return _document(snapshot, _word(snapshot))


def final(snapshot: Snapshot, refusal: Refusal | None = None) -> dict[str, Any]:
    """The status of a reset that is over; `refusal`: why it did not begin. A completion time that was written stays."""
    word = _Word("Failed", refusal.reason, refusal.message) if refusal else _verdict(snapshot, _done(snapshot))
    known = snapshot.status.get("completionTime") if snapshot.status.get("phase") in _TERMINAL else None
    over = known if unix_s(known) is not None else rfc3339(snapshot.now_s)
    return _document(snapshot, word, refused=refusal is not None) | {"completionTime": over}


def seen(snapshot: Snapshot) -> dict[str, Any] | None:
    """The status of a reset that is over, for a spec that was changed since; None if it is of this generation already.

    `kubectl wait` takes no condition of an older generation for an answer, and `suspend` may be changed at any time.
    """
    generation, conditions = snapshot.reset.generation, snapshot.status.get("conditions")
    if snapshot.status.get("observedGeneration") == generation or not isinstance(conditions, list):
        return None
    if not all(isinstance(one, dict) for one in conditions):
        return None  # a human has written it, and may keep it
    stated = [{**one, "observedGeneration": generation} for one in conditions]
    return {**snapshot.status, "observedGeneration": generation, "conditions": stated}


def holder(lock: Lock) -> str:
    """Who holds a node, in words."""
    kind = "GPUNodeReset " if lock.holder_uid else ""
    return f"{kind}{printable(lock.holder_name, 63)} since {printable(lock.since, 40)}"


def fails(result: NodeResult) -> bool:
    """Whether a node's result makes its reset a failure. A dry run has done its job when it has listed what there is."""
    good = {NodeVerdict.CLEAN, NodeVerdict.BUSY} | ({NodeVerdict.NOT_CLEAN} if result.dry_run else set())
    return result.result not in good


def people_size(size_bytes: int) -> str:
    """A size for people: `40.0 GiB`."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size_bytes} bytes" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


# The sentence.


def _word(snapshot: Snapshot) -> _Word:
    reset = snapshot.reset
    if reset.deleting:
        return _Word("Running", "Deleted", "it is being deleted; what it did to nodes is being undone")
    if not snapshot.record:
        if reset.spec.suspend:
            return _Word(
                "Suspended", "Suspended", "held by spec.suspend, and nothing was touched; set it to false to let it go"
            )
        return _Word("Pending", "Pending", "not begun")
    return _waiting(snapshot, snapshot.record) or _Word("Running", "Running", _count(snapshot.record))


def _waiting(snapshot: Snapshot, record: Record) -> _Word | None:
    working = snapshot.in_hand
    for node in working:
        if sentence := snapshot.blocked.get(node) or _leaving(snapshot, node):
            return _Word("Running", "Evicting", f"node {node}: {sentence}")
        reading = snapshot.pods[node].reading if node in snapshot.pods else None
        if isinstance(reading, Progress) and reading.reason in TELLING:
            return _Word("Running", str(reading.reason), f"node {node}: {reading.message}")
    if snapshot.reset.spec.suspend and not working:
        return _Word(
            "Suspended", "Suspended", f"{_count(record)}; held by spec.suspend, set it to false to let it go on"
        )
    held = [node for node in record.pending if node in snapshot.locks]
    if working or not held:
        return None
    first = f"node {held[0]} is held by {holder(snapshot.locks[held[0]])}; starts by itself when that one ends"
    return _Word("Waiting", "WaitingForLock", first + _more(len(held) - 1, "node"))


def _leaving(snapshot: Snapshot, node: str) -> str | None:
    covered = snapshot.daemon_set.nodes if snapshot.daemon_set else {}
    view = snapshot.nodes.get(node)
    if node in covered or not view or not view.gpu_pods or snapshot.reset.spec.pods == "Keep":
        return None
    return f"waiting for {view.gpu_pods[0]} to leave" + _more(len(view.gpu_pods) - 1, "pod")


def _count(record: Record) -> str:
    total, done = len(record.results), len(record.done)
    return f"{done} of {total} node{'s'[: total > 1]} done"


def _done(snapshot: Snapshot) -> tuple[NodeResult, ...]:
    return snapshot.record.done if snapshot.record else ()


def _verdict(snapshot: Snapshot, done: Sequence[NodeResult]) -> _Word:
    bad = sorted((one for one in done if fails(one)), key=lambda one: (list(NodeVerdict).index(one.result), one.node))
    if bad:
        message = (
            f"{len(bad)} of {len(done)} node{'s'[: len(done) > 1]} not clean: node {bad[0].node}: {bad[0].message}"
        )
        return _Word("Failed", _reason(bad, len(done)), message + _more(len(bad) - 1, "node"))
    if snapshot.reset.spec.dry_run:
        return _Word("Complete", "DryRun", f"nothing was changed; {_sum(done)}")
    busy = any(one.result is NodeVerdict.BUSY for one in done)
    return _Word("Complete", "Busy" if busy else "Clean", _sum(done))


def _sum(done: Sequence[NodeResult]) -> str:
    """One node's own sentence, or how many there are of each kind."""
    if len(done) == 1:
        return f"node {done[0].node}: {done[0].message}"
    words = {NodeVerdict.CLEAN: "clean", NodeVerdict.BUSY: "busy with live work", NodeVerdict.NOT_CLEAN: "not clean"}
    counts = [(_number(done, verdict), word) for verdict, word in words.items()]
    return f"{len(done)} nodes: " + ", ".join(f"{count} {word}" for count, word in counts if count)


def _reason(bad: Sequence[NodeResult], total: int) -> str:
    reasons = {one.reason for one in bad}
    if "StoppedAfterFailures" in reasons:
        return "StoppedAfterFailures"
    if "DeadlineExceeded" in reasons and len(reasons) > 1:
        return "DeadlineExceeded"
    return bad[0].reason if total == 1 else _common(reasons)


def _common(reasons: set[str]) -> str:
    return reasons.pop() if len(reasons) == 1 else "NodesNotClean"


def _more(count: int, what: str) -> str:
    return f" (and {count} more {what}{'s'[: count > 1]})" if count > 0 else ""


# The document.


def _document(snapshot: Snapshot, word: _Word, *, refused: bool = False) -> dict[str, Any]:
    word = word._replace(message=printable(word.message, MESSAGE_LIMIT))
    done = _done(snapshot)
    shown, omitted = rows.fit(done)
    freed = _freed(done)
    document = {
        "observedGeneration": snapshot.reset.generation,
        **word._asdict(),
        "freed": people_size(sum(freed.values())),
        "conditions": _conditions(snapshot, word, refused=refused),
        "nodes": _nodes(snapshot),
        "bytesFreed": freed,
        "results": shown,
        "omittedResults": omitted,
    }
    return document | ({"startTime": rfc3339(snapshot.record.started_s)} if snapshot.record else {})


def _conditions(snapshot: Snapshot, word: _Word, *, refused: bool) -> list[dict[str, Any]]:
    begun = snapshot.record is not None
    over = word.phase in _TERMINAL
    accepted = "True" if begun else "False" if refused else "Unknown"
    truths = {
        "Accepted": (accepted, word.reason if refused else "Accepted" if begun else word.reason),
        "Progressing": (_truth(begun and not over and word.phase != "Suspended"), word.reason),
        "Complete": (_truth(word.phase == "Complete"), word.reason),
        "Failed": (_truth(word.phase == "Failed"), word.reason),
        "Suspended": (_truth(word.phase == "Suspended"), word.reason),
    }
    before = _before(snapshot.status)
    return [
        {
            "type": kind,
            "status": truth,
            "reason": reason,
            "message": word.message,
            "observedGeneration": snapshot.reset.generation,
            "lastTransitionTime": before.get((kind, truth)) or rfc3339(snapshot.now_s),
        }
        for kind, (truth, reason) in truths.items()
    ]


def _before(status: Mapping[str, Any]) -> dict[tuple[Any, Any], str]:
    """When each condition became what it is, as the status has it now. Whatever else a human wrote there is no time."""
    known = status.get("conditions")
    rows_of = [row for row in known if isinstance(row, dict)] if isinstance(known, list) else []
    timed = [row for row in rows_of if unix_s(row.get("lastTransitionTime")) is not None]
    return {(str(row.get("type")), str(row.get("status"))): row["lastTransitionTime"] for row in timed}


def _truth(value: bool) -> str:
    return "True" if value else "False"


def _nodes(snapshot: Snapshot) -> dict[str, int]:
    done = _done(snapshot)
    pending = set(snapshot.record.pending) if snapshot.record else set()
    running = len(pending.intersection(snapshot.mine))
    return {
        "total": len(snapshot.record.results) if snapshot.record else 0,
        "pending": len(pending) - running,
        "running": running,
        "clean": _number(done, NodeVerdict.CLEAN),
        "busy": _number(done, NodeVerdict.BUSY),
        "notClean": _number(done, NodeVerdict.NOT_CLEAN),
        "failed": _number(done, NodeVerdict.FAILED),
        "skipped": _number(done, NodeVerdict.SKIPPED),
    }


def _number(done: Iterable[NodeResult], verdict: NodeVerdict) -> int:
    return sum(one.result is verdict for one in done)


def _freed(done: Iterable[NodeResult]) -> dict[str, int]:
    freed = {"gpu": 0, "sharedMemory": 0, "files": 0}
    for one in done:
        freed["gpu"] += one.gpu_bytes_freed
        freed["sharedMemory"] += one.shared_memory.bytes_freed if one.shared_memory else 0
        freed["files"] += sum(part.bytes_freed for part in (one.caches, one.logs) if part)
    return {name: min(size, (1 << 63) - 1) for name, size in freed.items()}
