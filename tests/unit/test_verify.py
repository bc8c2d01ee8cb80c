"""Waiting for readings to settle: how many in a row, for how long, and at what cost."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cleanslate import verify
from cleanslate.gpus import GpuResult, GpuVerdict
from cleanslate.nvml import GpuReading, Reading
from cleanslate.verify import Patience

CLEAN, DIRTY, BUSY = GpuResult.CLEAN, GpuResult.RESIDUAL, GpuResult.BUSY
GPU = GpuReading(index=0)


class Nvml:
    """A driver that shows one GPU in each state given, the last one for ever; each reading takes `took_s`."""

    def __init__(self, *states: GpuResult | None, took_s: float = 0.0) -> None:
        self._states: Iterator[GpuResult | None] = iter(states)
        self._now = states[0]
        self._took_s = took_s
        self.reopened: list[bool] = []

    def read(self, *, reopen: bool, deadline_s: float) -> Reading:
        self._now = next(self._states, self._now)
        self.reopened.append(reopen)
        time.sleep(min(self._took_s, deadline_s))
        silent = self._took_s > deadline_s
        return Reading(failure="no answer" if silent or self._now is None else None, silent=silent, gpus=(GPU,))

    def judge(self, reading: Reading) -> Sequence[GpuVerdict]:
        if reading.failure or self._now is None:
            return ()
        return (GpuVerdict(reading=GPU, tolerance_bytes=0, result=self._now, message=""),)


def settle(
    nvml: Any, *, within_s: float = 5.0, stable_reads: int = 3, hopeful: bool = True, **more: Any
) -> verify.Settled:
    patience = Patience(until=time.monotonic() + within_s, stable_reads=stable_reads, hopeful=lambda _: hopeful, **more)
    return verify.settle(nvml, nvml.judge, patience)


def test_as_many_clean_readings_in_a_row_as_asked_for() -> None:
    """A flicker starts the row anew."""
    nvml = Nvml(CLEAN, CLEAN, DIRTY, CLEAN, CLEAN, CLEAN)
    assert settle(nvml).clean
    assert len(nvml.reopened) == 6


def test_what_gives_no_hope_is_not_waited_for() -> None:
    """One reading is enough where waiting can change nothing."""
    nvml = Nvml(DIRTY)
    assert not settle(nvml, hopeful=False).clean
    assert len(nvml.reopened) == 1


def test_a_row_that_began_is_finished_without_hope_too() -> None:
    """Hope is for what does not pass."""
    assert settle(Nvml(CLEAN), hopeful=False).clean


def test_time_ends_a_wait_without_a_pass() -> None:
    """Neither a dirty GPU nor an unfinished row is clean at the deadline."""
    assert not settle(Nvml(DIRTY), within_s=0.05).clean
    assert not settle(Nvml(CLEAN), within_s=0.05, stable_reads=1000).clean


@pytest.mark.parametrize("passing", [frozenset({CLEAN, BUSY}), frozenset({CLEAN})], ids=["reset", "gate"])
def test_a_busy_gpu_passes_a_reset_and_no_gate(passing: frozenset[GpuResult]) -> None:
    """What passes is the caller's word."""
    assert settle(Nvml(BUSY), within_s=0.1, passing=passing).clean is (BUSY in passing)


def test_no_gpu_and_no_answer_never_pass() -> None:
    """All of nothing is not clean."""
    assert not settle(Nvml(None), within_s=0.05).clean


def test_a_reading_cut_short_at_the_end_leaves_the_last_whole_one() -> None:
    """What was known is not lost to the deadline."""
    nvml = Nvml(DIRTY, took_s=0.15)
    settled = settle(nvml, within_s=0.4)
    assert (settled.reading.failure, settled.verdicts[0].result, settled.clean) == (None, DIRTY, False)


def test_the_session_is_opened_anew_every_second_and_after_a_failure() -> None:
    """An open session remembers GPUs that are lost since."""
    nvml = Nvml(DIRTY, DIRTY, None, DIRTY, DIRTY)
    settle(nvml, within_s=0.3)
    assert nvml.reopened[:5] == [True, False, False, True, False]
    longer = Nvml(DIRTY)
    settle(longer, within_s=1.3)
    assert longer.reopened.count(True) == 2


def test_waiting_costs_a_fifth_of_a_core_at_most_and_never_sleeps_long() -> None:
    """Slow readings come less often; a driver that does not answer is asked again soon enough."""
    nvml = Nvml(DIRTY, took_s=0.02)
    settle(nvml, within_s=0.6)
    assert len(nvml.reopened) <= 9
    assert max(verify._interval_s(0, took_s) for took_s in (0.0, 0.1, 15.0)) == verify.LONGEST_INTERVAL_S
    assert verify._interval_s(1, 15.0) == verify.CONFIRM_INTERVAL_S
