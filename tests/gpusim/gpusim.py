"""A simulated NVIDIA driver: a real `libnvidia-ml.so.1`, real character devices, and memory tied to live processes.

Simulated: NVML's answers (nvml.c), the nodes below /dev, /proc/driver/nvidia and the lines of /proc/devices. Real: the
binary interface that pynvml loads, the processes, their open descriptors and device numbers, and the way memory goes
back: a record (holder.py) counts while the kernel keeps its holder's POSIX lock, so nobody has to help when that dies.

Not simulated: the major numbers. The nodes belong to the virtual terminals (major 4), a driver that is on every kernel
with CONFIG_VT, has numbers enough that nothing else opens, and does nothing when opened with O_NOCTTY.
"""

import atexit
import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpusim.building import LIBRARY, build
from gpusim.hardware import FAULTS, FUNCTIONS, GIB, MAX_GPUS, MIB, NO_MEMORY_INFO, Gpu, Mig, check, gpus, parse, render
from gpusim.holder import STATE, Hold, hold, monitor

__all__ = [
    "FUNCTIONS",
    "GIB",
    "MIB",
    "NO_MEMORY_INFO",
    "Driver",
    "Gpu",
    "Hold",
    "Mig",
    "build",
    "disallocate",
    "frozen_cgroup",
    "gpus",
    "hold",
    "monitor",
]

DRIVER_VERSION = "580.159.03"
TTY_MAJOR = 4
GPU_MINORS = range(30, 30 + MAX_GPUS)  # getty and X use 1-12; 63 is the last
CONTROL_NODES = {
    "nvidiactl": 50,
    "nvidia-modeset": 51,
    "nvidia-uvm": 52,
    "nvidia-uvm-tools": 53,
    "nvidia-caps/nvidia-cap1": 54,
    "nvidia-caps/nvidia-cap2": 55,
}
VT_DISALLOCATE = 0x5608  # linux/vt.h


class Driver:
    """A simulated driver in one directory: the library, the machine's description, and the memory of its holders.

    Safe to reach from several mount namespaces, as long as it is one filesystem: locks belong to inodes.
    """

    def __init__(self, directory: Path, dev: Path, machine: Sequence[Gpu], system: Mapping[str, Any]) -> None:
        self.directory = directory
        self.dev = dev
        self.gpus = tuple(machine)
        self._system = dict(system)

    @classmethod
    def install(
        cls, directory: Path, dev: Path, machine: Sequence[Gpu], *, seen_dev: str = "/dev", memory_v2: bool = True
    ) -> "Driver":
        """Put a driver into `directory` and its device nodes into `dev`; needs root, for mknod.

        `seen_dev`: the path of `dev` as the library's users see it; nvmlInit opens the nodes there. Raises ValueError
        for a machine that cannot exist, RuntimeError without a C compiler.
        """
        driver = cls(directory, dev, machine, {"driver_version": DRIVER_VERSION, "dev": seen_dev})
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("memory", "served"):
            (directory / name).mkdir(exist_ok=True)
            (directory / name).chmod(0o1777)
        driver._write()
        shutil.copyfile(build(memory_v2=memory_v2), driver.library)
        driver._make_nodes()
        atexit.unregister(disallocate)  # once is enough, after the machines of all tests are gone
        atexit.register(disallocate)
        return driver

    @classmethod
    def attach(cls, directory: Path, dev: Path) -> "Driver":
        """A driver that another process installed, as it is now. Raises FileNotFoundError where there is none."""
        state = json.loads((directory / STATE).read_text())
        machine = [parse(fields) for fields in state.pop("gpus")]
        return cls(directory, dev, machine, state)

    @property
    def library(self) -> Path:
        """The library, which finds everything else beside itself."""
        return self.directory / LIBRARY

    def update(self, index: int, **changes: Any) -> None:
        """Change fields of the GPU at this place, in programs that run now too; `index` counts missing GPUs as well."""
        self.update_all({index: changes})

    def update_all(self, changes: Mapping[int, Mapping[str, Any]]) -> None:
        """`update` for several GPUs at one instant."""
        machine = list(self.gpus)
        for index, fields in changes.items():
            machine[index] = dataclasses.replace(machine[index], **fields)
            if "flicker" in fields:
                (self.directory / "served" / machine[index].uuid).unlink(missing_ok=True)
        self.gpus = tuple(machine)
        self._write()

    def system(self, **changes: Any) -> None:
        """Change the driver as a whole: `errors`, `slow_ms`, `hang`, `unkillable`, `driver_version`.

        `freezer` is the path of a frozen cgroup, as the library's users see it, for `unkillable`.
        """
        unknown = set(changes) - {*FAULTS, "driver_version", "freezer"}
        if unknown:
            raise ValueError(f"gpusim: the driver has no {sorted(unknown)}")
        self._system |= changes
        self._write()

    def unload(self) -> None:
        """As after `rmmod nvidia`: the library stays, nvmlInit answers 9. `update` or `system` loads it again."""
        (self.directory / STATE).unlink(missing_ok=True)

    def proc_driver(self, path: Path) -> None:
        """Write what /proc/driver/nvidia holds into `path`, for a test to mount there. A missing GPU stays listed."""
        path.mkdir(parents=True, exist_ok=True)
        kernel_module = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER_VERSION}  Release Build"
        (path / "version").write_text(f"{kernel_module}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
        for gpu in self.gpus:
            address = gpu.pci_address[4:].lower()
            (path / "gpus" / address).mkdir(parents=True, exist_ok=True)
            (path / "gpus" / address / "information").write_text(_information(gpu, address))

    def proc_devices(self) -> str:
        """This machine's /proc/devices with the NVIDIA driver's lines added.

        The majors in them are the real driver's, not those of the simulated nodes: with major 4 as "nvidia" every
        terminal would be a GPU. So a program meets lines to read here, and finds the nodes by their own numbers.
        """
        ours = ["195 nvidia", "195 nvidiactl", "195 nvidia-modeset", "507 nvidia-uvm", "508 nvidia-caps"]
        characters, blank, blocks = Path("/proc/devices").read_text().partition("\n\n")
        others = [line for line in characters.splitlines() if "nvidia" not in line]
        return "\n".join([*others, *ours]) + blank + blocks

    def remove(self) -> None:
        """Take nodes and directory away, and give the terminals' buffers back as far as nobody holds them."""
        for name in self._nodes():
            (self.dev / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.dev / "nvidia-caps").rmdir()
        shutil.rmtree(self.directory, ignore_errors=True)
        disallocate()

    def _nodes(self) -> dict[str, int]:
        return {f"nvidia{gpu.minor}": GPU_MINORS[gpu.minor] for gpu in self.gpus} | CONTROL_NODES

    def _make_nodes(self) -> None:
        (self.dev / "nvidia-caps").mkdir(parents=True, exist_ok=True)
        for name, minor in self._nodes().items():
            path = self.dev / name
            path.unlink(missing_ok=True)
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(TTY_MAJOR, minor))
            path.chmod(0o666)

    def _write(self) -> None:
        """By rename, so that a program that reads at this moment sees the old machine or the new one."""
        check(self.gpus, self._system)
        rendered = self._system | {"gpus": [render(gpu) for gpu in self.gpus]}
        draft = self.directory / f".{STATE}.{secrets.token_hex(4)}"
        draft.write_text(json.dumps(rendered))
        draft.chmod(0o644)
        draft.rename(self.directory / STATE)


def _information(gpu: Gpu, address: str) -> str:
    rows = {
        "Model": gpu.name,
        "IRQ": "16",
        "GPU UUID": gpu.uuid,
        "Video BIOS": "96.00.bc.00.01",
        "Bus Type": "PCIe",
        "DMA Size": "52 bits",
        "DMA Mask": "0xfffffffffffff",
        "Bus Location": address,
        "Device Minor": str(gpu.minor),
        "GPU Firmware": DRIVER_VERSION,
        "GPU Excluded": "No",
    }
    return "".join(f"{name + ':':<16} {value}\n" for name, value in rows.items())


def disallocate() -> None:
    """Give back the buffers of the simulated nodes that nobody has open: opening a terminal allocates one for good."""
    with tempfile.TemporaryDirectory() as folder:
        os.mknod(f"{folder}/tty0", stat.S_IFCHR | 0o600, os.makedev(TTY_MAJOR, 0))
        console = os.open(f"{folder}/tty0", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for minor in (*GPU_MINORS, *CONTROL_NODES.values()):
            with contextlib.suppress(OSError):  # EBUSY: another test's machine holds it
                fcntl.ioctl(console, VT_DISALLOCATE, minor)
    finally:
        os.close(console)


@contextlib.contextmanager
def frozen_cgroup(mount: Path = Path("/sys/fs/cgroup/freezer")) -> Iterator[Path]:
    """A frozen cgroup (v1) for `system(freezer=...)`. At the end it is thawed and whatever is in it is killed."""
    group = mount / f"cleanslate-gpusim-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        (group / "freezer.state").write_text("FROZEN")
        yield group
    finally:
        waiting = [os.pidfd_open(int(pid)) for pid in (group / "cgroup.procs").read_text().split()]
        for process in waiting:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        (group / "freezer.state").write_text("THAWED")
        for process in waiting:
            _wait_dead(process)
        group.rmdir()


def _wait_dead(pidfd: int) -> None:
    select.select([pidfd], [], [], 10)
    os.close(pidfd)
