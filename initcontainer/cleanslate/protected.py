"""What is never ended, in any scope: recognized by the executable that runs and by who owns that file. Pure.

Not by comm, which anyone may set and the kernel cuts: a user's process called nvidia-persistenced is not protected.
"""

import fnmatch
import re
from collections.abc import Sequence

from cleanslate import roles
from cleanslate.model import Pid, Process

# The NVIDIA services (ending the fabric manager breaks CUDA on the whole node), and what containers rest on.
_SERVICES = frozenset(
    {
        "nvidia-persistenced",
        "nv-hostengine",
        "dcgm-exporter",
        "dcgmproftester",
        "nvidia-device-plugin",
        "gpu-feature-discovery",
        "nv-fabricmanager",
        "nvidia-imex",
        "nvlsm",
        "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server",
        "mps-control-daemon",
        "nvidia-mig-manager",
        "nvidia-mig-parted",
        "k8s-driver-manager",
        "nvidia-driver-manager",
        "vgpu-manager",
        "nvidia-vgpu-mgr",
        "nvidia-gridd",
        "nvidia-powerd",
        "nvidia-toolkit",
        "nvidia-validator",
        "gpu-operator",
        "gpu-kubelet-plugin",
        "compute-domain-kubelet-plugin",
        "compute-domain-controller",
        "compute-domain-daemon",
        "systemd",
        "systemd-logind",
        "systemd-udevd",
        "init",
        "containerd",
        "dockerd",
        "crio",
        "conmon",
        "conmonrs",
        "runc",
        "crun",
        "kubelet",
        "k3s",
        "k3s-server",
        "sshd",
        "sshd-session",
        "slurmd",
        "slurmstepd",
    }
)
_SHIM = re.compile(r"containerd-shim[\w.-]*")


def protection(process: Process, *, own: frozenset[Pid], extra: Sequence[str]) -> str | None:
    """Why the process is protected, or None.

    `own`: pids of this program and its ancestors. `extra`: names or path patterns given with --protect.
    """
    if process.pid == 1:
        return "PID 1"
    if process.kernel_thread:
        return "a kernel thread"
    if process.pid in own:
        return "this program or what started it"
    name, path = roles.executable_name(process), (process.executable or "").removesuffix(" (deleted)")
    named = next(
        (pattern for pattern in extra if name and fnmatch.fnmatchcase(path if "/" in pattern else name, pattern)), None
    )
    if named:
        return f"--protect {named} names its executable {path}"
    if process.executable_trusted and (name in _SERVICES or _SHIM.fullmatch(name)):
        return f"a service of the node: executable {path}, owned by root"
    return None
