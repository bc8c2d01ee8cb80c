"""(c) A gate on a clean GPU, (d) a gate whose GPU becomes clean, (e) the memory of a gate that waits."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

import figures
import gpus

GATE = [sys.executable, "-m", "cleanslate", "gate"]
ONE_READ = [*GATE, "--stable-reads", "1"]
BARE = [sys.executable, "-c", "pass"]
INIT = f"""
import ctypes, time
begun = time.perf_counter()
code = ctypes.CDLL({gpus.library()!r}).nvmlInit_v2()
print(code, time.perf_counter() - begun)
"""
WAIT_ROUNDS = 11
LIMIT_MB = 25
MB = 1_000_000


def bare_python_and_init() -> float:
    """An interpreter that does nothing, plus the driver's own initialization, each measured here."""
    bare_s, _ = figures.timed(BARE)
    _, said = figures.timed([sys.executable, "-c", INIT])
    code, init_s = said.split()
    if code != "0":
        raise RuntimeError(f"nvmlInit: cannot start: NVML code {code}")
    return bare_s + float(init_s)


def children(pid: int) -> list[int]:
    """A process's children, and theirs."""
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        direct = [int(child) for child in listed.read().split()]
    return direct + [pid for child in direct for pid in children(child)]


def await_waiting(gate: "subprocess.Popen[bytes]") -> None:
    """Returns at a random moment of a gate's waiting, half a second after its start or later."""
    # The moment must not be in step with the gate's reads, so it is drawn; nothing is awaited by it.
    if select.select([os.pidfd_open(gate.pid)], [], [], random.uniform(0.8, 1.1))[0]:
        raise RuntimeError("gate: has not waited: the GPU is not held")


def from_clean_to_exit() -> float:
    """Kills the holder of a GPU that a gate waits for; seconds from the holder's end to the gate's."""
    with gpus.holding(0, gpus.GIB) as holder:
        descriptor = os.pidfd_open(holder.pid)
        with subprocess.Popen(GATE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as gate:
            await_waiting(gate)
            holder.send_signal(signal.SIGKILL)
            select.select([descriptor], [], [])
            dead = time.perf_counter()
            gate.wait()
            elapsed_s = time.perf_counter() - dead
        os.close(descriptor)
    if gate.returncode != 0:
        raise RuntimeError(f"gate: exit {gate.returncode} after the holder's end")
    return elapsed_s


def memory_kb(pid: int) -> tuple[int, int]:
    """Resident and proportional memory of a process, from smaps_rollup."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        rows = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
    return int(rows["Rss"]), int(rows["Pss"])


def waiting_memory() -> list[tuple[int, int]]:
    """Resident and proportional memory, in kB, of each process of a gate that waits."""
    with (
        gpus.holding(0, gpus.GIB),
        subprocess.Popen(GATE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as gate,
    ):
        await_waiting(gate)
        taken = [memory_kb(pid) for pid in (gate.pid, *children(gate.pid))]
        gate.kill()
    return taken


def megabytes(kilobytes: Iterable[int]) -> float:
    """In MB, of a million bytes."""
    return sum(kilobytes) * 1024 / MB


def memory_figures() -> None:
    """The median gate of five, by the sum of its proportional memory."""
    gates = sorted((waiting_memory() for _ in range(5)), key=lambda gate: sum(pss for _, pss in gate))
    median = gates[len(gates) // 2]
    together = megabytes(pss for _, pss in median)
    largest = megabytes([max(rss for rss, _ in median)])
    parts = ", ".join(f"RSS {megabytes([rss]):.1f} PSS {megabytes([pss]):.1f}" for rss, pss in median)
    figures.Figure(
        what="resident memory of a waiting gate, all its processes (sum of PSS)",
        ours=f"{together:.1f} MB",
        goal=f"<= {LIMIT_MB} MB",
        met=together <= LIMIT_MB,
        note=f"{len(median)} processes: {parts} MB",
    ).emit()
    figures.Figure(
        what="the largest process of a waiting gate (RSS)",
        ours=f"{largest:.1f} MB",
        goal=f"<= {LIMIT_MB} MB",
        met=largest <= LIMIT_MB,
    ).emit()


def main() -> int:
    """All three figures. GPU 0 must be free."""
    ours, theirs = figures.side_by_side(lambda: figures.timed(ONE_READ)[0], bare_python_and_init, rounds=11)
    against = "python3 -c pass + nvmlInit"
    figures.at_most_times("gate on a clean GPU, from start to exit, one read", ours, against, theirs, times=1.5).emit()
    waits = [from_clean_to_exit() for _ in range(WAIT_ROUNDS)]
    note = f"{WAIT_ROUNDS} rounds, default reads; from the end of the holder, as its pidfd tells"
    figures.within("gate: from memory 0 to exit", waits, limit_s=0.060, note=note).emit()
    memory_figures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
