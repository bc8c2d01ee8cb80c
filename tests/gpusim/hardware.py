"""The machine that the simulated driver is told to have: GPUs, MIG instances, and their faults."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
MAX_GPUS = 16

FUNCTIONS = frozenset(
    {
        "nvmlInit_v2",
        "nvmlShutdown",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceIsMigDeviceHandle",
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetComputeInstanceId",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetNumaNodeId",
        "nvmlDeviceGetPersistenceMode",
    }
)
FAULTS = ("errors", "slow_ms", "hang", "unkillable")
NO_MEMORY_INFO = {"nvmlDeviceGetMemoryInfo": 3, "nvmlDeviceGetMemoryInfo_v2": 3}  # as on GB10: NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Mig:
    """One MIG instance. Bytes as in `Gpu`; an instance is never quite empty (6-107 MiB were seen)."""

    uuid: str
    name: str = "NVIDIA H200 MIG 1g.18gb"
    total_bytes: int = 16 * GIB
    reserved_bytes: int = 0
    base_bytes: int = 12 * MIB
    residual_bytes: int = 0
    ghosts: tuple[int, ...] = ()
    flicker: tuple[int, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    slow_ms: Mapping[str, int] = field(default_factory=dict)
    hang: tuple[str, ...] = ()
    unkillable: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU and its faults.

    `base_bytes`: used when idle. `residual_bytes`: used with no process, a driver leak. `ghosts`: pids that the compute list
    names though they are dead. `flicker`: figures of used bytes served one after the other, the last one stays. `missing`:
    not enumerated by the next nvmlInit, though its node and its /proc entry stay.

    Faults by function: `errors`, the NVML return code; `slow_ms`, how long it takes; `hang`, it never returns, but SIGKILL ends
    it; `unkillable`, the same in uninterruptible sleep, within the driver's `freezer` cgroup.
    """

    uuid: str
    minor: int
    name: str = "NVIDIA H200"
    pci: str = ""
    total_bytes: int = 141 * GIB
    reserved_bytes: int = 615 * MIB
    base_bytes: int = 0
    residual_bytes: int = 0
    mig: tuple[Mig, ...] = ()
    ghosts: tuple[int, ...] = ()
    flicker: tuple[int, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    slow_ms: Mapping[str, int] = field(default_factory=dict)
    hang: tuple[str, ...] = ()
    unkillable: tuple[str, ...] = ()
    missing: bool = False
    recovery_action: int = 0
    numa_node: int | None = None

    @property
    def pci_address(self) -> str:
        """As NVML writes it, with a domain of eight digits."""
        return self.pci or f"00000000:{0x1A + self.minor:02X}:00.0"


def gpus(count: int, *, machine: int = 0) -> tuple[Gpu, ...]:
    """That many idle GPUs with UUIDs that are the same in every run, and others in every `machine`."""
    return tuple(Gpu(uuid=f"GPU-{n:08x}-5eed-4c1e-a115-1a7e{machine:04x}{n:04x}", minor=n) for n in range(count))


def render(gpu: Gpu) -> dict[str, Any]:
    fields = dataclasses.asdict(gpu) | {"pci": gpu.pci_address, "missing": int(gpu.missing)}
    fields["mig"] = [_without_empty(instance) for instance in fields["mig"]]
    return _without_empty(fields)


def parse(fields: Mapping[str, Any]) -> Gpu:
    """The reverse of `render`."""
    parts = [Mig(**_tuples(instance)) for instance in fields.get("mig", ())]
    return Gpu(**_tuples(fields) | {"mig": tuple(parts), "missing": bool(fields.get("missing"))})


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in ((), [], {}, None)}


def check(machine: Sequence[Gpu], system: Mapping[str, Any]) -> None:
    """Refuse a machine that cannot exist, and a fault that no call would meet."""
    parts: list[Gpu | Mig] = [*machine, *(part for gpu in machine for part in gpu.mig)]
    uuids = [part.uuid for part in parts]
    minors = [gpu.minor for gpu in machine]
    if len(set(uuids)) != len(uuids) or len(set(minors)) != len(minors):
        raise ValueError("gpusim: two GPUs with one UUID or minor number")
    if not set(minors) <= set(range(MAX_GPUS)):
        raise ValueError(f"gpusim: minor numbers go from 0 to {MAX_GPUS - 1}")
    if any(len(gpu.mig) > 7 for gpu in machine):
        raise ValueError("gpusim: a GPU has 7 MIG instances at most")
    if any(part.reserved_bytes + part.base_bytes + part.residual_bytes > part.total_bytes for part in parts):
        raise ValueError("gpusim: more memory used than there is")
    faults = [tuple(getattr(part, kind) for kind in FAULTS) for part in parts]
    faults.append(tuple(system.get(kind, ()) for kind in FAULTS))
    unknown = {name for fault in faults for names in fault for name in names} - FUNCTIONS
    if unknown:
        raise ValueError(f"gpusim: not simulated: {sorted(unknown)}")
    if any(unkillable for *_, unkillable in faults) and not system.get("freezer"):
        raise ValueError("gpusim: unkillable calls need the driver's freezer: system(freezer=...)")
