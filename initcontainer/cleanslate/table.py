"""A report as a table for people. Pure text, from the same document that `--output json` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

_FILE_LIMIT = 5
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def render(document: Mapping[str, Any]) -> str:
    """The whole report, about as long as a screen: what was not clean first, files by count."""
    sections = [
        _gpus(document["gpus"]),
        _processes(document["processes"]),
        _files("shared memory", document["sharedMemory"], dry=document["dryRun"]),
        _files("caches", document["caches"], dry=document["dryRun"]),
        _files("logs", document["logs"], dry=document["dryRun"]),
        _warnings(document["warnings"]),
        _verdict(document),
    ]
    return "\n\n".join(section for section in sections if section)


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> str:
    rows = [(_index(gpu), gpu["uuid"] or "?", _size(gpu["usedBytes"]), gpu["result"], _holders(gpu)) for gpu in gpus]
    return _columns(("GPU", "UUID", "USED", "RESULT", "HELD BY"), rows)


def _processes(processes: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            str(process["pid"]),
            process["title"][:40],
            process["user"] or "?",
            _owner(process["owner"]),
            process["verdict"],
            process["outcome"],
            process["reason"],
        )
        for process in processes
    ]
    table = _columns(("PID", "TITLE", "USER", "OWNER", "VERDICT", "OUTCOME", "WHY"), rows)
    evidence = list(dict.fromkeys(p["evidence"] for p in processes if p["verdict"] == "End"))
    return "\n".join([table, *(f"  evidence: {text}" for text in evidence[:_FILE_LIMIT])]) if table else ""


def _files(what: str, part: Mapping[str, Any], *, dry: bool) -> str:
    if not part["removedCount"] and not part["kept"]:
        return ""
    size = sum(record["sizeBytes"] for record in part["removed"]) if dry else part["bytesFreed"]
    verb = "would remove" if dry else "removed"
    lines = [f"{what}: {verb} {part['removedCount']} ({_size(size)}), kept {part['keptCount']}"]
    for record in (*part["removed"][:_FILE_LIMIT], *part["kept"][:_FILE_LIMIT]):
        failed = f"; {record['error']}" if record["error"] else ""
        lines.append(
            f"  {record['verdict'].lower():6} {record['path']}: {record['reason']}: {record['evidence']}{failed}"
        )
    hidden = part["removedCount"] + part["keptCount"] - len(lines) + 1
    return "\n".join([*lines, f"  … and {hidden} more"] if hidden > 0 else lines)


def _warnings(warnings: Sequence[str]) -> str:
    return "\n".join(f"warning: {warning}" for warning in warnings)


def _verdict(document: Mapping[str, Any]) -> str:
    what = (
        "inspect" if document["verb"] == "inspect" else document["verb"] + (" (dry run)" if document["dryRun"] else "")
    )
    took = f"{document['durationSeconds']:.2f} s"
    return f"{what}: {document['result']} in {took}: {document['message']}"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    )


def _index(gpu: Mapping[str, Any]) -> str:
    return "?" if gpu["index"] < 0 else str(gpu["index"])


def _owner(owner: Mapping[str, Any]) -> str:
    name = owner["name"] or ""
    return f"{owner['kind']} {name[:12] + '…' if len(name) > 20 else name}".strip()


def _holders(gpu: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{holder['pid']} {holder['title'][:24]}" for holder in gpu["holders"][:2])
    more = len(gpu["holders"]) - 2
    return f"{shown} +{more}" if more > 0 else shown or "-"


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "?"
    value = float(size_bytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return "?"
