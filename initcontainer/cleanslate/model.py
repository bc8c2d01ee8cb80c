"""The words of Clean Slate as types: what a survey sees and what a verdict says. Plain data, no I/O.

`None` always means "unknown", never zero and never "no".
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

Pid = NewType("Pid", int)
GpuUuid = NewType("GpuUuid", str)
PodUid = NewType("PodUid", str)
ContainerId = NewType("ContainerId", str)


class Verdict(StrEnum):
    """What is to become of one process or one file. There is no third word: what is unknown is kept."""

    KEEP = "Keep"
    END = "End"
    REMOVE = "Remove"


class Manner(StrEnum):
    """How a process is ended."""

    AT_ONCE = "at once"  # a leftover: SIGKILL, since its graceful way out waits for a dead front end
    GRACEFULLY = "gracefully"  # live work: SIGTERM to the front ends, SIGKILL after the grace period
    SPARED = "spared"  # a resource tracker: it ends by itself and unlinks its dead family's shared memory


class OwnerKind(StrEnum):
    """What a process can belong to."""

    POD = "pod"
    CONTAINER = "container"
    BATCH = "batch"
    SERVICE = "service"
    LOGIN = "login"
    HOST = "host"
    UNKNOWN = "unknown"


class Outcome(StrEnum):
    """What became of one process."""

    KEPT = "Kept"
    WOULD_END = "WouldEnd"
    ENDED = "Ended"
    ZOMBIE = "Zombie"  # dead, but its parent does not collect it
    UNINTERRUPTIBLE = "Uninterruptible"  # in D state after SIGKILL
    UNKILLABLE = "Unkillable"  # runs on inside the driver after SIGKILL
    NOT_ENDED = "NotEnded"  # not tried, refused, or out of time


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process for as long as the machine is up: the kernel reuses pids, never a pid with its start time.

    `start_ticks`: clock ticks after boot, field 22 of /proc/PID/stat.
    """

    pid: Pid
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What a process belongs to, with the fact that says so.

    `name` is the pod's UID, the container's ID, the job, the unit or the user; `container` is a pod's container, if known.
    """

    kind: OwnerKind
    name: str = ""
    container: ContainerId | None = None
    evidence: str = ""

    def __str__(self) -> str:
        """For messages: `pod 5e1c… (container 3f2a…)`."""
        inside = f" (container {self.container[:12]})" if self.container else ""
        return f"{self.kind} {self.name}".strip() + inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as one scan of /proc saw it. Text is decoded with surrogateescape and bounded.

    `device_numbers`: NVIDIA's that it has open, None where the descriptors could not be read. `executable_trusted`: the file
    is root's and nobody else may write it. `severed`: a pipe that its creator must hold has no writer any more while its
    parent shares no pipe with it (None: not looked at, or could not tell).
    """

    pid: Pid
    start_ticks: int
    ppid: Pid
    pgid: int
    sid: int
    state: str
    threads: int
    comm: str
    argv: tuple[str, ...]
    executable: str | None
    cgroup: str
    executable_trusted: bool | None = None
    uid: int | None = None
    login_uid: int | None = None
    inner_pid: int | None = None  # its pid in its own PID namespace
    foreign_pid_namespace: bool | None = None
    kernel_thread: bool = False
    device_numbers: frozenset[int] | None = frozenset()
    severed: bool | None = None

    @property
    def identity(self) -> Identity:
        """Pid and start time."""
        return Identity(pid=self.pid, start_ticks=self.start_ticks)

    @property
    def is_zombie(self) -> bool:
        """Dead, and only its exit status is left; a leader whose other threads run on is not."""
        return self.state in "ZX" and self.threads <= 1

    @property
    def title(self) -> str:
        """What the process calls itself: its first argument, which setproctitle overwrites, else its comm; no path."""
        return (self.argv[0].rpartition("/")[2] if self.argv else "") or self.comm


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on one process: `reason` for people, `evidence` the fact it rests on.

    `owner_known` is False where the verdict is Keep only because nothing could be proved.
    """

    verdict: Verdict
    reason: str
    evidence: str
    manner: Manner = Manner.AT_ONCE
    owner_known: bool = True
    monitor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of shared memory, a cache or a log, with its verdict.

    `path` is printable: bytes that are not UTF-8 and control characters are escaped. `error` is set where removing failed.
    """

    path: str
    verdict: Verdict
    reason: str
    evidence: str
    size_bytes: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTally:
    """What a purge did below some roots. Lists are cut at a limit, counts and bytes are whole.

    In a dry run `removed` holds what would have been removed, and `bytes_freed` is 0.
    """

    roots: tuple[str, ...] = ()
    removed: tuple[FileRecord, ...] = ()
    removed_count: int = 0
    kept: tuple[FileRecord, ...] = ()
    kept_count: int = 0
    bytes_freed: int = 0
