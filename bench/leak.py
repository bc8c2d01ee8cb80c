"""A leaked server on this machine's GPUs: demo/server.py, whose front end is killed; and its end, whatever happens."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

SERVER = str(pathlib.Path(__file__).resolve().parents[1] / "demo" / "server.py")


class Leak:
    """A server with `workers` that hold `size_bytes` each, dealt over the first `gpu_count` GPUs.

    A context manager: at its end nothing of the server lives on. Raises RuntimeError if the server does not start.
    """

    def __init__(self, workers: int, size_bytes: int, gpu_count: int) -> None:
        argv = [sys.executable, SERVER, str(workers), str(size_bytes), str(gpu_count)]
        # Orphans outlive a failed run: they must not keep open what somebody reads to its end.
        self._front_end = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        said = self._front_end.stdout.readline() if self._front_end.stdout else ""
        if not said:
            raise RuntimeError(f"{' '.join(argv)}: has not started; run it by hand")
        self.said: dict[str, Any] = json.loads(said)
        self.segment = str(self.said["segment"])
        self.pidfds = [os.pidfd_open(pid) for pid in (self.said["engine"], *self.said["workers"])]

    def kill_front_end(self) -> None:
        """SIGKILL, as the kernel sends it when memory runs out."""
        self._front_end.kill()
        self._front_end.wait()

    def kill_the_rest(self) -> None:
        """SIGKILL to the engine and its workers; the resource tracker then unlinks the shared memory and ends."""
        for pidfd in self.pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_front_end()
        self.kill_the_rest()
        for pidfd in self.pidfds:
            os.close(pidfd)
        if self._front_end.stdout:
            self._front_end.stdout.close()
