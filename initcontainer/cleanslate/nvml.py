"""Reading GPUs through NVML, in a child that can be given up: NVML may never return on a sick GPU.

Every reading opens NVML anew unless told otherwise, since an open session remembers GPUs that are lost since. Memory is
`nvmlMemory_v2`'s `used`: v1 counts what the driver reserves and is never 0 (615 MiB on an idle H200).

Named tuples, here and in what else a gate loads: they are made six times sooner than frozen dataclasses.
"""

import os
from typing import TYPE_CHECKING, NamedTuple

from cleanslate import nvml_worker
from cleanslate.worker import Message, Worker, WorkerDiedError, WorkerSilentError

if TYPE_CHECKING:
    from cleanslate.model import GpuUuid, Pid

NVML_DEADLINE_S = 15.0  # a first query without persistence mode takes seconds
NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13
_RECOVERY_ACTIONS = {1: "GPU reset", 2: "reboot", 3: "drain P2P", 4: "drain and reset"}

LIBRARY = "libnvidia-ml.so.1"
LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "run/nvidia/driver/usr/lib/aarch64-linux-gnu",
    "run/nvidia/driver/usr/lib64",
    "home/kubernetes/bin/nvidia/lib64",
    "usr/local/nvidia/lib64",
    "usr/local/glibc/usr/lib",
    "opt/nvidia/lib64",
)


class GpuError(NamedTuple):
    """An answer of NVML other than success: its number, the question, and NVML's words."""

    code: int
    function: str
    text: str

    def __str__(self) -> str:
        """For messages: `nvmlDeviceGetMemoryInfo_v2: GPU is lost (15)`."""
        return f"{self.function}: {self.text} ({self.code})"


class GpuProcess(NamedTuple):
    """A process with a context on a GPU, by NVML; `used_bytes` is None where NVML cannot say, for example under MPS."""

    pid: "Pid"
    used_bytes: int | None


class GpuReading(NamedTuple):
    """One GPU or MIG instance at one moment. Memory in bytes; None is unknown.

    `parent`: the GPU that a MIG instance is part of. `mig`: MIG is on. `error` is set where memory could not be read;
    `processes` is None where NVML would not list them. `recovery_action` is NVML's advice, if it has any.
    """

    index: int  # type: ignore[assignment]  # tuple.index is of no use here
    uuid: "GpuUuid | None" = None
    name: str | None = None
    minor: int | None = None
    parent: "GpuUuid | None" = None
    mig: bool = False
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    error: GpuError | None = None
    recovery_action: str | None = None
    processes: tuple[GpuProcess, ...] | None = ()

    @property
    def label(self) -> str:
        """For messages: `GPU-6f1c… (index 3)`."""
        return f"{self.uuid} (index {self.index})" if self.uuid else f"GPU {self.index}"


class Reading(NamedTuple):
    """All GPUs at one moment, or `failure`: why there is no reading at all."""

    gpus: tuple[GpuReading, ...] = ()
    failure: str | None = None
    silent: bool = False
    driver: str | None = None


class Nvml:
    """A reader of the GPUs; a context manager. `library`: the path of libnvidia-ml.so.1, or None for the loader's choice.

    `worker`: one that `nvml_worker.start` has started already.
    """

    def __init__(self, library: str | None, worker: Worker | None = None) -> None:
        self._library = library
        self._worker = worker
        self._asked = False

    def __enter__(self) -> "Nvml":
        """The reader itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the child, and with it every hold on the driver; it is not waited for."""
        if self._worker:
            self._worker.close(wait=False)
        self._worker, self._asked = None, False

    def start(self) -> None:
        """Begin a reading that the next `read` collects: NVML takes its time, and other work need not wait for it."""
        try:
            self._ask(reopen=True)
        except WorkerDiedError:
            self._worker, self._asked = None, False  # read() starts another, and says so if that one dies too

    def _ask(self, *, reopen: bool) -> Worker:
        if self._worker is None:
            self._worker = nvml_worker.start()
        if not self._asked:
            self._worker.tell((self._library, reopen))
        self._asked = True
        return self._worker

    def read(self, *, reopen: bool = True, deadline_s: float = NVML_DEADLINE_S) -> Reading:
        """One reading within `deadline_s` seconds; silence and faults are readings with a `failure`, never exceptions.

        `reopen`: in a session of its own; else in the one that the last reading left open.
        """
        try:
            worker = self._ask(reopen=reopen)
            self._asked = False
            return _reading(worker.hear(deadline_s=deadline_s))
        except (WorkerSilentError, WorkerDiedError) as error:
            self._worker, self._asked = None, False
            silent = isinstance(error, WorkerSilentError)
            return Reading(failure=f"NVML: cannot read the GPUs: {error}; look for Xid in dmesg", silent=silent)


def find_library(host_root: str) -> str | None:
    """The driver's library below `host_root`, or None to leave it to the loader, which knows this machine's own."""
    paths = (os.path.join(host_root, folder, LIBRARY) for folder in LIBRARY_FOLDERS)
    return next((path for path in paths if os.path.exists(path)), None)


def _reading(answer: Message) -> Reading:
    failure, driver, rows = answer
    return Reading(failure=failure, driver=driver, gpus=tuple(_gpu(row) for row in rows))


def _gpu(row: Message) -> GpuReading:
    error, processes = row.pop("error"), row.pop("processes")
    action = row.pop("recovery_action")
    return GpuReading(
        **row,
        error=GpuError(code=error[0], function=error[1], text=error[2]) if error else None,
        recovery_action=_RECOVERY_ACTIONS.get(action),
        processes=None if processes is None else tuple(GpuProcess(pid=pid, used_bytes=used) for pid, used in processes),
    )
