"""(a) Who holds the GPUs, among 3,000 processes of 30 descriptors each: `cleanslate inspect` against `fuser`."""

import contextlib
import json
import shutil
import sys

import crowd
import figures
import gpus

PROCESSES, DESCRIPTORS, MAPPINGS = 3000, 30, 10
INSPECT = [sys.executable, "-m", "cleanslate", "inspect", "--output", "json"]
FUSER = ["sh", "-c", "exec fuser /dev/nvidia*"]
ANY_RESULT = frozenset({0, 3})


def holders_by_fuser() -> set[int]:
    """The pids that fuser names."""
    _, said = figures.timed(FUSER)
    return {int(word) for word in said.split()}


def holders_by_inspect() -> set[int]:
    """The pids that hold a GPU in the report."""
    _, said = figures.timed(INSPECT, codes=ANY_RESULT)
    return {process["pid"] for process in json.loads(said)["processes"] if process["gpus"]}


def compare() -> None:
    """Measures both, in turn, and checks first that they find the same processes."""
    if holders_by_fuser() != holders_by_inspect():
        raise RuntimeError(f"survey: fuser finds {holders_by_fuser()}, inspect {holders_by_inspect()}")
    surveys: list[float] = []

    def inspect() -> float:
        elapsed_s, said = figures.timed(INSPECT, codes=ANY_RESULT)
        surveys.append(json.loads(said)["timings"]["survey"])
        return elapsed_s

    whole, theirs = figures.side_by_side(inspect, lambda: figures.timed(FUSER)[0])
    crowd_of = f"{PROCESSES} processes x {DESCRIPTORS} descriptors"
    figures.faster(
        f"survey of {crowd_of}",
        surveys[1:],  # the first is the warm-up
        "fuser /dev/nvidia*",
        theirs,
        times=3,
        note="the report's timings.survey: processes, owners, verdicts, shared memory, GPUs",
    ).emit()
    note = "the interpreter's start, the other looks and the report with it"
    figures.Figure(what=f"the whole `inspect` of {crowd_of}", ours=figures.spread(whole), note=note).emit()


def main() -> int:
    """Runs in a machine of its own, with two processes that hold a GPU each."""
    if shutil.which("fuser") is None:
        print("survey: fuser is not installed; run: apt-get install psmisc", file=sys.stderr)
        return 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(crowd.crowd(PROCESSES, descriptors=DESCRIPTORS, mappings=MAPPINGS))
        for gpu in (0, 0):
            stack.enter_context(gpus.holding(gpu, gpus.GIB))
        compare()
    return 0


if __name__ == "__main__":
    sys.exit(main())
