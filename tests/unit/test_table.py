"""The table for people: from the same document as the JSON, each thing on a line of its own."""

from typing import Any

import pytest
from hypothesis import given, settings

from cleanslate import report, table
from cleanslate.gpus import GpuResult, GpuVerdict, Result
from cleanslate.model import FileRecord, FileTally, Verdict
from cleanslate.nodereport import parts_of
from cleanslate.purge import Purged
from cleanslate.report import Outline
from cleanslate.reset import Findings
from cleanslate.settings import Settings
from unit.examples import GIB, GPU_0, NOW_S, POD, gpu, holder
from unit.reports import outlines


def document(**known: Any) -> dict[str, Any]:
    """A reset's report."""
    ordinary = {"verb": "reset", "host": "gpu-17", "started_at_s": NOW_S, "duration_s": 0.5}
    return report.build(Outline(**{**ordinary, "result": Result.CLEAN, "message": "all is well", **known}))


def row(pid: int, **known: Any) -> dict[str, Any]:
    """A process of a report."""
    ordinary: dict[str, Any] = {
        "started_at_s": NOW_S,
        "executable": "/usr/bin/python3",
        "title": "VLLM::Worker_TP0",
        "user": "alice",
        "owner": {"kind": "pod", "name": POD, "container": None, "evidence": "cgroup /kubepods"},
        "gpus": (GPU_0,),
        "verdict": "End",
        "reason": "orphaned worker",
        "evidence": "its parent is bash",
        "outcome": "Ended",
        "note": "",
        "memory_bytes": GIB,
    }
    return report.process(pid=pid, **ordinary | known)


def line_with(text: str, part: str) -> str:
    """The one line of a table in which something stands."""
    (found,) = (line for line in text.split("\n") if part in line)
    return found


def files(removed: int, kept: int, *, verb: str = "reset", bytes_freed: int = GIB) -> str:
    """A table of shared memory."""

    def record(number: int, verdict: Verdict) -> FileRecord:
        path = f"/dev/shm/psm_{number:08x}"
        return FileRecord(path=path, verdict=verdict, reason="r", evidence="e", size_bytes=1024)

    tally = FileTally(
        roots=("/dev/shm",),
        removed=tuple(record(number, Verdict.REMOVE) for number in range(min(removed, 1000))),
        removed_count=removed,
        kept=tuple(record(0xA0000 + number, Verdict.KEEP) for number in range(min(kept, 1000))),
        kept_count=kept,
        bytes_freed=bytes_freed,
    )
    parts = parts_of(Findings(purged=Purged(shared_memory=tally), result=Result.CLEAN), Settings(verb=verb))
    return table.render(report.build(Outline(verb=verb, host="h", started_at_s=NOW_S, duration_s=1.0, **parts)))


def test_the_last_line_is_the_verdict() -> None:
    """What was done, what came of it, how long it took, and why."""
    assert table.render(document()).split("\n")[-1] == "reset: Clean in 0.50 s: all is well"
    assert table.render(document(dry_run=True)).split("\n")[-1].startswith("reset (dry run): Clean")
    assert table.render(document(verb="inspect", dry_run=True)).split("\n")[-1].startswith("inspect: Clean")


def test_a_gpu_is_a_line_with_its_holders() -> None:
    """Two by name, the rest by number; what is unknown is a question mark, never zero."""
    many = tuple(holder(pid) for pid in (100, 101, 102, 103))
    gpus = [
        GpuVerdict(gpu(0, used_bytes=20 * GIB), 0, GpuResult.HELD, "m", many),
        GpuVerdict(gpu(1), 0, GpuResult.CLEAN, "m"),
        GpuVerdict(gpu(-1, uuid=None, used_bytes=None), 0, GpuResult.MISSING, "m"),
    ]
    text = table.render(document(gpus=gpus, result=Result.NOT_CLEAN))
    assert line_with(text, GPU_0).split(None, 5) == [
        *("0", GPU_0, "20.0", "GiB", "Held"),
        "100 VLLM::Worker_TP0, 101 VLLM::Worker_TP0 +2",
    ]
    assert line_with(text, "Clean  ").split()[-1] == "-"
    assert line_with(text, "Missing").split() == ["?", "?", "?", "Missing", "-"]


def test_a_process_is_a_line_and_evidence_is_told_once() -> None:
    """Three workers of one dead server rest on one fact."""
    text = table.render(document(processes=[row(100), row(101), row(102, verdict="Keep", evidence="it lives")]))
    line = line_with(text, "101  ")
    assert line.split() == [
        "101",
        "VLLM::Worker_TP0",
        "alice",
        "pod",
        f"{POD[:12]}…",
        "End",
        "Ended",
        "orphaned",
        "worker",
    ]
    assert text.count("its parent is bash") == 1
    assert "it lives" not in text


def test_columns_stand_below_their_heads() -> None:
    """However wide a cell is."""
    lines = table.render(document(processes=[row(1, title="t"), row(4194304, title="a-long-title")])).split("\n")
    at = lines[0].index("TITLE")
    assert [line[at:].split()[0] for line in lines[1:3]] == ["t", "a-long-title"]


def test_files_are_counted_and_a_few_are_named() -> None:
    """Ten thousand leftovers do not scroll the verdict away."""
    text = files(10_000, 1)
    assert "shared memory: removed 10000 (1.0 GiB), kept 1" in text
    assert text.count("/dev/shm/psm_") == 6
    assert "  … and 9995 more" in text
    assert line_with(text, "psm_000a0000").split() == ["keep", "/dev/shm/psm_000a0000:", "r:", "e"]


@pytest.mark.parametrize(("removed", "kept", "hidden"), [(5, 5, 0), (6, 0, 1), (0, 7, 2), (1000, 1000, 1990)])
def test_what_is_not_shown_is_counted(removed: int, kept: int, hidden: int) -> None:
    """Exactly."""
    text = files(removed, kept)
    assert (f"  … and {hidden} more" in text) is (hidden > 0)
    assert ("… and" in text) is (hidden > 0)


def test_nothing_about_files_is_no_section() -> None:
    """A reset that found none."""
    assert "shared memory" not in files(0, 0)


def test_a_dry_run_says_what_it_would_do_and_frees_nothing() -> None:
    """With the size that would be freed."""
    assert "shared memory: would remove 2 (2.0 KiB), kept 0" in files(2, 0, verb="inspect", bytes_freed=0)


def test_warnings_are_lines() -> None:
    """Above the verdict."""
    text = table.render(document(warnings=["one", "two"]))
    assert "\n".join(["warning: one", "warning: two"]) in text


@pytest.mark.parametrize(
    ("used_bytes", "shown"),
    [(None, "?"), (0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (141 * GIB, "141.0 GiB"), (1 << 60, "TiB")],
)
def test_sizes_are_short(used_bytes: int | None, shown: str) -> None:
    """In the unit that fits."""
    one = GpuVerdict(gpu(0, used_bytes=used_bytes), 0, GpuResult.CLEAN, "m")
    assert f"{shown}  " in line_with(table.render(document(gpus=[one])), GPU_0)


@settings(max_examples=20, deadline=None)
@given(outlines)
def test_a_report_of_anything_can_be_shown(random: Outline) -> None:
    """Hostile titles move no cursor and make no line of their own; the verdict is the last line."""
    text = table.render(report.build(random))
    assert all(line.isprintable() for line in text.split("\n"))
    assert f": {random.result} in " in text.split("\n")[-1]
