"""(f) On a real GPU: the whole reset of a leaked server, against the shell line and the driver's own teardown."""

import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pynvml

import figures
import gpus
import leak

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
WORKERS, GIB_EACH = 2, 20
RESET = [sys.executable, "-m", "cleanslate", "reset", "--shm-min-age", "0", "--output", "json"]
ROUNDS = 5
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
OWN_SHM = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec bash bench/shell_line.sh"


def used_bytes() -> int:
    """Used memory of all GPUs together, by memory info v2."""
    total = 0
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        total += pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
    return total


@contextlib.contextmanager
def driver() -> Iterator[None]:
    """NVML for the length of a block, so that the benchmark itself holds no GPU while the program looks."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def leaked(gpu_count: int) -> leak.Leak:
    """A server whose front end has just died."""
    server = leak.Leak(WORKERS, GIB_EACH * gpus.GIB, gpu_count)
    server.kill_front_end()
    return server


def check_gone(idle_bytes: int) -> None:
    """Both ways must have done the work."""
    with driver():
        left = used_bytes() - idle_bytes
    if left > 0 or [name for name in os.listdir("/dev/shm") if name.startswith("psm_")]:
        raise RuntimeError(f"reset: {left} bytes of GPU memory or shared memory are left")


def by_reset(gpu_count: int, idle_bytes: int) -> float:
    """The program, from start to exit."""
    with leaked(gpu_count):
        elapsed_s, said = figures.timed(RESET)
        check_gone(idle_bytes)
    print(f"reset: {elapsed_s:.3f} s, timings {json.loads(said)['timings']}", file=sys.stderr)
    return elapsed_s


def by_shell_line(gpu_count: int) -> float:
    """The shell line, in namespaces of its own: see shell_line.sh."""
    python3 = pathlib.Path(sys.executable).with_name("python3")  # by this name it meets the line's pattern
    settings = {
        "BENCH_PYTHON": str(python3 if python3.exists() else sys.executable),
        "BENCH_SERVER": " ".join([leak.SERVER, str(WORKERS), str(GIB_EACH * gpus.GIB), str(gpu_count)]),
        "BENCH_SOURCES": str(ROOT / "initcontainer"),
    }
    said = subprocess.run(
        [*NAMESPACE, "sh", "-c", OWN_SHM],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return float(said)


def by_driver(gpu_count: int, idle_bytes: int) -> float:
    """SIGKILL to all of the leak at once, and the time until the driver has freed the memory."""
    with leaked(gpu_count) as server:
        with driver():
            begun = time.perf_counter()
            server.kill_the_rest()
            while used_bytes() > idle_bytes:
                select.select([], [], [], 0.001)
            elapsed_s = time.perf_counter() - begun
        await_unlinked(server.segment)
    return elapsed_s


def await_unlinked(segment: str) -> None:
    """The resource tracker lives on and unlinks. Raises RuntimeError after 10 s."""
    deadline = time.monotonic() + 10
    while os.path.exists(f"/dev/shm/{segment}"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"/dev/shm/{segment}: still there 10 s after its users' end")
        select.select([], [], [], 0.01)


def main() -> int:
    """Needs idle GPUs, and a machine on which every leftover is the benchmark's own."""
    with driver():
        gpu_count, idle_bytes = pynvml.nvmlDeviceGetCount(), used_bytes()
    ours, line, teardown = figures.side_by_side(
        lambda: by_reset(gpu_count, idle_bytes),
        lambda: by_shell_line(gpu_count),
        lambda: by_driver(gpu_count, idle_bytes),
        rounds=ROUNDS,
    )
    what = f"whole reset of a leaked {WORKERS}-worker tree, {GIB_EACH} GiB each, on {min(gpu_count, WORKERS)} GPU(s)"
    figures.faster(what, ours, "the shell line", line, times=8).emit()
    median_s = sorted(teardown)[len(teardown) // 2]
    note = f"driver teardown (SIGKILL to memory 0) {figures.spread(teardown)}, plus 250 ms"
    figures.within(what, ours, limit_s=median_s + 0.25, note=note).emit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
