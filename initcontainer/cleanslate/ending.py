"""Ending processes: through pidfds only, waiting on them, never sleeping.

Leftovers get SIGKILL at once: SIGTERM makes an orphaned vLLM engine wait for its dead front end (10.8 s measured, SIGKILL
0.19 s). Live work gets SIGTERM at its front ends alone, and the grace period. Resource trackers are spared: they unlink
their dead family's shared memory within 0.01 s of its end, and would leave it behind if killed.
"""

import os
import select
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cleanslate import procfs, roles
from cleanslate.model import Manner, Outcome, Pid, Verdict
from cleanslate.survey import Survey

KILL_WAIT_S = 20.0  # a context of 120 GiB is torn down in 0.4 s, many GPUs with pinned memory in tens of seconds
TRACKER_WAIT_S = 2.0  # it needs 0.01 s from its family's end


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of a process that was to end, with what to do next where it did not."""

    outcome: Outcome
    message: str = ""


def end(survey: Survey, *, grace_s: float, deadline: float) -> dict[Pid, Fate]:
    """End what the survey's verdicts say, and wait for it until `deadline` (monotonic seconds).

    Returns the fate of each process that was to end. Blocks up to `grace_s` for live work, then up to KILL_WAIT_S.
    """
    wanted = {pid: j.manner for pid, j in survey.judgements.items() if j.verdict is Verdict.END}
    at_once = _of(wanted, Manner.AT_ONCE)
    graceful = _of(wanted, Manner.GRACEFULLY)
    spared = _of(wanted, Manner.SPARED)
    refused = send(survey, at_once, signal.SIGKILL)
    refused |= send(survey, _front_ends(survey, graceful), signal.SIGTERM)
    send(survey, graceful, signal.SIGCONT)  # a stopped process hears SIGTERM only when it goes on
    late = wait_for_ends(survey.pidfds, graceful, _earlier(deadline, grace_s))
    refused |= send(survey, late, signal.SIGKILL)
    alive = wait_for_ends(survey.pidfds, (at_once | late) - refused.keys(), _earlier(deadline, KILL_WAIT_S))
    alive |= _end_trackers(survey, spared, deadline)
    return {pid: _fate(survey, pid, alive, refused, deadline) for pid in wanted}


def send(survey: Survey, pids: Iterable[Pid], number: signal.Signals) -> dict[Pid, str]:
    """Signal each process through its pidfd. Returns why, for those that the kernel did not let us signal."""
    refused = {}
    for pid in pids:
        try:
            signal.pidfd_send_signal(survey.pidfds[pid], number)
        except ProcessLookupError:
            continue  # it has ended by itself
        except OSError as error:
            refused[pid] = f"{number.name}: {error.strerror}"
    return refused


def wait_for_ends(pidfds: Mapping[Pid, int], pids: Collection[Pid], deadline: float) -> set[Pid]:
    """Wait until all of `pids` have ended or `deadline` (monotonic seconds) is past. Returns those that have not."""
    by_descriptor = {pidfds[pid]: pid for pid in pids}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    while by_descriptor:
        remaining_s = deadline - time.monotonic()
        ended = poll.poll(max(remaining_s, 0) * 1000)
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            del by_descriptor[descriptor]
        if not ended and remaining_s <= 0:
            break
    return set(by_descriptor.values())


def _of(wanted: Mapping[Pid, Manner], manner: Manner) -> set[Pid]:
    return {pid for pid, its in wanted.items() if its is manner}


def _earlier(deadline: float, wait_s: float) -> float:
    return min(deadline, time.monotonic() + wait_s)


def _front_ends(survey: Survey, pids: set[Pid]) -> set[Pid]:
    """Those at the top: what stands below another one leaves with it."""
    return {pid for pid in pids if survey.cases[pid].process.ppid not in pids}


def _end_trackers(survey: Survey, trackers: set[Pid], deadline: float) -> set[Pid]:
    """Let trackers do their work; one that outlives its family, and serves nobody else, is ended. Returns who lives on."""
    send(survey, trackers, signal.SIGCONT)
    late = wait_for_ends(survey.pidfds, trackers, _earlier(deadline, TRACKER_WAIT_S))
    idle = {pid for pid in late if not _serves_anyone(survey, pid)}
    send(survey, idle, signal.SIGKILL)
    return (late - idle) | wait_for_ends(survey.pidfds, idle, _earlier(deadline, KILL_WAIT_S))


def _serves_anyone(survey: Survey, tracker: Pid) -> bool:
    """Whether any other process still holds the pipe on which this tracker waits, or might."""
    descriptor = roles.tracker_descriptor(survey.cases[tracker].process)
    end_of_pipe = (procfs.pipes(tracker) or {}).get(descriptor) if descriptor is not None else None
    if end_of_pipe is None:
        return False
    return any(_may_hold(pid, end_of_pipe[0]) for pid in procfs.list_pids() if pid not in {tracker, os.getpid()})


def _may_hold(pid: Pid, inode: int) -> bool:
    held = procfs.pipes(pid)
    if held is None:
        return procfs.read_stat(pid) is not None and pid != 1
    return any(its == inode for its, _ in held.values())


def _fate(survey: Survey, pid: Pid, alive: set[Pid], refused: Mapping[Pid, str], deadline: float) -> Fate:
    if why := refused.get(pid):
        return Fate(
            outcome=Outcome.NOT_ENDED, message=f"{_label(survey, pid)}: cannot signal: {why}; run as root on the host"
        )
    if pid not in alive:
        return Fate(outcome=Outcome.ENDED)
    return _classify(survey, pid, deadline)


def _classify(survey: Survey, pid: Pid, deadline: float) -> Fate:
    """Why a process that got SIGKILL is still there."""
    label, stat = _label(survey, pid), procfs.read_stat(pid)
    if stat is None:
        return Fate(outcome=Outcome.ENDED)
    waited = "the time allowed was over" if time.monotonic() >= deadline else f"{KILL_WAIT_S:g} s had passed"
    if survey.judgements[pid].manner is Manner.SPARED:
        message = f"{label}: cannot end: a resource tracker that still serves a living process; end that one first"
        return Fate(outcome=Outcome.NOT_ENDED, message=message)
    if stat.state == "D":
        where = procfs.wait_channel(pid) or "an unknown place"
        message = f"{label}: cannot kill: in D state, waiting in {where}, when {waited}; reboot the node if it stays"
        return Fate(outcome=Outcome.UNINTERRUPTIBLE, message=message)
    message = f"{label}: cannot kill: in state {stat.state} inside the kernel when {waited}; reboot the node"
    return Fate(outcome=Outcome.UNKILLABLE, message=message)


def _label(survey: Survey, pid: Pid) -> str:
    case = survey.cases[pid]
    return f"pid {pid} ({case.process.title[:60]}, {case.owner})"
