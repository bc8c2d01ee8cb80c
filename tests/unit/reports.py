"""Random outlines of reports, as hostile as what they are made of may be, and the schema that every report must fit."""

import json
import pathlib
from typing import Any

import jsonschema
from hypothesis import strategies as st

from cleanslate import nodereport, printing, report
from cleanslate.gpus import GpuResult, GpuVerdict, Holder, Result
from cleanslate.model import FileRecord, FileTally, Outcome, OwnerKind, Verdict
from cleanslate.nvml import GpuReading
from cleanslate.purge import Purged
from cleanslate.report import Document, Outline
from cleanslate.reset import Findings
from cleanslate.settings import Settings

SCHEMA_FILE = pathlib.Path(report.__file__).with_name("report.schema.json")
SCHEMA: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

hostile = st.one_of(
    st.text(max_size=30),
    st.text(st.characters(categories=["Cs", "Cc", "Cf", "Zl"]), max_size=20),
    st.sampled_from(["𝕏" * 300, "\udc80" * 300, "\x1b[2J\r\n", '"\\' * 300, "a" * 9_000, "secret --api-key=hunter2"]),
)
printable = hostile.map(printing.printable)
size = st.integers(0, 2**60)
seconds = st.floats(0, 1e7)
moment = st.floats(0, 4e9)
pid = st.integers(1, 2**22)
holders = st.builds(
    Holder,
    pid=pid,
    title=hostile,
    owner=hostile,
    verdict=st.sampled_from([None, "Keep", "End"]),
    used_bytes=st.none() | size,
)
gpus = st.builds(
    GpuVerdict,
    reading=st.builds(
        GpuReading,
        index=st.integers(-1, 64),
        uuid=st.none() | hostile,
        parent=st.none() | hostile,
        name=st.none() | hostile,
        used_bytes=st.none() | size,
        reserved_bytes=st.none() | size,
        total_bytes=st.none() | size,
    ),
    tolerance_bytes=size,
    result=st.sampled_from(list(GpuResult)),
    message=hostile,
    holders=st.lists(holders, max_size=3).map(tuple),
)
records = st.builds(
    FileRecord,
    path=printable,
    verdict=st.sampled_from([Verdict.KEEP, Verdict.REMOVE]),
    reason=printable,
    evidence=printable,
    size_bytes=size,
    error=st.none() | printable,
)
tallies = st.builds(
    FileTally,
    roots=st.lists(hostile, max_size=2).map(tuple),
    removed=st.lists(records, max_size=3).map(tuple),
    removed_count=st.integers(3, 10**6),
    kept=st.lists(records, max_size=3).map(tuple),
    kept_count=st.integers(3, 10**6),
    bytes_freed=size,
)
processes = st.fixed_dictionaries(
    {
        "pid": pid,
        "started_at_s": moment,
        "executable": st.none() | hostile,
        "title": hostile,
        "user": st.none() | hostile,
        "owner": st.fixed_dictionaries(
            {
                "kind": st.sampled_from(list(OwnerKind)).map(str),
                "name": hostile,
                "container": st.none() | hostile,
                "evidence": hostile,
            }
        ),
        "gpus": st.lists(st.sampled_from(["GPU-0", "GPU-1"]), max_size=2, unique=True),
        "verdict": st.sampled_from([Verdict.KEEP, Verdict.END]).map(str),
        "reason": hostile,
        "evidence": hostile.filter(bool),
        "outcome": st.sampled_from(list(Outcome)).map(str),
        "note": hostile,
        "memory_bytes": st.none() | size,
    }
).map(lambda known: report.process(**known))


def _with_files(purged: Purged, **known: Any) -> Outline:
    """An outline with what a node's run tells of files."""
    parts = nodereport.parts_of(Findings(purged=purged), Settings(verb="reset"))
    return Outline(**known, **{part: parts[part] for part in ("shared_memory", "caches", "logs")})


outlines = st.builds(
    _with_files,
    st.builds(Purged, shared_memory=tallies, caches=tallies, logs=tallies),
    verb=st.sampled_from(["inspect", "reset", "gate"]),
    host=hostile,
    started_at_s=moment,
    duration_s=seconds,
    result=st.sampled_from(list(Result)),
    message=hostile,
    scope=st.sampled_from([None, "orphans", "all"]),
    dry_run=st.booleans(),
    gpus=st.lists(gpus, max_size=3),
    processes=st.lists(processes, max_size=3),
    timings_s=st.dictionaries(st.sampled_from(["survey", "end", "purge", "verify"]), seconds),
    warnings=st.lists(hostile, max_size=4),
)


def check(document: Document) -> None:
    """Fail unless the document is a report by the schema and by strict JSON and UTF-8."""
    VALIDATOR.validate(document)
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    assert json.loads(text.encode("utf-8")) == document
