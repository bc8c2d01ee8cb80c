"""Random outlines of reports, as hostile as what they are made of may be, and the schema that every report must fit."""

import json
import pathlib
import random
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

texts = st.text(max_size=30) | st.text(st.characters(categories=["Cs", "Cc", "Cf", "Zl"]), max_size=20)
LONG = ("𝕏" * 300, "\udc80" * 300, "\x1b[2J\r\n", '"\\' * 300, "a" * 9_000, "server --api-key hunter2")


class Chance:
    """Makes the parts of a report from a few hostile texts, by chance: quicker than to draw each part by itself."""

    def __init__(self, seed: int, hostile: list[str]) -> None:
        self._random = random.Random(seed)
        self._texts = [*hostile, *LONG]

    def text(self) -> str:
        """One of the texts."""
        return self._random.choice(self._texts)

    def size(self) -> int:
        """Bytes."""
        return self._random.choice([0, 1, 20 << 30, 1 << 60])

    def outline(self) -> Outline:
        """A whole report's content."""
        pick, one = self._random.choice, self._random
        purged = Purged(shared_memory=self.tally(), caches=self.tally(), logs=self.tally())
        parts = nodereport.parts_of(Findings(purged=purged), Settings(verb="reset"))
        return Outline(
            verb=pick(["inspect", "reset", "gate"]),
            host=self.text(),
            started_at_s=one.uniform(0, 4e9),
            duration_s=one.uniform(0, 1e6),
            result=pick(list(Result)),
            message=self.text(),
            scope=pick([None, "orphans", "all"]),
            dry_run=pick([False, True]),
            gpu_bytes_freed=self.size(),
            gpus=[self.gpu() for _ in range(pick([0, 1, 8]))],
            processes=[self.process() for _ in range(pick([0, 1, 20]))],
            timings_s={"survey": one.uniform(0, 9)},
            warnings=[self.text() for _ in range(pick([0, 1, 20]))],
            **{part: parts[part] for part in ("shared_memory", "caches", "logs")},
        )

    def gpu(self) -> GpuVerdict:
        """A GPU with holders."""
        pick = self._random.choice
        reading = GpuReading(
            index=pick([-1, 0, 7]),
            uuid=pick([None, self.text()]),
            parent=pick([None, self.text()]),
            name=pick([None, self.text()]),
            used_bytes=pick([None, self.size()]),
            reserved_bytes=pick([None, self.size()]),
            total_bytes=pick([None, self.size()]),
        )
        verdict, used = pick([None, "Keep", "End"]), pick([None, self.size()])
        holder = Holder(pid=1, title=self.text(), owner=self.text(), verdict=verdict, used_bytes=used)
        result = pick(list(GpuResult))
        return GpuVerdict(reading, self.size(), result, self.text(), (holder,) * pick([0, 1, 5]))

    def process(self) -> Document:
        """A process's row."""
        pick = self._random.choice
        return report.process(
            pid=pick([1, 1 << 22]),
            started_at_s=self._random.uniform(0, 4e9),
            executable=pick([None, self.text()]),
            title=self.text(),
            user=pick([None, self.text()]),
            owner={
                "kind": str(pick(list(OwnerKind))),
                "name": self.text(),
                "container": pick([None, self.text()]),
                "evidence": self.text(),
            },
            gpus=("GPU-1", "GPU-0"),
            verdict=pick(["Keep", "End"]),
            reason=self.text(),
            evidence=self.text() or "evidence",
            outcome=str(pick(list(Outcome))),
            note=self.text(),
            memory_bytes=pick([None, self.size()]),
        )

    def tally(self) -> FileTally:
        """What became of files; their paths are printable by contract."""
        pick = self._random.choice
        path, error = printing.printable(self.text()), pick([None, "in use"])
        verdict = pick([Verdict.KEEP, Verdict.REMOVE])
        record = FileRecord(path=path, verdict=verdict, reason="r", evidence="e", size_bytes=self.size(), error=error)
        return FileTally(
            roots=(self.text(),) * pick([0, 2]),
            removed=(record,) * pick([0, 1, 9]),
            removed_count=10,
            kept=(record,) * pick([0, 1, 9]),
            kept_count=10,
            bytes_freed=self.size(),
        )


outlines = st.builds(
    lambda seed, hostile: Chance(seed, hostile).outline(), st.integers(0, 2**32), st.lists(texts, max_size=3)
)


def check(document: Document) -> None:
    """Fail unless the document is a report by the schema and by strict JSON and UTF-8."""
    VALIDATOR.validate(document)
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    assert json.loads(text.encode("utf-8")) == document
