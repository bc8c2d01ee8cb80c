"""Cgroups of a test's own: one directory in each hierarchy of the host, made, entered, thawed and removed again."""

import contextlib
import os
import time
from dataclasses import dataclass

MACHINE = frozenset({"pids", "name=systemd", "freezer"})  # what a machine of tests/node needs of version 1
_CONTROLLERS = MACHINE.union(
    [
        "blkio",
        "cpu",
        "cpuacct",
        "cpuset",
        "devices",
        "hugetlb",
        "memory",
        "misc",
        "net_cls",
        "net_prio",
        "perf_event",
        "rdma",
    ]
)
REMOVE_DEADLINE_S = 5.0  # a dead process leaves its cgroup a little after its parent has waited for it
_RETRY_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One mounted hierarchy: `options` is what mount(2) wants, "" for version 2."""

    mount_point: str
    options: str

    @property
    def kind(self) -> str:
        """The filesystem's type."""
        return "cgroup" if self.options else "cgroup2"

    @property
    def name(self) -> str:
        """Its directory below /sys/fs/cgroup in the machine."""
        return self.options.removeprefix("name=") or "unified"


def hierarchies(wanted: frozenset[str] = _CONTROLLERS) -> list[Hierarchy]:
    """The host's hierarchies with one of these controllers, and version 2's in any case, from /proc/self/mountinfo."""
    found: dict[str, Hierarchy] = {}
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            kind, _, options = right.split()[:3]
            controllers = _CONTROLLERS.intersection(options.split(",")) if kind == "cgroup" else frozenset()
            if kind == "cgroup2" or controllers & wanted:
                one = Hierarchy(mount_point=left.split()[4], options=",".join(sorted(controllers)))
                found.setdefault(one.name, one)
    return list(found.values())


class Cgroups:
    """The directories `/<name>`, seen from the host."""

    def __init__(self, name: str, wanted: frozenset[str] = _CONTROLLERS) -> None:
        self.hierarchies = hierarchies(wanted)
        self._roots = [os.path.join(one.mount_point, name) for one in self.hierarchies]

    def make(self) -> None:
        """Makes them."""
        for root in self._roots:
            os.mkdir(root)
            _inherit_cpuset(root)

    def exist(self) -> bool:
        """Whether any of them is there."""
        return any(map(os.path.isdir, self._roots))

    def processes(self) -> set[int]:
        """The pids in them and below, as this process's PID namespace sees them."""
        found: set[int] = set()
        for root in self._roots:
            for directory, _, _ in os.walk(root):
                found.update(_members(directory))
        return found - {0}

    def enter(self) -> None:
        """Moves the calling process in."""
        for root in self._roots:
            join(root)

    def thaw(self) -> None:
        """Thaws every frozen group: a process frozen by version 1 does not die of SIGKILL."""
        for root in self._roots:
            for directory, _, files in os.walk(root):
                if "freezer.state" in files:
                    _write(os.path.join(directory, "freezer.state"), "THAWED")

    def remove(self) -> None:
        """Removes them, deepest first. Raises OSError if one is still in use at the deadline."""
        deadline = time.monotonic() + REMOVE_DEADLINE_S
        for root in self._roots:
            for directory, _, _ in os.walk(root, topdown=False):
                _remove(directory, deadline)


def _members(directory: str) -> set[int]:
    try:
        with open(os.path.join(directory, "cgroup.procs"), encoding="ascii") as members:
            return {int(line) for line in members}
    except OSError:  # the directory went away, or is of a threaded kind
        return set()


def _inherit_cpuset(directory: str) -> None:
    """Version 1's cpuset lets nobody in before it has processors and memory nodes."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        with (
            contextlib.suppress(FileNotFoundError),
            open(os.path.join(directory, "..", name), encoding="ascii") as outer,
        ):
            _write(os.path.join(directory, name), outer.read())


def join(directory: str) -> None:
    """Moves the calling process into the cgroup `directory`."""
    _write(os.path.join(directory, "cgroup.procs"), "0")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _remove(directory: str, deadline: float) -> None:
    while True:
        try:
            return os.rmdir(directory)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)  # the kernel offers no event for "the last task has left"
