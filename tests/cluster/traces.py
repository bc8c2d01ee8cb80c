"""What a cluster could leave on a machine, to compare before and after: processes, mounts, links, rules, cgroups, files."""

import os
import subprocess
from pathlib import Path

from cluster.places import Place
from node.programs import cgroups

# Where a container runtime, a kubelet and a driver keep what, on a machine that really has them.
_FOLDERS = ("/run/containerd", "/run/netns", "/run/cni", "/run/nvidia", "/var/lib/containerd", "/var/lib/kubelet")
_FOLDERS += ("/var/lib/cni", "/var/lib/etcd", "/var/log/pods", "/var/log/containers", "/etc/cni", "/etc/kubernetes")
_FOLDERS += ("/usr/local/nvidia", "/dev", "/dev/shm")
_SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
_COMMANDS = (
    ("ip", "-oneline", "link"),
    ("ip", "-oneline", "address"),
    ("ip", "route", "show", "table", "all"),
    ("ip", "netns", "list"),
    ("nft", "list", "ruleset"),
)
NOTHING: dict[str, list[str]] = {"processes": [], "cgroups": [], "files": []}


def of_machine() -> dict[str, str]:
    """The machine's own state, whoever made it: equal before and after, where nobody else is at work."""
    found = {" ".join(command): _output(command) for command in _COMMANDS}
    found["mounts"] = "\n".join(line.split(" ", 3)[3] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    found |= {f"sysctl {name}": Path(f"/proc/sys/{name}").read_text() for name in _SYSCTLS}
    found |= {f"names in {folder}": "\n".join(_names(folder)) for folder in _FOLDERS}
    return found


def of_cluster(place: Place) -> dict[str, list[str]]:
    """What belongs to this cluster: nothing of each kind once it is down."""
    return {
        "processes": _processes(place),
        "cgroups": [one for one in _cgroups() if place.cgroup in one],
        "files": [str(place.state)] if place.state.exists() else [],
    }


def _cgroups() -> list[str]:
    return [folder for one in cgroups.hierarchies() for folder, _, _ in os.walk(one.mount_point)]


def _processes(place: Place) -> list[str]:
    """Those in its cgroups, and those that see its mounts or were told its paths.

    Not zombies: those wait for their collector, and have nothing of the cluster any more.
    """
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        texts = [_text(f"/proc/{pid}/{name}") for name in ("cgroup", "mountinfo", "cmdline")]
        zombie = "State:\tZ" in _text(f"/proc/{pid}/status")
        if int(pid) != os.getpid() and not zombie and any(place.key in text for text in texts):
            found.append(f"{pid} {texts[2]}")
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _names(folder: str) -> list[str]:
    """Without the consoles' vcs30 and the like: simulated devices are consoles, and those of other clusters come and go."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("vcs"))
    except FileNotFoundError:
        return ["(not there)"]


def _output(command: tuple[str, ...]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
