"""Asks NVML everything through the real pynvml and prints one JSON object: what a driver says, simulated or not.

An answer that is an error is `{"error": code}`, in the place of the value. LD_LIBRARY_PATH says which library answers.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import pynvml


def answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """The value as JSON has it, or the error's code."""
    try:
        value = call(*arguments)
    except pynvml.NVMLError as error:
        return {"error": error.value}
    return plain(value)


def plain(value: Any) -> Any:
    """Structures as objects, lists of processes as lists of objects."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, ctypes._SimpleCData):
        return value.value
    if isinstance(value, bytes):
        return value.decode()
    return vars(value) if hasattr(value, "__dict__") else value


def memory(handle: Any) -> dict[str, Any]:
    """Figures and processes of a GPU or MIG instance."""
    return {
        "uuid": answer(pynvml.nvmlDeviceGetUUID, handle),
        "name": answer(pynvml.nvmlDeviceGetName, handle),
        "index": answer(pynvml.nvmlDeviceGetIndex, handle),
        "minor": answer(pynvml.nvmlDeviceGetMinorNumber, handle),
        "is_mig": answer(pynvml.nvmlDeviceIsMigDeviceHandle, handle),
        "gpu_instance": answer(pynvml.nvmlDeviceGetGpuInstanceId, handle),
        "compute_instance": answer(pynvml.nvmlDeviceGetComputeInstanceId, handle),
        "v1": answer(pynvml.nvmlDeviceGetMemoryInfo, handle),
        "v2": answer(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2),
        "compute": answer(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle),
        "graphics": answer(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle),
        "mps": answer(pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle),
    }


def instances(handle: Any) -> list[Any]:
    """The MIG instances of a GPU, at the indices that are taken."""
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
        found.append({"parent": answer(pynvml.nvmlDeviceGetUUID, parent), **memory(instance)})
    return found


def recovery_action(handle: Any) -> int:
    """What the driver wants done to the GPU, 0 for nothing."""
    [field] = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return int(field.value.uiVal)


def device(index: int) -> dict[str, Any]:
    """One GPU, or why there is no handle for it."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return {"error": error.value}
    return {
        **memory(handle),
        "pci": answer(pynvml.nvmlDeviceGetPciInfo, handle),
        "mig_mode": answer(pynvml.nvmlDeviceGetMigMode, handle),
        "mig": instances(handle),
        "numa_node": answer(pynvml.nvmlDeviceGetNumaNodeId, handle),
        "persistence": answer(pynvml.nvmlDeviceGetPersistenceMode, handle),
        "recovery_action": answer(recovery_action, handle),
    }


def main() -> int:
    """Prints everything; exit code 0 also where NVML answers with errors."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        print(json.dumps({"error": error.value, "text": str(error)}))
        return 0
    count = answer(pynvml.nvmlDeviceGetCount)
    devices = [device(index) for index in range(count)] if isinstance(count, int) else []
    driver = answer(pynvml.nvmlSystemGetDriverVersion)
    pynvml.nvmlShutdown()
    print(json.dumps({"driver": driver, "count": count, "gpus": devices, "closed": answer(pynvml.nvmlDeviceGetCount)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
