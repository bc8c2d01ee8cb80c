"""From the findings of a run on a node to what its report says. Pure."""

from typing import Any

from cleanslate import procfs, report
from cleanslate.gpus import Result
from cleanslate.model import FileRecord, FileTally, Manner, Outcome, Verdict
from cleanslate.reset import NOT_GONE, Findings, Record
from cleanslate.settings import Settings


def parts_of(findings: Findings, chosen: Settings) -> dict[str, Any]:
    """The parts of report.Outline that a run fills."""
    records = sorted(findings.records.values(), key=_rank)
    unended = (
        [_unended(record) for record in records if _is_left(record)] if findings.result is not Result.CLEAN else []
    )
    return {
        "result": findings.result,
        "message": report.message(findings.result, findings.verdicts, findings.failure, unended),
        "scope": str(chosen.scope),
        "dry_run": chosen.verb == "inspect" or chosen.dry_run,
        "gpus": findings.verdicts,
        "gpu_bytes_freed": findings.gpu_bytes_freed,
        "processes": [_process(record) for record in records],
        "shared_memory": _files(findings.purged.shared_memory, "roots"),
        "caches": _files(findings.purged.caches, "paths"),
        "logs": _files(findings.purged.logs, "patterns"),
        "timings_s": findings.timings_s,
        "warnings": findings.warnings,
    }


def _rank(record: Record) -> tuple[bool, bool, bool, int]:
    """What is left first, then what was ended, then what was kept; by pid, helpers after those they help."""
    helper = record.judgement.manner is Manner.SPARED
    return not _is_left(record), record.fate.outcome is Outcome.KEPT, helper, record.case.process.pid


def _is_left(record: Record) -> bool:
    return record.judgement.verdict is Verdict.END and record.fate.outcome in NOT_GONE


def _unended(record: Record) -> str:
    if record.fate.message:
        return record.fate.message
    case, judgement = record.case, record.judgement
    label = f"pid {case.process.pid} ({report.safe_title(case.process.title)}, {case.owner})"
    return f"{label}: {judgement.reason}: {judgement.evidence}"


def _process(record: Record) -> report.Document:
    case, judgement = record.case, record.judgement
    owner = case.owner
    return report.process(
        pid=case.process.pid,
        started_at_s=procfs.started_at_s(case.process),
        executable=case.process.executable,
        title=case.process.title,
        user=record.person.user,
        owner={"kind": str(owner.kind), "name": owner.name, "container": owner.container, "evidence": owner.evidence},
        gpus=case.gpus,
        verdict=str(judgement.verdict),
        reason=judgement.reason,
        evidence=judgement.evidence,
        outcome=str(record.fate.outcome),
        note=record.fate.message,
        memory_bytes=record.person.memory_bytes,
    )


def _files(tally: FileTally, places: str) -> report.Document:
    return {
        places: [report.text(root) for root in tally.roots],
        "removed": [_file(record) for record in tally.removed],
        "removedCount": tally.removed_count,
        "kept": [_file(record) for record in tally.kept],
        "keptCount": tally.kept_count,
        "bytesFreed": tally.bytes_freed,
    }


def _file(record: FileRecord) -> report.Document:
    return {
        "path": record.path,
        "verdict": str(record.verdict),
        "reason": record.reason,
        "evidence": record.evidence,
        "sizeBytes": record.size_bytes,
        "error": record.error,
    }
