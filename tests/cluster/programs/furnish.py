"""The file system of a space: `control` sees the machine's, a `node` an overlay of it that keeps every change to itself.

A node is furnished as a GPU node is: all default paths (/run/containerd, /var/lib/kubelet, /dev/shm, …) are used, and none of
them is the machine's. What is written below / lands in memory and goes with the node.
"""

import ctypes
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from node.programs import cgroups, namespaces

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MNT_DETACH = 2
_MS_RDONLY = 1
_MS_REMOUNT = 32
_MORE_NODES = (("kmsg", 1, 11), ("fuse", 10, 229))  # the kubelet's OOM watcher reads kmsg; tests mount FUSE
# The kubelet insists on these, which belong to the whole machine: it is shown files that hold the values it wants.
_SYSCTLS = {"vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1}


def furnish(root: dict[str, Any], hierarchies: Sequence[cgroups.Hierarchy]) -> None:
    """Called as PID 1 of new namespaces, before anything runs in them. `root["kind"]`: control or node."""
    namespaces.own_mounts()
    if root["kind"] == "control":
        _furnish_control(root)
    else:
        _furnish_node(root, hierarchies)


def _furnish_control(root: dict[str, Any]) -> None:
    """The machine's file system, but for /proc and a disk in memory, where etcd and the nodes keep theirs."""
    namespaces.mount("proc", "/proc", "proc", namespaces.NOSUID_NODEV_NOEXEC)
    namespaces.mount("tmpfs", root["disk"], "tmpfs", 0, "mode=755")


def _furnish_node(root: dict[str, Any], hierarchies: Sequence[cgroups.Hierarchy]) -> None:
    disk = root["disk"]
    top = f"{disk}/root"
    for name in ("upper", "work", "root", "lib"):
        os.makedirs(f"{disk}/{name}", exist_ok=True)
    namespaces.mount("overlay", top, "overlay", 0, f"lowerdir=/,upperdir={disk}/upper,workdir={disk}/work")
    for name in ("run", "tmp"):
        namespaces.mount("tmpfs", f"{top}/{name}", "tmpfs", 0, "mode=1777" if name == "tmp" else "mode=755")
    _bind(f"{disk}/lib", f"{top}/var/lib")
    _bind(root["log"], f"{top}/var/log")
    for source, target in root["read_only"].items():
        _bind(source, top + target, read_only=True)
    namespaces.mount("proc", f"{top}/proc", "proc", namespaces.NOSUID_NODEV_NOEXEC)
    namespaces.mount("sysfs", f"{top}/sys", "sysfs", namespaces.NOSUID_NODEV_NOEXEC)
    _pivot(top)
    _mount_cgroups(hierarchies)
    namespaces.own_devices()
    os.umask(0)
    for name, major, minor in _MORE_NODES:
        os.mknod(f"/dev/{name}", 0o020600, os.makedev(major, minor))
    os.umask(0o022)
    namespaces.cover("/proc/driver", ())
    os.mkdir("/run/proc")
    _show("/proc/sys/kernel/random/boot_id", root["boot_id"])
    for key, value in _SYSCTLS.items():
        _show(f"/proc/sys/{key}", str(value))
    # Pods may ask for mount propagation, so mounts are shared, but only inside this namespace.
    namespaces.mount("none", "/", None, namespaces.RECURSIVE | namespaces.SHARED)


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    os.makedirs(target, exist_ok=True)
    namespaces.mount(source, target, None, namespaces.BIND)
    if read_only:
        namespaces.mount("none", target, None, namespaces.BIND | _MS_REMOUNT | _MS_RDONLY)


def _show(path: str, text: str) -> None:
    """Covers a file below /proc with one of the node's own that reads `text`."""
    own = pathlib.Path("/run/proc", path.replace("/", "-").strip("-"))
    own.write_text(text + "\n")
    namespaces.mount(str(own), path, None, namespaces.BIND)


def _mount_cgroups(hierarchies: Sequence[cgroups.Hierarchy]) -> None:
    """Each hierarchy where the machine has it; in a cgroup namespace its root is the node's own group."""
    if any(one.mount_point == "/sys/fs/cgroup" for one in hierarchies):
        namespaces.mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, "")
        return
    namespaces.mount("tmpfs", "/sys/fs/cgroup", "tmpfs", 0, "mode=755")
    for one in hierarchies:
        os.mkdir(one.mount_point)
        namespaces.mount(one.kind, one.mount_point, one.kind, 0, one.options)


def _pivot(top: str) -> None:
    """Makes `top` the root of this mount namespace, with nothing of the old one left."""
    machine = os.uname().machine
    os.chdir(top)
    if _LIBC.syscall(_SYS_PIVOT_ROOT[machine], b".", b".") != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot pivot to {top}: {os.strerror(code)}")
    _LIBC.umount2(b".", _MNT_DETACH)
    os.chdir("/")
