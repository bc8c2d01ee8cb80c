"""How a proxy is set up: sent by the test's side as the first line, read by the program."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a proxy is told at its start. Paths are absolute, files are PEM.

    `listen_in` and `connect_in` name network namespaces by a file such as /proc/PID/ns/net; "" is the caller's own.
    """

    upstream: str  # https://{address}:{port}
    ca: str
    certificate: str
    key: str
    identity: str = ""  # a kubeconfig with a client certificate
    address: str = "127.0.0.1"
    port: int = 0  # 0: the kernel chooses
    listen_in: str = ""
    connect_in: str = ""

    def to_line(self) -> bytes:
        """A form that `from_line` takes back."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """The settings that `to_line` wrote."""
        return cls(**json.loads(line))
