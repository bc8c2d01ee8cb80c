"""The fault proxy's process, and the conversation with it."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from cluster.programs.proxy.settings import Settings

_TESTS = Path(__file__).parent.parent
_START_S = 20.0
_ANSWER_S = 10.0
_END_S = 5.0
_SHOWN_BYTES = 2000


class ProxyProcess:
    """One process. It ends when the socket to it closes, which the kernel does also if this process is killed."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self._settings = settings
        self._log = log
        self._lock = threading.Lock()  # a question and its answer stay together
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it listens. Raises RuntimeError, with the end of its log, if it cannot."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(_TESTS)}
        with theirs, self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "cluster.programs.proxy"],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the tests, whose fixtures still need it
            )
        self._socket = ours
        self._answers = ours.makefile("rb")
        try:
            answer = self._exchange(self._settings.to_line(), _START_S)
        except BaseException:
            self.stop()
            raise
        self.address: tuple[str, int] = (answer["address"], answer["port"])

    def stop(self) -> None:
        """Ends it; nothing if it has ended."""
        if self._popen is None:
            return
        self._answers.close()
        self._socket.close()
        try:
            self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    @property
    def pid(self) -> int:
        """Its pid. Raises RuntimeError before the start."""
        if self._popen is None:
            raise RuntimeError("fault proxy: has no pid: not started; use it in a with statement")
        return self._popen.pid

    def ask(self, what: str, *, patience_s: float = 0.0, **question: Any) -> dict[str, Any]:
        """Asks and returns the answer. Raises RuntimeError if it has ended, TimeoutError if it is silent.

        `patience_s` is how long the answer may take on purpose.
        """
        with self._lock:
            return self._exchange(json.dumps({"do": what, **question}).encode() + b"\n", patience_s + _ANSWER_S)

    def _exchange(self, line: bytes, deadline_s: float) -> dict[str, Any]:
        self._socket.settimeout(deadline_s)
        try:
            self._socket.sendall(line)
            answer = self._answers.readline()
        except ConnectionError:
            answer = b""
        if not answer:
            raise RuntimeError(f"fault proxy pid {self.pid}: has ended: {self._end_of_log()}; see {self._log}")
        return dict(json.loads(answer))

    def _end_of_log(self) -> str:
        return self._log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip() or "it says nothing"
