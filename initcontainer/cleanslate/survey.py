"""The survey: one read-only picture of the node's GPUs and of every process that has to do with them, with verdicts.

It puts together what the edges read; what follows from it is decided in `families.py` and `verdicts.py`.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from cleanslate import families, owners, procfs, protected, roles, verdicts
from cleanslate.devices import DeviceKind, DeviceNumbers
from cleanslate.families import Family, Links
from cleanslate.model import GpuUuid, Judgement, Owner, OwnerKind, Pid, Process
from cleanslate.nvml import Reading
from cleanslate.verdicts import Case, Ground

_UNSETTLED_TRIES = 3  # a process tree that changes under the eyes is looked at again, so often


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """One picture. `pidfds` pin the identity of every case; as a context manager it lets them go at the end.

    `silent`: processes that did not answer. `unreadable`: how many descriptors tables could not be read. `unsettled`:
    processes whose parent or name kept changing, on which no verdict was given.
    """

    processes: Mapping[Pid, Process]
    cases: Mapping[Pid, Case]
    judgements: Mapping[Pid, Judgement]
    pidfds: Mapping[Pid, int]
    reading: Reading
    silent: tuple[Pid, ...] = ()
    unreadable: int = 0
    unsettled: tuple[Pid, ...] = ()

    def __enter__(self) -> Self:
        """The survey itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the processes' descriptors go."""
        self.close()

    def close(self) -> None:
        """Let the processes' descriptors go."""
        for pidfd in self.pidfds.values():
            os.close(pidfd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyor:
    """Takes surveys: what stays the same between them. `host_init`: this program sees the machine's own pids."""

    numbers: DeviceNumbers
    ground: Ground
    protect: tuple[str, ...] = ()
    host_init: bool = True

    def scan(self) -> procfs.Scan:
        """One pass over all processes."""
        return procfs.scan(self.numbers)

    def survey(self, scan: procfs.Scan, reading: Reading) -> Survey:
        """One picture: the processes of `scan`, against the GPUs as `reading` shows them."""
        survey = self._look(scan, reading)
        for _ in range(_UNSETTLED_TRIES - 1):
            if not survey.unsettled:
                break
            survey.close()
            survey = self._look(self.scan(), reading)
        return survey

    def _look(self, scan: procfs.Scan, reading: Reading) -> Survey:
        picture = _Picture(self, scan, reading)
        pidfds, unsettled = _pin(picture.relevant(), picture.processes)
        cases = picture.cases(pidfds)
        return Survey(
            processes=picture.processes,
            cases=cases,
            judgements=verdicts.judge_all(cases, self.ground),
            pidfds=pidfds,
            reading=reading,
            silent=scan.silent,
            unreadable=sum(p.device_numbers is None and not p.is_zombie for p in picture.processes.values()),
            unsettled=unsettled,
        )


class _Picture:
    """A survey in the making: the scan's processes, filled with details where they matter."""

    def __init__(self, surveyor: Surveyor, scan: procfs.Scan, reading: Reading) -> None:
        self.surveyor = surveyor
        self.processes = dict(scan.processes)
        self.listed = {pid: gpus for pid, gpus in listed_gpus(reading).items() if self._is_meant(pid)}
        self.lists_complete = surveyor.host_init and _lists_processes(reading)
        self.minors = _gpus_by_minor(reading)
        self.children = families.descendants({Pid(os.getpid())}, self.processes) - {Pid(os.getpid())}
        self.own = self._with_ancestors({Pid(os.getpid())})
        self.holders = frozenset(
            pid
            for pid, process in self.processes.items()
            if (process.device_numbers or pid in self.listed) and pid not in self.children
        )
        self._add_details()
        self.own_cgroup = procfs.own_cgroup()
        found = families.families(self.processes, self.holders, host_init=surveyor.host_init)
        self.families = families.with_trackers(found, self.processes, self._links(found))

    def _is_meant(self, pid: Pid) -> bool:
        """Whether a pid that NVML lists is this /proc's: it names the machine's pids, and another namespace has its own."""
        process = self.processes.get(pid)
        return process is not None and (self.surveyor.host_init or bool(process.device_numbers))

    def relevant(self) -> frozenset[Pid]:
        """Holders, servers' families, and what stands below a holder, unless that is a service or a mere monitor."""
        members = frozenset[Pid]().union(*(family.members for family in self.families))
        tops = {
            pid
            for pid in self.holders
            if self._protection(pid) is None and (pid in self.listed or self._opens(pid, DeviceKind.UVM))
        }
        return (self.holders | members | families.descendants(tops, self.processes)) - self.children

    def cases(self, pids: Iterable[Pid]) -> dict[Pid, Case]:
        """Everything known of each pid, for its verdict. Details are read again now that pidfds pin the identities."""
        for pid in pids:
            fresh = procfs.with_details(self.processes[pid])
            self.processes[pid] = fresh
        owned = {pid: owner_of(self.processes[pid], self.own_cgroup) for pid in pids}
        held = {pid: self.listed.get(pid) or self._gpus_by_device(pid) for pid in pids}
        by_member = {pid: family for family in self.families for pid in family.members}
        return {pid: self._case(pid, owned, held, by_member.get(pid)) for pid in pids}

    def _case(
        self,
        pid: Pid,
        owned: Mapping[Pid, Owner],
        held: Mapping[Pid, frozenset[GpuUuid]],
        family: Family | None,
    ) -> Case:
        process = self.processes[pid]
        members = family.members if family else frozenset()
        return Case(
            process=process,
            parent=self.processes.get(process.ppid),
            owner=owned[pid],
            started_at_s=procfs.started_at_s(process),
            gpus=held[pid],
            nvml_listed=pid in self.listed,
            lists_complete=self.lists_complete,
            holds_devices=bool(process.device_numbers),
            holds_uvm=None if process.device_numbers is None else self._opens(pid, DeviceKind.UVM),
            protection=self._protection(pid),
            container_alive=self._container_alive(process) if owned[pid].kind is OwnerKind.POD else None,
            family=family,
            family_gpus=frozenset[GpuUuid]().union(*(held.get(member, frozenset()) for member in members)),
            family_owner=owned.get(family.head) if family else None,
        )

    def _add_details(self) -> None:
        """Details of holders and workers and of all above them: enough to know families and protection."""
        host_init = self.surveyor.host_init
        workers = families.workers(self.processes, self.holders)
        for pid in self._with_ancestors(self.holders | workers):
            self.processes[pid] = procfs.with_details(self.processes[pid])
        for pid in workers:
            process = self.processes[pid]
            parent = self.processes.get(process.ppid)
            if parent and parent.pid not in workers and not roles.never_makes_workers(parent, host_init=host_init):
                self.processes[pid] = replace(process, severed=procfs.is_severed(pid, parent.pid))

    def _links(self, found: Iterable[Family]) -> Links:
        """The pipes between these families and all resource trackers."""
        trackers = {
            pid: roles.tracker_descriptor(p) for pid, p in self.processes.items() if roles.is_resource_tracker(p)
        }
        awaited = {}
        for pid, descriptor in trackers.items():
            if descriptor is not None and (end := (procfs.pipes(pid) or {}).get(descriptor)):
                awaited[pid] = end[0]
        members = frozenset[Pid]().union(*(family.members for family in found)) if awaited else frozenset()
        held = {pid: frozenset(inode for inode, _ in (procfs.pipes(pid) or {}).values()) for pid in members}
        return Links(held=held, awaited=awaited)

    def _with_ancestors(self, pids: Iterable[Pid]) -> frozenset[Pid]:
        found: set[Pid] = set()
        queue = list(pids)
        while queue:
            pid = queue.pop()
            if pid in self.processes and pid not in found:
                found.add(pid)
                queue.append(self.processes[pid].ppid)
        return frozenset(found)

    def _protection(self, pid: Pid) -> str | None:
        return protected.protection(self.processes[pid], own=self.own, extra=self.surveyor.protect)

    def _opens(self, pid: Pid, kind: DeviceKind) -> bool:
        numbers = self.surveyor.numbers
        devices = (numbers.device(number) for number in self.processes[pid].device_numbers or ())
        return any(device is not None and device.kind is kind for device in devices)

    def _gpus_by_device(self, pid: Pid) -> frozenset[GpuUuid]:
        numbers = self.surveyor.numbers
        devices = (numbers.device(number) for number in self.processes[pid].device_numbers or ())
        held = (device.minor for device in devices if device is not None and device.kind is DeviceKind.GPU)
        return frozenset[GpuUuid]().union(*(self.minors.get(minor, frozenset()) for minor in held))

    def _container_alive(self, process: Process) -> bool | None:
        """Whether the process stands below its container's first process; None if that can't be seen."""
        container = owner_of(process, self.own_cgroup).container
        seen: set[Pid] = set()
        while process.pid not in seen:
            seen.add(process.pid)
            if process.inner_pid == 1 and process.foreign_pid_namespace:
                return True
            parent = self.processes.get(process.ppid)
            if parent is None:
                return None
            parent = procfs.with_details(parent)
            if roles.is_container_shim(parent):
                return True
            if owner_of(parent, self.own_cgroup).container != container:
                return None
            process = parent
        return None


def owner_of(process: Process, own_cgroup: str) -> Owner:
    """What the process belongs to, by its details."""
    return owners.owner_of(
        process.cgroup,
        uid=process.uid,
        login_uid=process.login_uid,
        foreign_pid_namespace=process.foreign_pid_namespace,
        own_cgroup=own_cgroup,
    )


def listed_gpus(reading: Reading) -> dict[Pid, frozenset[GpuUuid]]:
    """The GPUs and MIG instances on which NVML lists each process, an instance together with the GPU that it is part of."""
    found: dict[Pid, frozenset[GpuUuid]] = {}
    for gpu in reading.gpus:
        uuids = frozenset(uuid for uuid in (gpu.uuid, gpu.parent) if uuid)
        for process in gpu.processes or ():
            found[process.pid] = found.get(process.pid, frozenset()) | uuids
    return found


def _lists_processes(reading: Reading) -> bool:
    """Whether NVML has told the processes of every GPU."""
    return reading.failure is None and bool(reading.gpus) and all(gpu.processes is not None for gpu in reading.gpus)


def _gpus_by_minor(reading: Reading) -> dict[int, frozenset[GpuUuid]]:
    found: dict[int, frozenset[GpuUuid]] = {}
    for gpu in reading.gpus:
        if gpu.minor is not None:
            uuids = frozenset(uuid for uuid in (gpu.uuid, gpu.parent) if uuid)
            found[gpu.minor] = found.get(gpu.minor, frozenset()) | uuids
    return found


def _pin(wanted: Iterable[Pid], processes: Mapping[Pid, Process]) -> tuple[dict[Pid, int], tuple[Pid, ...]]:
    """A pidfd for each process that still is the one scanned, and the pids of those whose parent or name changed since.

    Opened before the details for the verdict are read: from here on a reused pid cannot be taken for it.
    """
    pidfds: dict[Pid, int] = {}
    unsettled = []
    for pid in sorted(wanted):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        seen, now = processes[pid], procfs.read_stat(pid)
        if now is not None and (now.start_ticks, now.ppid, now.comm) == (seen.start_ticks, seen.ppid, seen.comm):
            pidfds[pid] = pidfd
            continue
        os.close(pidfd)
        if now is not None and now.start_ticks == seen.start_ticks:
            unsettled.append(pid)
    return pidfds, tuple(unsettled)
