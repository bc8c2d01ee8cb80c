"""Waiting for GPUs to be clean: readings one after the other until enough of them agree, or a deadline.

NVML has no event for memory, so it is read at short intervals, the only sleep of the program: on H200s memory was back
0.26-0.40 s after SIGKILL, and one reading costs 0.05 ms a GPU.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cleanslate import termination
from cleanslate.gpus import GpuResult, GpuVerdict
from cleanslate.nvml import NVML_DEADLINE_S, Nvml, Reading

READ_INTERVAL_S = 0.01
LONGEST_INTERVAL_S = 0.25
CONFIRM_INTERVAL_S = 0.005  # once a reading passes, the rest of the row comes sooner
SESSION_S = 1.0  # a session of NVML remembers GPUs that are lost since, so none is kept longer
_ENOUGH = frozenset({GpuResult.CLEAN, GpuResult.BUSY})

Judge = Callable[[Reading], Sequence[GpuVerdict]]


class Settled(NamedTuple):
    """The last reading and its verdicts. `clean`: enough readings in a row passed."""

    reading: Reading
    verdicts: tuple[GpuVerdict, ...]
    clean: bool


class Patience(NamedTuple):
    """How long to wait, for how many readings in a row, and for which results there is hope.

    `until`: monotonic seconds. `hopeful(verdicts)`: whether waiting on may change them. `passing`: results that pass.
    """

    until: float
    stable_reads: int
    hopeful: Callable[[Sequence[GpuVerdict]], bool]
    passing: frozenset[GpuResult] = _ENOUGH


def settle(nvml: Nvml, judge: Judge, patience: Patience, tell: Callable[[Settled], None] = lambda _: None) -> Settled:
    """Read until `stable_reads` readings in a row pass, hope ends, or time does. `tell` hears of every reading.

    Blocks at most until `patience.until` and what the kernel takes to kill a silent child.
    """
    row, opened_at = 0, -SESSION_S
    last: Settled | None = None
    while True:
        termination.check()
        begun = time.monotonic()
        fresh = begun - opened_at >= SESSION_S
        opened_at = begun if fresh else opened_at
        now = _look(nvml, judge, patience, reopen=fresh)
        if last and now.reading.silent and time.monotonic() >= patience.until:
            return last._replace(clean=False)  # cut short by the end of our time, not by the driver's silence
        row = row + 1 if passes(now, patience.passing) else 0
        opened_at = -SESSION_S if now.reading.failure else opened_at
        last = now._replace(clean=row >= patience.stable_reads)
        tell(last)
        if last.clean or not (row or patience.hopeful(last.verdicts)) or time.monotonic() >= patience.until:
            return last
        regular = not fresh or now.reading.failure is not None
        time.sleep(_interval_s(row, time.monotonic() - begun if regular else 0.0))


def _interval_s(row: int, took_s: float) -> float:
    """How long to wait after a reading that took so long: waiting is to cost a fifth of a core at most."""
    return CONFIRM_INTERVAL_S if row else min(max(READ_INTERVAL_S, 4 * took_s), LONGEST_INTERVAL_S)


def passes(settled: Settled, passing: frozenset[GpuResult]) -> bool:
    """Whether one reading passes: it exists, shows at least one GPU, and every GPU passes."""
    verdicts = settled.verdicts
    return settled.reading.failure is None and bool(verdicts) and all(v.result in passing for v in verdicts)


def _look(nvml: Nvml, judge: Judge, patience: Patience, *, reopen: bool) -> Settled:
    remaining_s = max(patience.until - time.monotonic(), 0.05)
    reading = nvml.read(reopen=reopen, deadline_s=min(NVML_DEADLINE_S, remaining_s))
    return Settled(reading=reading, verdicts=tuple(judge(reading)), clean=False)
