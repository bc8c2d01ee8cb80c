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
    """Kills what is in the cgroups until nothing is, and waits for each to be gone: a dying process is in no cgroup any more."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    dying: set[int] = set()
    while members := groups.processes():
        groups.thaw()
        # Who waits for a space's PID 1 outside goes after it, so that it is collected.
        pids = {pid for pid in members if _is_inside(pid)} or members
        # All are held before the first is killed: a process that dies of another's death is a member no more, but not gone.
        killed = {pidfd for pid in pids if (pidfd := _open_member(pid, place)) is not None}
        for pidfd in killed:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        dying |= killed
        _wait_for(killed, min(deadline, time.monotonic() + _AGAIN_S))
        if time.monotonic() > deadline:
            raise StuckError(f"cluster {place.name}: pids {sorted(pids)} do not end by SIGKILL; see /proc/PID/wchan")
    if left := _wait_for(dying, deadline):
        raise StuckError(f"cluster {place.name}: {left} processes have not ended by SIGKILL")
    for pidfd in dying:
        os.close(pidfd)


def _wait_for(pidfds: set[int], deadline: float) -> int:
    """Until all have ended or the time is over; returns how many have not."""
    waiting = set(pidfds)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(waiting, [], [], left_s)
        waiting.difference_update(ended)
    return len(waiting)


def _is_inside(pid: int) -> bool:
    """Whether a process is in a PID namespace below this one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return len(status.partition("NSpid:")[2].partition("\n")[0].split()) > 1


def _open_member(pid: int, place: Place) -> int | None:
    """The pidfd of a process that is a member still, once its pid is held."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if place.cgroup in Path(f"/proc/{pid}/cgroup").read_text():
            return pidfd
    os.close(pidfd)
    return None


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another cluster's place is there, or there never was one
        folder.rmdir()
