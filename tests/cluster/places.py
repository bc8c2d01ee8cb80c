"""Where a cluster keeps what: one folder and one cgroup for each checkout and cluster name, so that two never collide."""

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).resolve().parent / "config"
PYTHON = (sys.executable, "-S", "-E", "-s")  # for programs of the standard library alone
PROGRAMS = Path(__file__).resolve().parent / "programs"
KEPT_LOGS = CHECKOUT / "build" / "cluster-logs"  # of failed tests; `make clean` removes it


def build_cache() -> Path:
    """What is built once a machine: binaries and images, below the name of their sources' hash."""
    root = os.environ.get("CLEANSLATE_BUILD_CACHE") or Path.home() / ".cache" / "cleanslate"
    return Path(root).absolute() / "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One cluster's place on this machine. All of it goes when the cluster is taken down."""

    name: str = "main"
    checkout: Path = CHECKOUT

    @property
    def key(self) -> str:
        """Tells this cluster from every other on the machine, another checkout's too."""
        return hashlib.sha256(f"{self.checkout}\0{self.name}".encode()).hexdigest()[:10]

    @property
    def state(self) -> Path:
        """The folder: `pki/`, `log/`, `disk/` (in memory, empty to the machine), the sockets and the kubeconfig."""
        return Path("/run/cleanslate-cluster") / self.key

    @property
    def cgroup(self) -> str:
        """The cgroup of all its processes, in every hierarchy."""
        return f"cleanslate-cluster-{self.key}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.state / "kubeconfig"

    @property
    def logs(self) -> Path:
        """One file for each component of the control plane, one folder for each node."""
        return self.state / "log"

    def socket(self, space: str) -> Path:
        """Where a space's PID 1 listens."""
        return self.state / f"{space}.sock"
