"""A process that holds simulated GPUs: open device nodes, and records whose locks the kernel drops at its death.

Needs only the standard library and stands alone, so that it also runs as a program in a container.
"""

import argparse
import fcntl
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STATE = "gpusim.json"


class Hold:
    """GPU memory of this process: open nodes and locked records. Freed by `close`, or by the kernel at its death."""

    def __init__(self, descriptors: list[int], records: list[Path]) -> None:
        self._descriptors = descriptors
        self._records = records

    def close(self) -> None:
        """Free the memory and close the nodes."""
        for record in self._records:
            record.unlink(missing_ok=True)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors, self._records = [], []


def hold(
    directory: Path, dev: Path, gpus: Mapping[int | str, int], *, kind: str = "C", attributed: bool = True
) -> Hold:
    """Hold GPU memory in the calling process, as a CUDA context does.

    `gpus`: bytes by the GPU's place in the driver's list, or by the UUID of a GPU or MIG instance. `kind`: C, G or M
    (MPS client). With `attributed=False` NVML lists the process without a figure, as under MPS.
    POSIX locks are not inherited: a forked child calls this itself. A holder must not load the library itself, since
    closing a record would drop its own lock.
    """
    machine = json.loads((directory / STATE).read_text())["gpus"]
    targets = [(_target(machine, key), bytes_) for key, bytes_ in gpus.items()]
    names = ["nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for (_, minor), _ in targets)]
    descriptors = [_open_node(dev / name) for name in dict.fromkeys(names)]
    records = []
    for (uuid, _), bytes_ in targets:
        record = directory / "memory" / f"{os.getpid()}-{secrets.token_hex(6)}"
        descriptors.append(_lock_record(record, f"{uuid} {bytes_} {kind}{'' if attributed else ' unknown'}\n"))
        records.append(record)
    return Hold(descriptors, records)


def monitor(directory: Path, dev: Path) -> Hold:
    """Hold the nodes of the control device and of every GPU and no memory, as nvitop or an exporter does."""
    machine = json.loads((directory / STATE).read_text())["gpus"]
    names = ["nvidiactl", *(f"nvidia{gpu['minor']}" for gpu in machine)]
    return Hold([_open_node(dev / name) for name in names], [])


def _target(machine: list[dict[str, Any]], key: int | str) -> tuple[str, int]:
    """UUID to record and minor number to open."""
    if isinstance(key, int):
        return machine[key]["uuid"], machine[key]["minor"]
    for gpu in machine:
        if key in {gpu["uuid"], *(instance["uuid"] for instance in gpu.get("mig", []))}:
            return key, gpu["minor"]
    raise ValueError(f"gpusim: no GPU or MIG instance {key}")


def _open_node(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)


def _lock_record(path: Path, text: str) -> int:
    """Locked before it is written, so that no reader sees a record that nobody holds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, text.encode())
    return descriptor


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hold simulated GPUs until standard input ends or a signal comes.")
    parser.add_argument("verb", choices=["hold"])
    parser.add_argument("--dir", type=Path, required=True, help="the driver's directory")
    parser.add_argument("--dev", type=Path, default=Path("/dev"), help="the directory of its nodes (default /dev)")
    parser.add_argument("--gpu", action="append", default=[], metavar="INDEX|UUID=BYTES", help="memory to hold")
    parser.add_argument("--kind", choices="CGM", default="C", help="compute, graphics or MPS client (default C)")
    parser.add_argument("--unattributed", action="store_true", help="listed without a figure, as under MPS")
    parser.add_argument("--only-control", action="store_true", help="a monitor: nodes but no memory and no uvm")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: `holder.py hold`. Prints "ready" once it holds what it was told to."""
    asked = _parse(argv)
    if asked.only_control:
        held = monitor(asked.dir, asked.dev)
    else:
        pairs = [argument.rpartition("=") for argument in asked.gpu]
        amounts: dict[int | str, int] = {int(k) if k.isdecimal() else k: int(v) for k, _, v in pairs}
        held = hold(asked.dir, asked.dev, amounts, kind=asked.kind, attributed=not asked.unattributed)
    print("ready", flush=True)
    sys.stdin.read()
    held.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
