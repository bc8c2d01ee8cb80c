"""Ends a cluster, whatever state it is in.

Its cgroups tell which processes belong to it, so a half-made one goes as well as a whole one.
"""

import contextlib
import os
import select
import shutil
import signal
import time
from pathlib import Path

from cluster.places import Place
from gpusim import gpusim
from node.programs import cgroups

KILL_DEADLINE_S = 20.0
_AGAIN_S = 0.2


class StuckError(Exception):
    """Processes of the cluster that do not end."""


def exists(place: Place) -> bool:
    """Whether anything of this cluster is there, whole or in pieces."""
    return place.state.exists() or cgroups.Cgroups(place.cgroup).exist()


def take_down(place: Place) -> None:
    """Leaves nothing of the cluster but what is cached. Blocks for about 0.2 s. Raises StuckError."""
    groups = cgroups.Cgroups(place.cgroup)
    _end_all(groups, place)
    groups.remove()
    if place.state.exists():
        shutil.rmtree(place.state)
    _remove_if_empty(place.state.parent)
    gpusim.disallocate()


def _end_all(groups: cgroups.Cgroups, place: Place) -> None:
    deadline = time.monotonic() + KILL_DEADLINE_S
    while pids := groups.processes():
        groups.thaw()
        waiting = [pidfd for pid in pids if (pidfd := _kill_member(pid, place)) is not None]
        select.select(waiting[:1], [], [], _AGAIN_S)
        for pidfd in waiting:
            os.close(pidfd)
        if time.monotonic() > deadline:
            raise StuckError(f"cluster {place.name}: pids {sorted(pids)} do not end by SIGKILL; see /proc/PID/wchan")


def _kill_member(pid: int, place: Place) -> int | None:
    """SIGKILLs a process that is a member still, once its pid is held; returns its pidfd."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if place.cgroup in Path(f"/proc/{pid}/cgroup").read_text():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        pass  # it has just ended
    return pidfd


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another cluster's place is there, or there never was one
        folder.rmdir()
