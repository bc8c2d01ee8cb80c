"""A machine's own cgroups: one directory in each hierarchy of the host, made, entered, thawed and removed again."""

import os
import time
from dataclasses import dataclass

WANTED = frozenset({"pids", "name=systemd", "freezer"})  # of version 1; version 2 is always wanted
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


def hierarchies() -> list[Hierarchy]:
    """The host's hierarchies that a machine uses, from /proc/self/mountinfo."""
    found: dict[str, Hierarchy] = {}
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            kind, _, options = right.split()[:3]
            wanted = WANTED.intersection(options.split(",")) if kind == "cgroup" else {""}
            if kind in {"cgroup", "cgroup2"} and wanted:
                one = Hierarchy(mount_point=left.split()[4], options=min(wanted))
                found.setdefault(one.name, one)
    return list(found.values())


class Cgroups:
    """The directories `/<name>` of one machine, seen from the host."""

    def __init__(self, name: str) -> None:
        self.hierarchies = hierarchies()
        self._roots = [os.path.join(one.mount_point, name) for one in self.hierarchies]

    def make(self) -> None:
        """Makes them."""
        for root in self._roots:
            os.mkdir(root)

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
