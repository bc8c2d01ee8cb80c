"""Which device numbers are NVIDIA's: from the nodes under the host's /dev, and from /proc/devices.

By number, never by path: a node may lie anywhere and be called anything, inside a container or out.
"""

import os
import re
import stat
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class DeviceKind(StrEnum):
    """The NVIDIA device nodes that matter."""

    GPU = "gpu"
    CONTROL = "control"
    UVM = "uvm"  # opened by every process that has a CUDA context
    OTHER = "other"


_GPU_NODE = re.compile(r"nvidia(\d+)")
_KINDS = {"nvidiactl": DeviceKind.CONTROL, "nvidia-uvm": DeviceKind.UVM}
_MAJOR_LINE = re.compile(r"\s*(\d+)\s+(nvidia[\w-]*)")
_FRONTEND = frozenset({"nvidia", "nvidia-frontend", "nvidiactl", "nvidia-modeset"})  # one major, told apart by minor
_CONTROL_MINOR = 255
_MODESET_MINOR = 254


class Device(NamedTuple):
    """An NVIDIA device: `minor` is the GPU's number, -1 for what is no GPU."""

    kind: DeviceKind
    minor: int


class DeviceNumbers(NamedTuple):
    """How to tell a device number's meaning: exact numbers of nodes seen, and majors that are all NVIDIA's."""

    nodes: Mapping[int, Device]
    majors: Mapping[int, str]

    def device(self, number: int) -> Device | None:
        """What `number` (as st_rdev) is, or None if it is not NVIDIA's."""
        if known := self.nodes.get(number):
            return known
        driver = self.majors.get(os.major(number))
        return _by_major(driver, os.minor(number)) if driver else None


def find_devices(host_root: str) -> DeviceNumbers:
    """Read the nodes under `host_root`/dev and /proc/devices. What is not there is not there: no errors."""
    try:
        with open("/proc/devices", encoding="ascii", errors="replace") as file:
            majors = parse_majors(file.read())
    except OSError:
        majors = {}
    return DeviceNumbers(nodes=_nodes(os.path.join(host_root, "dev")), majors=majors)


def parse_majors(text: str) -> dict[int, str]:
    """The character majors of NVIDIA's drivers in the text of /proc/devices, by number."""
    character = text.partition("Block devices:")[0]
    found = (_MAJOR_LINE.fullmatch(line) for line in character.split("\n"))
    return {int(match[1]): match[2] for match in found if match}


def count_gpus(proc_gpus: str = "/proc/driver/nvidia/gpus") -> int | None:
    """How many GPUs the driver has bound, whatever NVML says; None where the driver does not tell."""
    try:
        return len(os.listdir(proc_gpus))
    except OSError:
        return None


def count_nodes(host_root: str) -> int:
    """How many GPUs have a device node: what a container was given, or a host has."""
    return sum(device.kind is DeviceKind.GPU for device in _nodes(os.path.join(host_root, "dev")).values())


def _nodes(dev: str) -> dict[int, Device]:
    found: dict[int, Device] = {}
    folders = [dev]
    try:
        with os.scandir(dev) as entries:
            names = [entry.name for entry in entries if entry.name.startswith("nvidia")]
    except OSError:
        return found
    folders += [os.path.join(dev, name) for name in names if name.startswith("nvidia-caps")]
    for folder in folders:
        _add_nodes(folder, found)
    return found


def _add_nodes(folder: str, found: dict[int, Device]) -> None:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                if entry.name.startswith("nvidia") and stat.S_ISCHR(info.st_mode):
                    found[info.st_rdev] = _by_name(entry.name)
    except OSError:
        return


def _by_name(name: str) -> Device:
    if gpu := _GPU_NODE.fullmatch(name):
        return Device(kind=DeviceKind.GPU, minor=int(gpu[1]))
    return Device(kind=_KINDS.get(name, DeviceKind.OTHER), minor=-1)


def _by_major(driver: str, minor: int) -> Device:
    if driver == "nvidia-uvm" and minor == 0:
        return Device(kind=DeviceKind.UVM, minor=-1)
    if driver not in _FRONTEND or minor == _MODESET_MINOR:
        return Device(kind=DeviceKind.OTHER, minor=-1)
    return (
        Device(kind=DeviceKind.CONTROL, minor=-1)
        if minor == _CONTROL_MINOR
        else Device(kind=DeviceKind.GPU, minor=minor)
    )
