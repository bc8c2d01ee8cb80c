"""The report, `cleanslate.dev/report/v1`, as a plain document: what report.schema.json describes. Pure.

Command lines and environments may hold secrets: of a process it tells the executable and the title, no arguments.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cleanslate import names
from cleanslate.formats import REPORT_SCHEMA
from cleanslate.gpus import EXIT_CODES, GpuResult, GpuVerdict, Holder, Result
from cleanslate.model import FileRecord, FileTally

_TITLE_LIMIT = 128
_TEXT_LIMIT = 512
_ROW_LIMIT = 2_000  # processes in a report; what is not clean comes first

Document = dict[str, Any]
EMPTY = FileTally()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Everything a report says, gathered from wherever it was found. Times in seconds, Unix time for `started_at_s`."""

    verb: str
    host: str
    started_at_s: float
    duration_s: float
    result: Result
    message: str
    scope: str | None = None
    dry_run: bool = False
    gpus: Sequence[GpuVerdict] = ()
    processes: Sequence[Document] = ()
    shared_memory: FileTally = EMPTY
    caches: FileTally = EMPTY
    logs: FileTally = EMPTY
    timings_s: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def build(outline: Outline) -> Document:
    """The report as JSON will hold it."""
    return {
        "schema": REPORT_SCHEMA,
        "verb": outline.verb,
        "scope": outline.scope,
        "dryRun": outline.dry_run,
        "host": _text(outline.host),
        "startedAt": timestamp(outline.started_at_s),
        "durationSeconds": round(outline.duration_s, 3),
        "result": str(outline.result),
        "exitCode": EXIT_CODES[outline.result],
        "message": _text(outline.message),
        "gpus": [_gpu(verdict) for verdict in outline.gpus],
        "processes": list(outline.processes[:_ROW_LIMIT]),
        "sharedMemory": _files(outline.shared_memory, "roots"),
        "caches": _files(outline.caches, "paths"),
        "logs": _files(outline.logs, "patterns"),
        "timings": {part: round(outline.timings_s.get(part, 0.0), 3) for part in ("survey", "end", "purge", "verify")},
        "warnings": [_text(warning) for warning in _bounded(outline.warnings)],
    }


def message(result: Result, verdicts: Sequence[GpuVerdict], failure: str | None, unended: Sequence[str]) -> str:
    """One sentence for the whole: what it is, and the first thing to look at if it is not clean."""
    if unended:
        return unended[0] if len(unended) == 1 else f"{unended[0]} (and {len(unended) - 1} more processes)"
    worst = [verdict for verdict in verdicts if verdict.result not in {GpuResult.CLEAN, GpuResult.BUSY}]
    if worst:
        more = f" (and {len(worst) - 1} more GPUs)" if len(worst) > 1 else ""
        return worst[0].message + more
    if failure:
        return failure
    if not verdicts:
        return "NVML shows 0 GPUs; check the driver, or runtimeClassName and NVIDIA_VISIBLE_DEVICES of the pod"
    busy = [verdict for verdict in verdicts if verdict.result is GpuResult.BUSY]
    if result is not Result.CLEAN:
        return busy[0].message if busy else "not as many clean readings in a row as asked for"
    clean = f"{len(verdicts) - len(busy)} of {len(verdicts)} GPUs are clean"
    return f"{clean}; {busy[0].message}" if busy else clean


def process(
    *,
    pid: int,
    started_at_s: float,
    executable: str | None,
    title: str,
    user: str | None,
    owner: Mapping[str, Any],
    gpus: Iterable[str],
    verdict: str,
    reason: str,
    evidence: str,
    outcome: str,
    note: str,
    memory_bytes: int | None,
) -> Document:
    """One row of `processes`."""
    return {
        "pid": pid,
        "startTime": timestamp(started_at_s),
        "executable": _text(executable) if executable else None,
        "title": safe_title(title),
        "user": _text(user) if user else None,
        "owner": {key: _text(value) if value else None for key, value in owner.items()},
        "gpus": sorted(gpus),
        "memoryBytes": memory_bytes,
        "verdict": verdict,
        "reason": _text(reason),
        "evidence": _text(evidence),
        "outcome": outcome,
        "message": _text(note),
    }


def safe_title(title: str) -> str:
    """A process title that may be shown: printable, short, and without anything that looks like options."""
    return names.printable(title.split(" -", 1)[0][:_TITLE_LIMIT])


def timestamp(unix_s: float) -> str:
    """RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _gpu(verdict: GpuVerdict) -> Document:
    reading = verdict.reading
    return {
        "index": reading.index,
        "uuid": _text(reading.uuid) if reading.uuid else None,
        "parent": _text(reading.parent) if reading.parent else None,
        "name": _text(reading.name) if reading.name else None,
        "usedBytes": reading.used_bytes,
        "reservedBytes": reading.reserved_bytes,
        "totalBytes": reading.total_bytes,
        "toleranceBytes": verdict.tolerance_bytes,
        "result": str(verdict.result),
        "message": _text(verdict.message),
        "holders": [_holder(holder) for holder in verdict.holders[:_ROW_LIMIT]],
    }


def _holder(holder: Holder) -> Document:
    judgement = holder.judgement
    return {
        "pid": holder.pid,
        "title": safe_title(holder.title),
        "owner": _text(holder.owner),
        "verdict": str(judgement.verdict) if judgement else None,
    }


def _files(tally: FileTally, places: str) -> Document:
    return {
        places: [_text(root) for root in tally.roots],
        "removed": [_file(record) for record in tally.removed],
        "removedCount": tally.removed_count,
        "kept": [_file(record) for record in tally.kept],
        "keptCount": tally.kept_count,
        "bytesFreed": tally.bytes_freed,
    }


def _file(record: FileRecord) -> Document:
    return {
        "path": record.path,
        "verdict": str(record.verdict),
        "reason": record.reason,
        "evidence": record.evidence,
        "sizeBytes": record.size_bytes,
        "error": record.error,
    }


def _bounded(lines: Sequence[str], limit: int = 100) -> list[str]:
    shown = list(dict.fromkeys(lines))
    return shown if len(shown) <= limit else [*shown[:limit], f"… and {len(shown) - limit} more"]


def _text(text: str) -> str:
    shown = names.printable(text)
    return shown if len(shown) <= _TEXT_LIMIT else shown[:_TEXT_LIMIT] + "…"
