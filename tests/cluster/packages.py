"""The Debian packages that the cluster is made of: installed by `ensure` where a command of theirs is missing."""

import os
import shutil
import subprocess
from collections.abc import Mapping

# What is looked for, and the package that brings it.
RUNTIME = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "nft": "nftables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
}
BUILDING = {"buildah": "buildah", "/etc/ssl/certs/ca-certificates.crt": "ca-certificates"}


class MissingError(Exception):
    """Commands that are missing and cannot be installed here."""


def ensure(wanted: Mapping[str, str]) -> None:
    """Installs what is missing with apt-get, saying so. Raises MissingError where that cannot be."""
    missing = sorted({package for command, package in wanted.items() if not _present(command)})
    if not missing:
        return
    words = " ".join(missing)
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise MissingError(f"test cluster: cannot install {words}: needs root and apt-get; install them by hand")
    print(f"test cluster: installing {words}", flush=True)
    quiet = {"env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, "stdout": subprocess.DEVNULL, "check": True}
    subprocess.run(["apt-get", "update", "-qq"], **quiet)
    subprocess.run(["apt-get", "install", "-qq", "--yes", "--no-install-recommends", *missing], **quiet)


def _present(command: str) -> bool:
    return os.path.exists(command) if command.startswith("/") else shutil.which(command) is not None
