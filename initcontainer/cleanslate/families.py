"""Which processes form one server, and whether its front end is gone. Pure, over one scan.

A family is a front end with the workers below it, or workers whose front end is gone. Front ends carry no title of their
own; they are found from their workers, upwards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cleanslate import roles
from cleanslate.model import Pid, Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One server's processes. `head` is its front end, or its topmost orphan; `orphaned` is the evidence for the latter."""

    head: Pid
    members: frozenset[Pid]
    trackers: frozenset[Pid]
    orphaned: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Pipes that tie a resource tracker to its family, by inode: `held` by each process, `awaited` by each tracker."""

    held: Mapping[Pid, frozenset[int]]
    awaited: Mapping[Pid, int]


def families(processes: Mapping[Pid, Process], holders: frozenset[Pid], *, host_init: bool) -> tuple[Family, ...]:
    """All families of one scan, without trackers. `holders`: processes that hold a GPU."""
    crew = workers(processes, holders)
    children = _children(processes)
    found: dict[Pid, Family] = {}
    for top in sorted({_topmost(pid, crew, processes) for pid in crew}):
        orphaned = orphan_evidence(processes[top], processes, holds_gpu=True, host_init=host_init)
        parent = processes[top].ppid
        head = top if orphaned or not _may_be_front_end(parent, processes, host_init) else parent
        members = _descendants(top, children) | {head}
        if head in found:
            members |= found[head].members
        found[head] = Family(head=head, members=members, trackers=frozenset(), orphaned=orphaned)
    return tuple(found.values())


def workers(processes: Mapping[Pid, Process], holders: frozenset[Pid]) -> frozenset[Pid]:
    """Every process in a worker's role, by its title, or by its command line if it or a worker below it holds a GPU.

    Titles are optional: an engine without one and without a GPU of its own is known by the workers that it made.
    """
    found = {pid for pid, process in processes.items() if roles.worker_role(process, holds_gpu=pid in holders)}
    queue = list(found)
    while queue:
        parent = processes.get(processes[queue.pop()].ppid)
        if parent and parent.pid not in found and roles.worker_role(parent, holds_gpu=True):
            found.add(parent.pid)
            queue.append(parent.pid)
    return frozenset(found)


def with_trackers(found: Iterable[Family], processes: Mapping[Pid, Process], links: Links) -> tuple[Family, ...]:
    """The same families with their resource trackers: children of theirs, or waiting on a pipe that they hold.

    A tracker that families with and without a front end share belongs to the one with it: it is alive.
    """
    children = _children(processes)
    claimed: set[Pid] = set()
    complete = []
    for family in sorted(found, key=lambda family: family.orphaned is not None):
        trackers = _trackers(family, children, processes, links) - claimed
        others = frozenset(claimed)
        claimed |= trackers
        complete.append(
            Family(
                head=family.head,
                members=(family.members | trackers) - others,
                trackers=trackers,
                orphaned=family.orphaned,
            )
        )
    return tuple(complete)


def orphan_evidence(
    process: Process, processes: Mapping[Pid, Process], *, holds_gpu: bool, host_init: bool
) -> str | None:
    """The positive evidence that this worker's front end is gone, or None. Neither ppid 1 nor a title proves anything alone.

    `holds_gpu`: it or a worker below it holds one.
    """
    role = roles.worker_role(process, holds_gpu=holds_gpu)
    parent = processes.get(process.ppid)
    if role is None or parent is None:
        return None
    name = roles.executable_name(parent)
    if name and name in role.lawful_parents:
        return None
    worker = f"{role.program} worker"
    if never := roles.never_makes_workers(parent, host_init=host_init):
        return f"{worker} whose parent is {never}, which makes no workers"
    if role.lawful_parents:
        return None
    if process.pgid not in {0, process.pid, parent.pgid} and not _lives(process.pgid, processes):
        return f"{worker} whose process group's leader {process.pgid} is gone, under pid {parent.pid} of another group"
    if process.severed:
        return f"{worker} that waits on a pipe nobody writes to and shares none with its parent, pid {parent.pid}"
    return None


def descendants(roots: Iterable[Pid], processes: Mapping[Pid, Process]) -> frozenset[Pid]:
    """The roots and everything below them."""
    children = _children(processes)
    return frozenset[Pid]().union(*(_descendants(root, children) for root in roots))


def _children(processes: Mapping[Pid, Process]) -> dict[Pid, list[Pid]]:
    children: dict[Pid, list[Pid]] = {}
    for pid, process in processes.items():
        children.setdefault(process.ppid, []).append(pid)
    return children


def _descendants(root: Pid, children: Mapping[Pid, list[Pid]]) -> frozenset[Pid]:
    seen = {root}
    queue = [root]
    while queue:
        fresh = [child for child in children.get(queue.pop(), ()) if child not in seen]
        seen.update(fresh)
        queue.extend(fresh)
    return frozenset(seen)


def _topmost(pid: Pid, crew: frozenset[Pid], processes: Mapping[Pid, Process]) -> Pid:
    seen = {pid}
    while (parent := processes[pid].ppid) in crew and parent not in seen:
        seen.add(parent)
        pid = parent
    return pid


def _may_be_front_end(pid: Pid, processes: Mapping[Pid, Process], host_init: bool) -> bool:
    parent = processes.get(pid)
    return parent is not None and not roles.never_makes_workers(parent, host_init=host_init)


def _lives(pid: int, processes: Mapping[Pid, Process]) -> bool:
    process = processes.get(Pid(pid))
    return process is not None and not process.is_zombie


def _trackers(
    family: Family, children: Mapping[Pid, list[Pid]], processes: Mapping[Pid, Process], links: Links
) -> frozenset[Pid]:
    groups = {processes[pid].pgid for pid in family.members}
    pipes = frozenset[int]().union(*(links.held.get(pid, frozenset()) for pid in family.members))
    waiting = {pid for pid, pipe in links.awaited.items() if pipe in pipes}
    # What stands beside the workers, below the head, may be another server's, re-parented there: then its pipe or group is.
    beside = {
        pid
        for pid in children.get(family.head, ())
        if processes[pid].pgid in groups and (pid in waiting or pid not in links.awaited)
    }
    near = {pid for pid in beside | family.members if roles.is_resource_tracker(processes[pid])}
    return frozenset(near | waiting)
