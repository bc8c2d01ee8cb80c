"""Reading processes from /proc: pure parsers, one process, and one scan of them all.

The scan runs in forked children: it uses every core, and a process whose files never answer costs one child, not the run.
A process that ends in between is simply not there. Text is decoded with surrogateescape, since anyone may write it.
"""

import os
import select
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cleanslate.devices import DeviceNumbers
from cleanslate.model import Pid, Process
from cleanslate.worker import Message, Worker, WorkerDiedError, WorkerSilentError

PF_KTHREAD = 0x00200000  # include/linux/sched.h
SCAN_DEADLINE_S = 5.0  # for one batch of processes; it takes milliseconds
_BATCH = 64
_MAX_WORKERS = 8
_ALONE_BELOW = 400  # fewer processes than this are read sooner by one child than shared out
_TEXT_LIMIT = 4096
_ARGUMENTS = 16  # more than any role is told by
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that matter here; proc_pid_stat(5)."""

    pid: Pid
    comm: str
    state: str
    ppid: Pid
    pgid: int
    sid: int
    flags: int
    threads: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """One pass over /proc. `silent`: processes that never answered, of which nothing is known but that they are there."""

    processes: dict[Pid, Process]
    silent: tuple[Pid, ...] = ()


def parse_stat(text: bytes) -> Stat:
    """Parse /proc/PID/stat. The comm may hold spaces, parentheses and newlines. Raises ValueError on anything else."""
    head, _, tail = text.rpartition(b")")
    pid, _, comm = head.partition(b"(")
    fields = tail.split()
    if len(fields) < 20:
        raise ValueError("stat: too few fields")
    return Stat(
        pid=Pid(int(pid)),
        comm=os.fsdecode(comm),
        state=fields[0].decode("ascii", "replace"),
        ppid=Pid(int(fields[1])),
        pgid=int(fields[2]),
        sid=int(fields[3]),
        flags=int(fields[6]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def parse_cmdline(data: bytes) -> tuple[str, ...]:
    """The first arguments in /proc/PID/cmdline; a title set by setproctitle is one argument without its padding."""
    stripped = data.rstrip(b"\0")
    parts = stripped.split(b"\0")[:_ARGUMENTS] if stripped else []
    return tuple(os.fsdecode(part) for part in parts)


def parse_status(text: str) -> dict[str, str]:
    """The lines `Key: value` of /proc/PID/status."""
    pairs = (line.partition(":") for line in text.split("\n"))
    return {key: value.strip() for key, colon, value in pairs if colon}


def list_pids() -> list[Pid]:
    """Every process there is, in the order of /proc."""
    return [Pid(int(name)) for name in os.listdir("/proc") if name.isascii() and name.isdigit()]


def read_stat(pid: Pid) -> Stat | None:
    """One process's stat, or None if it is gone."""
    try:
        return parse_stat(_read(f"/proc/{pid}/stat", 1024))
    except (OSError, ValueError):
        return None


def scan(numbers: DeviceNumbers) -> Scan:
    """Read identity, command line and NVIDIA devices of every process."""
    pids = list_pids()
    rows: list[Message] = []
    silent: list[Pid] = []
    count = 1 if len(pids) < _ALONE_BELOW else min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    for answer, lost in _share_out(pids, count, numbers):
        rows += answer
        silent += lost
    return Scan(processes={row[0][0]: _process(row) for row in rows}, silent=tuple(silent))


def _share_out(pids: Sequence[Pid], count: int, numbers: DeviceNumbers) -> Iterator[tuple[list[Message], list[Pid]]]:
    """Deal batches to children until all are answered; a batch that silences its child is read again one by one."""
    batches = [pids[at : at + _BATCH] for at in range(0, len(pids), _BATCH)]
    crew: dict[Worker, Sequence[Pid]] = {}
    try:
        while batches or crew:
            while batches and len(crew) < count:
                worker = Worker(lambda batch: [row for pid in batch if (row := _scan_one(pid, numbers))])
                crew[worker] = batches.pop()
                worker.tell(list(crew[worker]))
            worker = _first_ready(crew)
            batch = crew.pop(worker)
            try:
                yield worker.hear(deadline_s=SCAN_DEADLINE_S), []
            except (WorkerSilentError, WorkerDiedError):
                if len(batch) == 1:
                    yield [], list(batch)
                else:
                    batches += [[pid] for pid in batch]
                continue
            if batches:
                crew[worker] = batches.pop()
                worker.tell(list(crew[worker]))
            else:
                worker.close()
    finally:
        for worker in crew:
            worker.close()


def _first_ready(crew: Iterable[Worker]) -> Worker:
    poll = select.poll()
    by_descriptor = {worker.fileno(): worker for worker in crew}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    ready = poll.poll(SCAN_DEADLINE_S * 1000)
    return by_descriptor[ready[0][0]] if ready else next(iter(by_descriptor.values()))


def _scan_one(pid: Pid, numbers: DeviceNumbers) -> Message:
    try:
        stat = parse_stat(_read(f"/proc/{pid}/stat", 1024))
        argv = parse_cmdline(_read(f"/proc/{pid}/cmdline", _TEXT_LIMIT))
    except (OSError, ValueError):
        return None
    return tuple(stat), argv, _nvidia_numbers(pid, numbers)


def _nvidia_numbers(pid: Pid, numbers: DeviceNumbers) -> tuple[int, ...] | None:
    """Device numbers of NVIDIA's that the process has open; None if its descriptors can't be read."""
    try:
        folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        opened = _device_numbers(folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    nodes, majors = numbers.nodes, numbers.majors
    return tuple(number for number in opened if number in nodes or os.major(number) in majors)


def _device_numbers(folder: int) -> set[int]:
    """The device numbers of everything open in a /proc/PID/fd, 0 for what is no device.

    Since Linux 6.2 the directory's size is the count of descriptors, and most tables are dense: then the kernel is spared a
    listing, which costs it as much again. Where that does not find them all, the rest is listed.
    """
    count = os.fstat(folder).st_size
    opened, found = _stat_each(folder, map(str, range(count)))
    if found < count or not count:
        rest = (name for name in os.listdir(folder) if int(name) >= count)
        opened |= _stat_each(folder, rest)[0]
    return opened


def _stat_each(folder: int, names: Iterable[str]) -> tuple[set[int], int]:
    stat, opened, found = os.stat, set(), 0
    for name in names:
        try:
            opened.add(stat(name, dir_fd=folder).st_rdev)
        except FileNotFoundError:
            continue  # not in use, or closed in between
        found += 1
    return opened, found


def bare(stat: Stat, argv: tuple[str, ...] = (), device_numbers: frozenset[int] | None = None) -> Process:
    """A process of which only this much was read."""
    return Process(
        pid=stat.pid,
        start_ticks=stat.start_ticks,
        ppid=stat.ppid,
        pgid=stat.pgid,
        sid=stat.sid,
        state=stat.state,
        threads=stat.threads,
        comm=stat.comm,
        argv=argv,
        executable=None,
        cgroup="",
        kernel_thread=bool(stat.flags & PF_KTHREAD),
        device_numbers=device_numbers,
    )


def _process(row: Message) -> Process:
    stat, argv, numbers = row
    return bare(Stat(*stat), argv, None if numbers is None else frozenset(numbers))


def with_details(process: Process) -> Process:
    """The same process with its executable, cgroups, users and PID namespace; what can't be read stays unknown."""
    base = f"/proc/{process.pid}"
    status = parse_status(_text(f"{base}/status"))
    inner = status.get("NSpid", "").split()
    uids = status.get("Uid", "").split()
    login = _text(f"{base}/loginuid").strip()
    return replace(
        process,
        executable=_link(f"{base}/exe"),
        executable_trusted=_is_roots_alone(f"{base}/exe"),
        cgroup=_text(f"{base}/cgroup"),
        uid=int(uids[0]) if uids and uids[0].isdigit() else None,
        login_uid=int(login) if login.isdigit() else None,
        inner_pid=int(inner[-1]) if inner and inner[-1].isdigit() else None,
        foreign_pid_namespace=len(inner) > 1 if inner else None,
    )


def pipes(pid: Pid) -> dict[int, tuple[int, bool]] | None:
    """The pipes a process has open: descriptor → (inode, whether it can only read). None if they can't be read."""
    folder = f"/proc/{pid}/fd"
    try:
        ends = {int(name): _pipe_end(f"{folder}/{name}") for name in os.listdir(folder)}
    except OSError:
        return None
    return {number: end for number, end in ends.items() if end is not None}


def _pipe_end(path: str) -> tuple[int, bool] | None:
    try:
        target, mode = os.readlink(path), os.lstat(path).st_mode
    except FileNotFoundError:
        return None  # closed in between
    return (int(target[6:-1]), not mode & 0o200) if target.startswith("pipe:[") else None


def is_severed(pid: Pid, parent: Pid) -> bool | None:
    """Whether a pipe of `pid` lost its last writer while `parent` shares none with it; None if either can't be read.

    Python's multiprocessing keeps a pipe between each child and its creator for as long as both live; the kernel's answer
    to poll on the read end (POLLHUP) says that nobody has the other end any more. Standard streams do not count.
    """
    ours, theirs = pipes(pid), pipes(parent)
    if ours is None or theirs is None:
        return None
    shared = {inode for inode, _ in theirs.values()}
    beyond_standard = {number: end for number, end in ours.items() if number > 2}
    if any(inode in shared for inode, _ in beyond_standard.values()):
        return False
    return any(_has_no_writer(pid, number) for number, (_, reads_only) in beyond_standard.items() if reads_only)


def _has_no_writer(pid: Pid, number: int) -> bool:
    try:
        end = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        return any(events & select.POLLHUP for _, events in poll.poll(0))
    finally:
        os.close(end)


def wait_channel(pid: Pid) -> str:
    """The kernel function in which the process waits, or an empty text."""
    channel = _text(f"/proc/{pid}/wchan").strip()
    return "" if channel == "0" else channel


def own_cgroup() -> str:
    """The text of this program's own /proc/PID/cgroup."""
    return _text("/proc/self/cgroup")


def in_initial_pid_namespace() -> bool:
    """Whether this program sees the machine's own pids, as NVML reports them."""
    return _link("/proc/self/ns/pid") == INITIAL_PID_NAMESPACE


def hides_processes() -> bool:
    """Whether /proc is mounted so that other users' processes may be invisible (hidepid), and this program is not exempt."""
    mounts = _text("/proc/self/mounts").split("\n")
    options = [line.split()[3] for line in mounts if line.split()[1:3] == ["/proc", "proc"]]
    hidden = bool(options) and any(
        option in options[-1] for option in ("hidepid=1", "hidepid=2", "hidepid=inv", "hidepid=pt", "hidepid=noa")
    )
    return hidden and not _has_capability(19)


def _has_capability(number: int) -> bool:
    effective = parse_status(_text("/proc/self/status")).get("CapEff", "0")
    return bool(int(effective, 16) >> number & 1)


def boot_time_s() -> float:
    """Unix time of the moment from which start times count."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def started_at_s(process: Process) -> float:
    """Unix time at which the process started, to a clock tick."""
    return boot_time_s() + process.start_ticks / _CLOCK_TICKS


def _is_roots_alone(path: str) -> bool | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_uid == 0 and not info.st_mode & 0o022


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _text(path: str) -> str:
    try:
        return os.fsdecode(_read(path, 1 << 16))
    except OSError:
        return ""


def _read(path: str, limit: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)
