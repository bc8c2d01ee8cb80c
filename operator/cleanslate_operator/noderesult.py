"""What became of one node, as plain data, and its JSON: in a status row, in the record, and in the summary of a reset pod.

A summary comes from a node that may be anybody's by now. So every text is printable and bounded, every number in its range and
every word known, or the whole is refused; keys that are not known are left out, since a newer program may add some.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

_T = TypeVar("_T")

MESSAGE_LIMIT = 600
GPU_LIMIT, PROCESS_LIMIT, WARNING_LIMIT = 64, 64, 16
BYTES_LIMIT = (1 << 63) - 1  # an int64 of the API
_COUNT_LIMIT = 10**9
_SECONDS_LIMIT = 10**7
_REASON = re.compile(r"[A-Za-z]{1,64}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)")


class NodeVerdict(StrEnum):
    """What a node is after its reset; worst first, as a status shows them."""

    FAILED = "Failed"  # not known to be clean: the reset did not run, or could not tell
    NOT_CLEAN = "NotClean"
    SKIPPED = "Skipped"  # not tried
    BUSY = "Busy"  # clean, but for GPUs that a kept owner uses
    CLEAN = "Clean"


class GpuResult(StrEnum):
    """What the node program calls a GPU."""

    CLEAN = "Clean"
    BUSY = "Busy"
    RESIDUAL = "Residual"
    HELD = "Held"
    UNKILLABLE = "Unkillable"
    ERROR = "Error"
    NOT_SUPPORTED = "NotSupported"
    MISSING = "Missing"


class Verdict(StrEnum):
    """What the node program decided about a process."""

    KEEP = "Keep"
    END = "End"


class Outcome(StrEnum):
    """What the node program says became of a process."""

    KEPT = "Kept"
    WOULD_END = "WouldEnd"
    ENDED = "Ended"
    ZOMBIE = "Zombie"
    UNINTERRUPTIBLE = "Uninterruptible"
    UNKILLABLE = "Unkillable"
    NOT_ENDED = "NotEnded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU or MIG instance. `index` is -1 and `uuid` None where unknown, `used_bytes` None without a reading."""

    index: int
    uuid: str | None
    result: GpuResult
    used_bytes: int | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process that had to do with a GPU."""

    pid: int
    title: str
    owner: str
    verdict: Verdict
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What a purge did with one kind of files."""

    removed_count: int
    kept_count: int
    bytes_freed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Omitted:
    """How many rows of each list were left out."""

    gpus: int = 0
    processes: int = 0
    warnings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """What became of one node: final. Files None: nothing is known of them. `finished_at` is a time of the API.

    `dry_run`: nothing was changed; a node with leftovers is then NotClean.
    """

    node: str
    result: NodeVerdict
    reason: str
    message: str
    finished_at: str | None = None
    duration_s: float | None = None
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[Process, ...] = ()
    shared_memory: Files | None = None
    caches: Files | None = None
    logs: Files | None = None
    warnings: tuple[str, ...] = ()
    omitted: Omitted = field(default_factory=Omitted)
    gpu_bytes_freed: int = 0
    dry_run: bool = False

    def to_json(self) -> dict[str, Any]:
        """For the record; `from_json` is its inverse. A status row is less, see rows.py. What is not known is left out."""
        known = {
            "finishedAt": self.finished_at,
            "durationSeconds": self.duration_s,
            "sharedMemory": _files_json(self.shared_memory),
            "caches": _files_json(self.caches),
            "logs": _files_json(self.logs),
        }
        return {
            "node": self.node,
            "result": str(self.result),
            "reason": self.reason,
            "message": self.message,
            **{key: value for key, value in known.items() if value is not None},
            "gpus": [_gpu_json(gpu) for gpu in self.gpus],
            "processes": [_process_json(process) for process in self.processes],
            "warnings": list(self.warnings),
            "omitted": {name: getattr(self.omitted, name) for name in Omitted.__slots__},
            "gpuBytesFreed": self.gpu_bytes_freed,
            "dryRun": self.dry_run,
        }

    @classmethod
    def from_json(cls, document: object) -> "NodeResult":
        """The result in a JSON value, checked. Raises ValueError with what is wrong in it."""
        fields = Fields.of(document, "result")
        return cls(
            node=fields.text("node", 253),
            result=fields.word("result", NodeVerdict),
            reason=fields.matching("reason", _REASON),
            message=fields.text("message", MESSAGE_LIMIT),
            finished_at=fields.optional("finishedAt", lambda key: fields.matching(key, TIME)),
            duration_s=fields.optional("durationSeconds", fields.seconds),
            **details(fields),
        )


def details(fields: "Fields") -> dict[str, Any]:
    """The fields of NodeResult that its JSON has in common with a summary, checked. Raises ValueError."""
    return {
        "gpus": fields.rows("gpus", GPU_LIMIT, _gpu),
        "processes": fields.rows("processes", PROCESS_LIMIT, _process),
        "shared_memory": fields.optional("sharedMemory", lambda key: _files(fields.part(key))),
        "caches": fields.optional("caches", lambda key: _files(fields.part(key))),
        "logs": fields.optional("logs", lambda key: _files(fields.part(key))),
        "warnings": fields.texts("warnings", WARNING_LIMIT, 512),
        "omitted": _omitted(fields.part("omitted"), fields),
        "gpu_bytes_freed": fields.optional("gpuBytesFreed", fields.size) or 0,
        "dry_run": fields.optional("dryRun", fields.switch) or False,
    }


class Fields:
    """One JSON object, its values taken one by one with their type and bounds checked. All methods raise ValueError."""

    __slots__ = ("_values", "_where")

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    @classmethod
    def of(cls, value: object, where: str) -> "Fields":
        """The fields of a value that must be an object."""
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")  # noqa: TRY004 - of a value, as all that is wrong here
        return cls(value, where)

    def optional(self, key: str, take: Callable[[str], _T]) -> _T | None:
        """What `take` makes of the key, None if it is not there or null."""
        return None if self._values.get(key) is None else take(key)

    def part(self, key: str) -> "Fields":
        """The fields of an object in this one; an empty object if it is not there."""
        return Fields.of(self._values.get(key, {}), key)

    def text(self, key: str, limit: int) -> str:
        """A text, made printable and cut at so many characters."""
        return printable(self._of(key, str), limit)

    def matching(self, key: str, pattern: re.Pattern[str]) -> str:
        """A text that the pattern matches as a whole."""
        value = self._of(key, str)
        if not pattern.fullmatch(value):
            raise self._wrong(key)
        return value

    def word(self, key: str, words: Callable[[str], _T]) -> _T:
        """A word of an enumeration."""
        try:
            return words(self._of(key, str))
        except ValueError as error:
            raise self._wrong(key) from error

    def whole(self, key: str, low: int = 0, high: int = _COUNT_LIMIT) -> int:
        """A whole number between two bounds."""
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key)
        return value

    def size(self, key: str) -> int:
        """A number of bytes."""
        return self.whole(key, 0, BYTES_LIMIT)

    def seconds(self, key: str) -> float:
        """A duration in seconds."""
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _SECONDS_LIMIT:
            raise self._wrong(key)  # not a number, as NaN, is not between two numbers either
        return round(float(value), 3)

    def switch(self, key: str) -> bool:
        """True or false."""
        return self._of(key, bool)

    def texts(self, key: str, limit: int, length: int) -> tuple[str, ...]:
        """The first so many texts of a list, each made printable and cut; none if the list is not there."""
        items = self._list(key)
        if not all(isinstance(item, str) for item in items):
            raise self._wrong(key)
        return tuple(printable(item, length) for item in items[:limit])

    def rows(self, key: str, limit: int, read: "Callable[[Fields], _T]") -> tuple[_T, ...]:
        """The first so many objects of a list, each read; none if the list is not there."""
        return tuple(read(Fields.of(item, key)) for item in self._list(key)[:limit])

    def beyond(self, key: str, limit: int) -> int:
        """How many items of a list `rows` and `texts` leave out."""
        return max(0, len(self._list(key)) - limit)

    def _list(self, key: str) -> list[Any]:
        return self._of(key, list) if key in self._values else []

    def _of(self, key: str, kind: type[_T]) -> _T:
        value = self._values.get(key)
        if not isinstance(value, kind):
            raise self._wrong(key)
        return value

    def _wrong(self, key: str) -> ValueError:
        return ValueError(f"{key} of {self._where} is not what it has to be")


def printable(text: str, limit: int) -> str:
    """The text on one line without anything that a terminal would act on, cut at so many characters."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(one if one.isprintable() else "\ufffd" for one in cut)


def _gpu(fields: Fields) -> Gpu:
    return Gpu(
        index=fields.whole("index", -1, 100_000),
        uuid=fields.optional("uuid", lambda key: fields.text(key, 96)),
        result=fields.word("result", GpuResult),
        used_bytes=fields.optional("usedBytes", fields.size),
        message=fields.text("message", 512),
    )


def _process(fields: Fields) -> Process:
    return Process(
        pid=fields.whole("pid", 1, 1 << 22),
        title=fields.text("title", 128),
        owner=fields.text("owner", 128),
        verdict=fields.word("verdict", Verdict),
        outcome=fields.word("outcome", Outcome),
        reason=fields.text("reason", 256),
    )


def _files(fields: Fields) -> Files:
    return Files(
        removed_count=fields.whole("removedCount"),
        kept_count=fields.whole("keptCount"),
        bytes_freed=fields.size("bytesFreed"),
    )


def _omitted(stated: Fields, whole: Fields) -> Omitted:
    """What the writer left out, and what our own limits leave out."""
    limits = {"gpus": GPU_LIMIT, "processes": PROCESS_LIMIT, "warnings": WARNING_LIMIT}
    counts = {name: (stated.optional(name, stated.whole) or 0) + whole.beyond(name, limits[name]) for name in limits}
    return Omitted(**{name: min(count, _COUNT_LIMIT) for name, count in counts.items()})


def _gpu_json(gpu: Gpu) -> dict[str, Any]:
    known = {"uuid": gpu.uuid, "usedBytes": gpu.used_bytes}
    row = {"index": gpu.index, "result": str(gpu.result), "message": gpu.message}
    return row | {key: value for key, value in known.items() if value is not None}


def _process_json(process: Process) -> dict[str, Any]:
    texts = {name: str(getattr(process, name)) for name in ("title", "owner", "verdict", "outcome", "reason")}
    return {"pid": process.pid, **texts}


def _files_json(files: Files | None) -> dict[str, int] | None:
    if files is None:
        return None
    return {"removedCount": files.removed_count, "keptCount": files.kept_count, "bytesFreed": files.bytes_freed}
