"""The slower proof of disuse, for filesystems without leases: one pass over the descriptors and mappings of every process.

Weaker than a lease: it does not see a descriptor in flight in a socket, and it is true only for the moment of the pass.
So a process that cannot be read, other than the machine's init, makes the answer "unknown", and so does a PID namespace, which
hides the processes outside.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from cleanslate import filesystems

LIFETIME_S = 1.0  # a file may be opened after the pass: a picture older than this is taken anew
DEADLINE_S = 20.0  # 3,000 processes take about a second
Inode = tuple[int, int]  # device number, inode number
_MACHINE_INIT = "1"
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """What all processes had open or mapped at one moment.

    `opened` holds (st_dev, st_ino), `mapped` (device number of the filesystem, st_ino). `mapped_names` holds the last parts of
    the mapped paths, for overlayfs, where Linux before 6.8 shows the inode of a layer below. `unread` says which process could
    not be read, and why; the answer is then unknown for every file.
    """

    taken_s: float
    processes: int = 0
    opened: frozenset[Inode] = frozenset()
    mapped: frozenset[Inode] = frozenset()
    mapped_names: frozenset[bytes] = frozenset()
    unread: str | None = None

    def uses(self, status: os.stat_result, name: str, filesystem: filesystems.Filesystem) -> bool | None:
        """Whether the file is in use; None if that cannot be told."""
        if (status.st_dev, status.st_ino) in self.opened or (filesystem.device, status.st_ino) in self.mapped:
            return True
        if filesystem.kind == "overlay" and os.fsencode(name) in self.mapped_names:
            return True
        return None if self.unread or filesystem.device is None else False

    def is_fresh(self) -> bool:
        """Whether the picture still counts. What could not be told once is not asked again."""
        return self.unread is not None or time.monotonic() - self.taken_s < LIFETIME_S


def look() -> OpenFiles:
    """Look at every process but this one, now. Costs about as much as `fuser`, once for all files.

    In a child, since reading the mappings of a process that hangs in a driver may never return.
    """
    blind_spot = _blind_spot()
    return OpenFiles(taken_s=time.monotonic(), unread=blind_spot) if blind_spot else _ask(None)


def look_at(pids: Iterable[int]) -> OpenFiles:
    """Look at these processes alone, now, as `look` does at all: others may use what they do not."""
    return _ask(tuple(pids))


def _ask(pids: tuple[int, ...] | None) -> OpenFiles:
    from cleanslate import worker  # here, since it costs imports, and most filesystems have leases

    now_s = time.monotonic()
    try:
        with worker.Worker(_look_in_child) as child:
            processes, opened, mapped, mapped_names, unread = child.ask((os.getpid(), pids), deadline_s=DEADLINE_S)
    except (worker.WorkerSilentError, worker.WorkerDiedError) as cause:
        return OpenFiles(taken_s=now_s, unread=f"looking at all processes: {cause}")
    return OpenFiles(
        taken_s=time.monotonic(),
        processes=processes,
        opened=opened,
        mapped=mapped,
        mapped_names=mapped_names,
        unread=unread,
    )


def _blind_spot() -> str | None:
    """Why /proc does not show every process of the machine, or None."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        os.stat(f"/proc/{_MACHINE_INIT}")
    except OSError as cause:
        return f"/proc: {cause.strerror}"
    if namespace != _INITIAL_PID_NAMESPACE:
        return "a PID namespace hides the processes outside it"
    return None


def _look_in_child(
    request: tuple[int, tuple[int, ...] | None],
) -> tuple[int, frozenset[Inode], frozenset[Inode], frozenset[bytes], str | None]:
    """What OpenFiles says, in its order, of the pids asked for, or of all without this child and the process that asks."""
    asker, asked = request
    picture = _Picture()
    aside = {str(asker), str(os.getpid())}
    there = [name for name in os.listdir("/proc") if name.isdigit() and name not in aside]
    pids = there if asked is None else [str(pid) for pid in asked]
    unreadable = [pid for pid in pids if picture.add_process(pid)]
    # One that was just ending can't be read and is gone a moment later: it is asked once more, after all others.
    unread = next((problem for pid in unreadable if (problem := picture.add_process(pid))), None)
    return len(pids), frozenset(picture.opened), frozenset(picture.mapped), frozenset(picture.mapped_names), unread


class _Picture:
    """What is open and mapped, process by process."""

    def __init__(self) -> None:
        self.opened: set[Inode] = set()
        self.mapped: set[Inode] = set()
        self.mapped_names: set[bytes] = set()

    def add_process(self, pid: str) -> str | None:
        """Add one process. Returns why that was not possible; one that has ended is no problem."""
        process = f"/proc/{pid}"
        try:
            if self._add_task(process):
                return None
            # a kernel thread, or a leader that ended before its other threads, which alone still show their files
            for task in os.listdir(f"{process}/task"):
                self._add_task(f"{process}/task/{task}")
        except (FileNotFoundError, ProcessLookupError):
            return None
        except PermissionError as cause:
            # some virtual machines hide their init from root too; the machine's init is no server's process
            return None if pid == _MACHINE_INIT else f"{process}: {cause.strerror}"
        except OSError as cause:
            return f"{process}: {cause.strerror}"
        return None

    def _add_task(self, task: str) -> bool:
        """Add what one thread has open and mapped. Says whether it has any mapping."""
        with open(f"{task}/maps", "rb") as file:
            maps = file.read()
        for device, inode, name in parse_maps(maps):
            self.mapped.add((device, inode))
            self.mapped_names.add(name)
        for descriptor in os.listdir(f"{task}/fd"):
            try:
                status = os.stat(f"{task}/fd/{descriptor}")
            except FileNotFoundError:
                continue  # closed meanwhile
            self.opened.add((status.st_dev, status.st_ino))
        return bool(maps)


def parse_maps(maps: bytes) -> list[tuple[int, int, bytes]]:
    """The (device, inode, last part of the path) of every file-backed mapping in /proc/PID/maps (proc_pid_maps(5))."""
    found = []
    for line in maps.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[4].isdigit() or fields[4] == b"0":
            continue
        device = filesystems.device_number(fields[3], base=16)
        if device is not None:
            found.append((device, int(fields[4]), fields[5].removesuffix(b" (deleted)").rpartition(b"/")[2]))
    return found
