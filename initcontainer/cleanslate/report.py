"""The report, `cleanslate.dev/report/v1`, as a plain document: what report.schema.json describes. Pure.

Command lines and environments may hold secrets: of a process it tells the executable and the title, no arguments.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cleanslate.gpus import EXIT_CODES, GpuResult, GpuVerdict, Holder, Result
from cleanslate.printing import printable

_TITLE_LIMIT = 128
_OPTIONS = re.compile(r"\s-")
_TEXT_LIMIT = 512
_ROW_LIMIT = 2_000  # processes in a report; what is not clean comes first

REPORT_SCHEMA = "cleanslate.dev/report/v1"

Document = dict[str, Any]
NO_FILES: Mapping[str, Any] = {"removed": [], "removedCount": 0, "kept": [], "keptCount": 0, "bytesFreed": 0}


class Outline(NamedTuple):
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
    gpu_bytes_freed: int = 0
    processes: Sequence[Document] = ()
    shared_memory: Mapping[str, Any] = NO_FILES
    caches: Mapping[str, Any] = NO_FILES
    logs: Mapping[str, Any] = NO_FILES
    timings_s: Mapping[str, float] = {}
    warnings: Sequence[str] = ()


def build(outline: Outline) -> Document:
    """The report as JSON will hold it."""
    return {
        "schema": REPORT_SCHEMA,
        "verb": outline.verb,
        "scope": outline.scope,
        "dryRun": outline.dry_run,
        "host": text(outline.host),
        "startedAt": timestamp(outline.started_at_s),
        "durationSeconds": round(outline.duration_s, 3),
        "result": str(outline.result),
        "exitCode": EXIT_CODES[outline.result],
        "message": text(outline.message),
        "gpus": [_gpu(verdict) for verdict in outline.gpus],
        "gpuBytesFreed": outline.gpu_bytes_freed,
        "processes": list(outline.processes[:_ROW_LIMIT]),
        "sharedMemory": {"roots": []} | dict(outline.shared_memory),
        "caches": {"paths": []} | dict(outline.caches),
        "logs": {"patterns": []} | dict(outline.logs),
        "timings": {part: round(outline.timings_s.get(part, 0.0), 3) for part in ("survey", "end", "purge", "verify")},
        "warnings": [text(warning) for warning in _bounded(outline.warnings)],
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
        "executable": text(executable) if executable else None,
        "title": safe_title(title),
        "user": text(user) if user else None,
        "owner": {key: text(value) if value else None for key, value in owner.items()},
        "gpus": sorted(gpus),
        "memoryBytes": memory_bytes,
        "verdict": verdict,
        "reason": text(reason),
        "evidence": text(evidence),
        "outcome": outcome,
        "message": text(note),
    }


def safe_title(title: str) -> str:
    """A process title that may be shown: printable, short, and without anything that looks like options."""
    return printable(_OPTIONS.split(title, maxsplit=1)[0][:_TITLE_LIMIT])


def timestamp(unix_s: float) -> str:
    """RFC 3339 in UTC with milliseconds."""
    whole, thousandths = divmod(int(unix_s * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{thousandths:03}Z"


def _gpu(verdict: GpuVerdict) -> Document:
    reading = verdict.reading
    return {
        "index": reading.index,
        "uuid": text(reading.uuid) if reading.uuid else None,
        "parent": text(reading.parent) if reading.parent else None,
        "name": text(reading.name) if reading.name else None,
        "usedBytes": reading.used_bytes,
        "reservedBytes": reading.reserved_bytes,
        "totalBytes": reading.total_bytes,
        "toleranceBytes": verdict.tolerance_bytes,
        "result": str(verdict.result),
        "message": text(verdict.message),
        "holders": [_holder(holder) for holder in verdict.holders[:_ROW_LIMIT]],
    }


def _holder(holder: Holder) -> Document:
    return {
        "pid": holder.pid,
        "title": safe_title(holder.title),
        "owner": text(holder.owner),
        "verdict": holder.verdict,
        "usedBytes": holder.used_bytes,
    }


def _bounded(lines: Sequence[str], limit: int = 100) -> list[str]:
    shown = list(dict.fromkeys(lines))
    return shown if len(shown) <= limit else [*shown[:limit], f"… and {len(shown) - limit} more"]


def text(raw: str) -> str:
    """Any text as a report may hold it: printable and bounded."""
    shown = printable(raw)
    return shown if len(shown) <= _TEXT_LIMIT else shown[:_TEXT_LIMIT] + "…"
