"""The operator as a process of this machine, so that a test can stop it, kill it and start another in its place."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_STOP_S = 20.0  # its goodbye takes 10 s at most
_SHOWN_BYTES = 3000


class OperatorProcess:
    """One process, for as long as the block lasts; one that has ended by then is no error. Its log is appended to `log`."""

    def __init__(
        self,
        *,
        kubeconfig: Path,
        image: str,
        log: Path,
        namespace: str = "cleanslate-system",
        identity: str = "operator-0",
        flags: Sequence[str] = (),
    ) -> None:
        self.log = log
        where = (f"--kubeconfig={kubeconfig}", f"--operator-namespace={namespace}", "--port=0", "--bind=127.0.0.1")
        self._argv = (sys.executable, "-m", "cleanslate_operator", *where, f"--image={image}", *flags)
        self._environment = {**os.environ, "POD_NAME": identity}

    def __enter__(self) -> Self:
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """SIGTERM, and SIGKILL if that is not enough. A stopped one goes on first, or it would see neither."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._popen.pid

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; nothing if it has ended."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; it has ended when this returns."""
        self._popen.kill()
        self._popen.wait()

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status once it has ended by itself, -N for signal N. Raises TimeoutError with the end of its log."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            said = self.log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
            raise TimeoutError(
                f"operator pid {self.pid}: has not ended in {timeout_s:.0f} s; its log ends: {said}"
            ) from error
