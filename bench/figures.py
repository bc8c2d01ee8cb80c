"""One line of the benchmark's table, and how it is measured: interleaved rounds, medians, ratios."""

import dataclasses
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROUNDS = 7  # odd, so that the median is one that was measured; at least 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured line. `ours` and `theirs` are medians with their unit; `met` is None where no goal is set."""

    what: str
    ours: str
    against: str = "-"
    theirs: str = "-"
    ratio: str = "-"
    goal: str = "-"
    met: bool | None = None
    note: str = ""

    def emit(self) -> None:
        """One JSON line on standard output, where run.py reads it."""
        print(json.dumps(dataclasses.asdict(self)), flush=True)


def milliseconds(seconds: float) -> str:
    """For the table: `12.3 ms`."""
    return f"{seconds * 1000:.1f} ms"


def spread(seconds: Sequence[float]) -> str:
    """The median with the range it comes from: `12.3 ms (11.9-14.0)`."""
    low, high = min(seconds) * 1000, max(seconds) * 1000
    return f"{milliseconds(statistics.median(seconds))} ({low:.1f}-{high:.1f})"


def faster(
    what: str, ours_s: Sequence[float], against: str, theirs_s: Sequence[float], *, times: float, note: str = ""
) -> Figure:
    """How many times faster, against a goal of at least `times`."""
    ratio = statistics.median(theirs_s) / statistics.median(ours_s)
    return Figure(
        what=what,
        ours=spread(ours_s),
        against=against,
        theirs=spread(theirs_s),
        ratio=f"{ratio:.1f} x faster",
        goal=f">= {times:g} x",
        met=ratio >= times,
        note=note,
    )


def at_most_times(
    what: str, ours_s: Sequence[float], against: str, theirs_s: Sequence[float], *, times: float, note: str = ""
) -> Figure:
    """How many times as long, against a goal of at most `times`."""
    ratio = statistics.median(ours_s) / statistics.median(theirs_s)
    return Figure(
        what=what,
        ours=spread(ours_s),
        against=against,
        theirs=spread(theirs_s),
        ratio=f"{ratio:.2f} x as long",
        goal=f"<= {times:g} x",
        met=ratio <= times,
        note=note,
    )


def within(what: str, ours_s: Sequence[float], *, limit_s: float, note: str = "") -> Figure:
    """A time against a limit."""
    median = statistics.median(ours_s)
    return Figure(what=what, ours=spread(ours_s), goal=f"<= {milliseconds(limit_s)}", met=median <= limit_s, note=note)


def timed(argv: Sequence[str], *, codes: frozenset[int] = frozenset({0})) -> tuple[float, str]:
    """Seconds from a program's start to its exit, and what it printed. Raises RuntimeError for another exit code."""
    begun = time.perf_counter()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    elapsed_s = time.perf_counter() - begun
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    return elapsed_s, done.stdout


def side_by_side(*measurements: Callable[[], float], rounds: int = ROUNDS) -> list[list[float]]:
    """Runs the measurements in turn, one warm-up round and then `rounds` that count; returns the seconds of each."""
    for measure in measurements:
        measure()
    taken = [[measure() for measure in measurements] for _ in range(rounds)]
    return [list(column) for column in zip(*taken, strict=True)]
