"""NVML itself, asked through nvidia-ml-py. Runs only in a worker's process, which may be killed at any moment.

Answers are plain dicts and tuples; `nvml.py` makes types of them.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

_RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_NEXT_STEPS = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the nvidia kernel module",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no libnvidia-ml.so.1; install the driver or name it with --nvml-library",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old, 510 is needed",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and kernel module differ; reload the module or reboot",
    pynvml.NVML_ERROR_GPU_IS_LOST: "reboot the node",
    pynvml.NVML_ERROR_NO_PERMISSION: "run as root",
}
_ABSENT = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_SUPPORTED})
_is_open = False

Row = dict[str, Any]


def answer(library: str | None, *, reopen: bool) -> tuple[str | None, str | None, list[Row]]:
    """Everything about every GPU: (failure, driver version, rows). `reopen`: in a new NVML session."""
    try:
        if library:
            # NVML is then found by its soname, already loaded; the bindings know no other way to name a file.
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        _open(reopen)
        driver = _or_none(pynvml.nvmlSystemGetDriverVersion)
        count = pynvml.nvmlDeviceGetCount()
    except OSError as error:
        return f"NVML: cannot load {library}: {error}; check --nvml-library", None, []
    except pynvml.NVMLError as error:
        step = _NEXT_STEPS.get(error.value, "run nvidia-smi and look for Xid in dmesg")
        return f"NVML: cannot read the GPUs: {error} ({error.value}); {step}", None, []
    return None, driver, [row for index in range(count) for row in _rows(index)]


def _open(reopen: bool) -> None:
    global _is_open  # noqa: PLW0603 - NVML's session is this process's own
    if reopen and _is_open:
        _is_open = False
        pynvml.nvmlShutdown()
    if not _is_open:
        pynvml.nvmlInit()
        _is_open = True


def _rows(index: int) -> list[Row]:
    """The GPU's row, or those of its MIG instances, which are what can be used of it."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return [_blank(index) | {"error": (error.value, "nvmlDeviceGetHandleByIndex_v2", str(error))}]
    row = _blank(index) | {
        "uuid": _or_none(pynvml.nvmlDeviceGetUUID, handle),
        "name": _or_none(pynvml.nvmlDeviceGetName, handle),
        "minor": _or_none(pynvml.nvmlDeviceGetMinorNumber, handle),
        "mig": (_or_none(pynvml.nvmlDeviceGetMigMode, handle) or (0, 0))[0] == 1,
    }
    try:
        instances = list(_instances(handle)) if row["mig"] else []
    except pynvml.NVMLError as error:
        return [row | {"error": (error.value, "nvmlDeviceGetMigDeviceHandleByIndex", str(error))}]
    return [_measured(row, handle)] if not instances else [_instance_row(row, instance) for instance in instances]


def _instances(handle: Any) -> Any:
    for number in range(_or_none(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except pynvml.NVMLError as error:
            if error.value not in _ABSENT:
                raise


def _instance_row(gpu: Row, handle: Any) -> Row:
    own = {"uuid": _or_none(pynvml.nvmlDeviceGetUUID, handle), "name": _or_none(pynvml.nvmlDeviceGetName, handle)}
    return _measured(gpu | own | {"parent": gpu["uuid"]}, handle)


def _measured(row: Row, handle: Any) -> Row:
    row = row | {"processes": _processes(handle)}
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        action = _recovery_action(handle)
        return row | {"error": (error.value, "nvmlDeviceGetMemoryInfo_v2", str(error)), "recovery_action": action}
    return row | {"used_bytes": memory.used, "reserved_bytes": memory.reserved, "total_bytes": memory.total}


def _processes(handle: Any) -> list[tuple[int, int | None]] | None:
    """Pids of all lists with their memory, where the lists can be had: None if the driver refuses any of them."""
    found: dict[int, int | None] = {}
    for ask in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        pynvml.nvmlDeviceGetMPSComputeRunningProcesses,
    ):
        try:
            found.update({process.pid: process.usedGpuMemory for process in ask(handle)})
        except pynvml.NVMLError as error:
            if error.value not in {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}:
                return None
    return list(found.items())


def _recovery_action(handle: Any) -> int | None:
    try:
        field = pynvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD])[0]
    except pynvml.NVMLError:
        return None
    return int(field.value.uiVal) if field.nvmlReturn == pynvml.NVML_SUCCESS else None


def _blank(index: int) -> Row:
    empty = (
        "uuid",
        "name",
        "minor",
        "parent",
        "used_bytes",
        "reserved_bytes",
        "total_bytes",
        "error",
        "recovery_action",
    )
    return {"index": index, "mig": False, "processes": None} | dict.fromkeys(empty)


def _or_none(ask: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None
