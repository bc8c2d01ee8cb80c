"""The rows of a status: results cut to what the API keeps, what is not clean first. Pure."""

import heapq
import json
from collections.abc import Callable, Iterable
from typing import Any

from cleanslate_operator.noderesult import GpuResult, NodeResult, NodeVerdict, Outcome, Verdict

LIMIT_BYTES = 200 * 1024
LIMIT_ROWS = 200
_WORST_FIRST = {verdict: rank for rank, verdict in enumerate(NodeVerdict)}
_NOT_SHOWN = ("gpuBytesFreed", "dryRun")  # of the record only: the status says them once, for all nodes
_SLACK_BYTES = 48  # for the counts of what is left out
_ESCAPED, _ESCAPE_BYTES = "<>&", 6  # the API server writes each of them as \u00XX

Row = dict[str, Any]

# What goes first when a row is too long: the list, and which of its items.
_EXPENDABLE: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("warnings", lambda _: True),
    ("processes", lambda process: process["verdict"] == Verdict.KEEP),
    ("gpus", lambda gpu: gpu["result"] == GpuResult.CLEAN),
    ("processes", lambda process: process["outcome"] == Outcome.ENDED),
    ("gpus", lambda gpu: gpu["result"] == GpuResult.BUSY),
    ("processes", lambda _: True),
    ("gpus", lambda _: True),
)
_FILES = ("logs", "caches", "sharedMemory")


def fit(
    results: Iterable[NodeResult], limit_bytes: int = LIMIT_BYTES, limit_rows: int = LIMIT_ROWS
) -> tuple[list[Row], int]:
    """At most so many rows of at most so many bytes together, worst first, and how many nodes have none.

    Each row has the same share of the bytes: a few nodes keep every detail, many keep their result and a short message.
    """
    known = list(results)
    shown = heapq.nsmallest(limit_rows, known, key=lambda one: (_WORST_FIRST[one.result], one.node))
    share = limit_bytes // max(len(shown), 1)
    return [_row(one, share) for one in shown], len(known) - len(shown)


def size_bytes(value: Any) -> int:
    """How long a JSON value can become in the API server's store."""
    text = json.dumps(value, separators=(",", ":"))
    return len(text) + sum(text.count(letter) for letter in _ESCAPED) * (_ESCAPE_BYTES - 1)


def _row(result: NodeResult, limit_bytes: int) -> Row:
    row = result.to_json()
    for key in _NOT_SHOWN:
        del row[key]
    if size_bytes(row) > limit_bytes:
        _shorten(row, limit_bytes - _SLACK_BYTES)
    row["omitted"] = {name: count for name, count in row["omitted"].items() if count}
    return {key: value for key, value in row.items() if value not in ([], {})}


def _shorten(row: Row, room_bytes: int) -> None:
    """Leave out what matters least, then more, until the row fits."""
    for name, may_go in _EXPENDABLE:
        _drop(row, name, may_go, size_bytes(row) - room_bytes)
    for name in _FILES:
        if size_bytes(row) > room_bytes:
            row.pop(name, None)
    row["message"] = _cut(row["message"], size_bytes(row["message"]) + room_bytes - size_bytes(row))


def _drop(row: Row, name: str, may_go: Callable[[Any], bool], excess_bytes: int) -> None:
    """Leave out items of one list, the last first, until so many bytes are saved."""
    kept, saved = [], 0
    for item in reversed(row[name]):
        if saved < excess_bytes and may_go(item):
            saved += size_bytes(item) + 1
        else:
            kept.append(item)
    row["omitted"][name] += len(row[name]) - len(kept)
    row[name] = kept[::-1]


def _cut(message: str, limit_bytes: int) -> str:
    """The beginning of a message; a character takes one to twelve bytes."""
    cut = message
    while cut and size_bytes(cut) > limit_bytes:
        cut = cut.removesuffix("…")[: -max((size_bytes(cut) - limit_bytes) // 12, 1)]
        cut = cut and f"{cut}…"
    return cut
