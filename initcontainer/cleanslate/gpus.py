"""The verdict on each GPU: clean, or what it is instead. Pure, over one reading and the processes that hold it.

Unknown is never clean: an error, a missing GPU, no GPU at all and a reading that is not supported are results of their own.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from cleanslate.nvml import FUNCTION_NOT_FOUND, NOT_SUPPORTED, GpuError, GpuReading, Reading

MIB = 1 << 20
# Idle GPUs read 0-15 MiB, a CUDA context 250 and more; idle MIG instances read 6-107, a GPU in MIG mode without any 39-259.
DEFAULT_TOLERANCE_BYTES = 64 * MIB
MIG_TOLERANCE_BYTES = 128 * MIB
MIG_EMPTY_TOLERANCE_BYTES = 288 * MIB


class GpuResult(StrEnum):
    """What a GPU is."""

    CLEAN = "Clean"
    BUSY = "Busy"  # held by an owner that is kept
    RESIDUAL = "Residual"  # memory in use, and no process has it
    HELD = "Held"  # by a process that is left over or unknown
    UNKILLABLE = "Unkillable"
    ERROR = "Error"
    NOT_SUPPORTED = "NotSupported"
    MISSING = "Missing"


DIRTY = frozenset({GpuResult.RESIDUAL, GpuResult.HELD, GpuResult.UNKILLABLE})
UNKNOWN = frozenset({GpuResult.ERROR, GpuResult.NOT_SUPPORTED, GpuResult.MISSING})


class Result(StrEnum):
    """What a whole run found."""

    CLEAN = "Clean"
    NOT_CLEAN = "NotClean"
    CANNOT_TELL = "CannotTell"
    REFUSED = "Refused"


EXIT_CODES = {Result.CLEAN: 0, Result.NOT_CLEAN: 3, Result.CANNOT_TELL: 4, Result.REFUSED: 5}


class Holder(NamedTuple):
    """A process that holds a GPU.

    `kept`: kept for what it is, by a known owner, not merely for want of proof; `reason` says for what. `stuck`: SIGKILL
    does not end it. `harmless`: counts only if the GPU's memory is above tolerance, as for services of the node and zombies.
    `verdict` is None where none could be given.
    """

    pid: int
    title: str
    owner: str
    verdict: str | None = None
    reason: str = ""
    kept: bool = False
    stuck: bool = False
    harmless: bool = False
    used_bytes: int | None = None

    def __str__(self) -> str:
        """For messages: `pid 48213 (VLLM::Worker_TP1, pod 5e1c…)`."""
        return f"pid {self.pid} ({self.title[:60]}, {self.owner})"


class GpuVerdict(NamedTuple):
    """One GPU or MIG instance with its result and the sentence that explains it."""

    reading: GpuReading
    tolerance_bytes: int
    result: GpuResult
    message: str
    holders: tuple[Holder, ...] = ()


def tolerance_bytes(gpu: GpuReading, asked_bytes: int | None) -> int:
    """How much used memory still counts as clean: what was asked for, else by what idle GPUs of this kind read."""
    if asked_bytes is not None:
        return asked_bytes
    if gpu.parent is not None:
        return MIG_TOLERANCE_BYTES
    return MIG_EMPTY_TOLERANCE_BYTES if gpu.mig else DEFAULT_TOLERANCE_BYTES


def judge_gpu(gpu: GpuReading, holders: Sequence[Holder], *, asked_bytes: int | None) -> GpuVerdict:
    """The verdict on one GPU. `holders` are all that hold it, monitors left out."""
    tolerance = tolerance_bytes(gpu, asked_bytes)
    result, message = _result(gpu, holders, tolerance)
    return GpuVerdict(reading=gpu, tolerance_bytes=tolerance, result=result, message=message, holders=tuple(holders))


def judge_reading(
    reading: Reading,
    holders: Mapping[str, Sequence[Holder]],
    *,
    scope: frozenset[str] | None,
    expected: int | None,
    asked_bytes: int | None,
) -> tuple[GpuVerdict, ...]:
    """The verdicts on all GPUs in scope, the missing ones among them. No GPU at all gives an empty tuple, never a pass."""
    seen = tuple(gpu for gpu in reading.gpus if in_scope(gpu, scope))
    verdicts = [judge_gpu(gpu, holders.get(gpu.uuid, ()) if gpu.uuid else (), asked_bytes=asked_bytes) for gpu in seen]
    return (*verdicts, *_missing(reading, scope, expected))


def in_scope(gpu: GpuReading, scope: frozenset[str] | None) -> bool:
    """Whether `--gpu` names this GPU, or the one that it is an instance of, by UUID or index; None names all."""
    return scope is None or not scope.isdisjoint({str(gpu.index), gpu.uuid or "", gpu.parent or ""} - {""})


def freed_bytes(before: Reading, after: Reading, scope: frozenset[str] | None) -> int:
    """By how much the memory in use has fallen, in bytes: the sum over the GPUs in scope that both readings know.

    Where it rose nothing was freed. A GPU's own figure holds its instances', so it counts only if none of them is read.
    """
    parents = {gpu.parent for gpu in (*before.gpus, *after.gpus)}
    used = {gpu.uuid: gpu.used_bytes for gpu in after.gpus if gpu.uuid not in parents}
    pairs = ((gpu.used_bytes, used.get(gpu.uuid)) for gpu in before.gpus if gpu.uuid and in_scope(gpu, scope))
    return sum(max(0, first - last) for first, last in pairs if first is not None and last is not None)


def overall(verdicts: Sequence[GpuVerdict], *, failure: str | None, busy_is_clean: bool) -> Result:
    """One result of all: dirty weighs more than unknown, and nothing measured is unknown.

    `busy_is_clean`: a GPU that a kept owner uses does not count against a reset; it does against a gate.
    """
    results = {verdict.result for verdict in verdicts}
    if results & DIRTY or (GpuResult.BUSY in results and not busy_is_clean):
        return Result.NOT_CLEAN
    if failure or not results or results & UNKNOWN:
        return Result.CANNOT_TELL
    return Result.CLEAN


def _result(gpu: GpuReading, holders: Sequence[Holder], tolerance: int) -> tuple[GpuResult, str]:
    if gpu.error and gpu.error.code != NOT_SUPPORTED:
        return GpuResult.ERROR, _error(gpu.label, gpu.error, gpu.recovery_action)
    if gpu.used_bytes is None:
        return _by_processes(gpu, holders)
    used = f"{_mib(gpu.used_bytes)} used"
    contenders = [holder for holder in holders if not holder.harmless or gpu.used_bytes > tolerance]
    if contenders:
        return _held(gpu, contenders, used)
    if gpu.used_bytes > tolerance:
        return GpuResult.RESIDUAL, f"{gpu.label}: {used} and no process holds it; drain and reboot the node if it stays"
    if gpu.processes is None:
        return GpuResult.ERROR, f"{gpu.label}: {used}, but NVML does not list its processes; run as root"
    return GpuResult.CLEAN, f"{gpu.label}: clean, {used} of {_mib(tolerance)} allowed"


def _by_processes(gpu: GpuReading, holders: Sequence[Holder]) -> tuple[GpuResult, str]:
    contenders = [holder for holder in holders if not holder.harmless]
    if contenders:
        return _held(gpu, contenders, "memory unknown")
    why = f"{gpu.label}: NVML has no memory reading for it; judged by processes: none holds it"
    return GpuResult.NOT_SUPPORTED, why


def _held(gpu: GpuReading, holders: Sequence[Holder], used: str) -> tuple[GpuResult, str]:
    stuck = [holder for holder in holders if holder.stuck]
    if stuck:
        return (
            GpuResult.UNKILLABLE,
            f"{gpu.label}: {used} by {_names(stuck)}, which SIGKILL does not end; reboot the node",
        )
    loose = [holder for holder in holders if not holder.kept]
    if loose:
        return GpuResult.HELD, f"{gpu.label}: {used}, held by {_names(loose)}"
    return GpuResult.BUSY, f"{gpu.label}: {used}, in use by {_names(holders)}, which is kept: {holders[0].reason}"


def _names(holders: Sequence[Holder]) -> str:
    shown = ", ".join(str(holder) for holder in holders[:3])
    return shown if len(holders) <= 3 else f"{shown} … and {len(holders) - 3} more"


def _error(label: str, error: GpuError, recovery_action: str | None) -> str:
    if error.code == FUNCTION_NOT_FOUND:
        return f"{label}: cannot verify: {error}; the driver is too old for memory info v2, 510 is needed"
    step = f"the driver advises: {recovery_action}" if recovery_action else "look for Xid in dmesg"
    return f"{label}: cannot verify: {error}; {step}"


def _missing(reading: Reading, scope: frozenset[str] | None, expected: int | None) -> list[GpuVerdict]:
    if reading.failure:
        return []
    if scope is not None:
        named = {name for gpu in reading.gpus for name in (str(gpu.index), gpu.uuid, gpu.parent) if name}
        return [
            _absent(-1, name, f"{name}: named with --gpu, and NVML does not show it; check nvidia-smi -L")
            for name in sorted(scope - named)
        ]
    seen = len({gpu.index for gpu in reading.gpus})
    what = f"NVML shows {seen} GPUs, {expected} were expected; look for Xid 79 in dmesg"
    return [_absent(index, None, what) for index in range(seen, expected or 0)]


def _absent(index: int, name: str | None, message: str) -> GpuVerdict:
    index = int(name) if name and name.isdigit() else index
    uuid = None if name is None or name.isdigit() else name
    return GpuVerdict(
        reading=GpuReading(index=index, uuid=uuid),  # type: ignore[arg-type]  # a name as --gpu gave it
        tolerance_bytes=0,
        result=GpuResult.MISSING,
        message=message,
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB" if size_bytes >= MIB or size_bytes == 0 else f"{size_bytes} bytes"
