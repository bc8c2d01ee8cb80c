"""A server in the shape of vLLM's: a front end, an engine and its workers, shared memory, memory on GPUs.

`server.py WORKERS BYTES GPUS` prints one JSON line when it serves: pids and the name of its shared memory. The engine
does not notice its front end's death, which is the leak that Clean Slate is about. The demonstration and the benchmark
of a whole reset use it; the tests have a richer one.
"""

import ctypes
import json
import multiprocessing
import os
import pathlib
import signal
import sys
from multiprocessing import connection, shared_memory

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

import gpus

SEGMENT_BYTES = 16 << 20
LIFETIME_S = 300  # a leak that nobody ended ends by itself
PR_SET_NAME = 15  # linux/prctl.h


def call_oneself(title: str) -> None:
    """Sets the process title as vLLM does, or where setproctitle is not installed at least comm: 15 characters."""
    signal.alarm(LIFETIME_S)
    try:
        import setproctitle
    except ImportError:
        ctypes.CDLL(None).prctl(PR_SET_NAME, title.encode(), 0, 0, 0)
    else:
        setproctitle.setproctitle(title)


def work(ready: connection.Connection, rank: int, gpu: int, size_bytes: int, segment: str) -> None:
    """A worker: maps the engine's segment, holds GPU memory, and waits for work that never comes."""
    call_oneself(f"VLLM::Worker_TP{rank}")
    mapped = shared_memory.SharedMemory(name=segment)
    held = gpus.hold(gpu, size_bytes)
    ready.send({"pid": os.getpid(), "gpu": gpu, "bytes": size_bytes})
    signal.pause()
    del mapped, held


def run_engine(ready: connection.Connection, workers: int, size_bytes: int, gpu_count: int) -> None:
    """The engine: makes the shared memory and the workers, and outlives its front end."""
    call_oneself("VLLM::EngineCore")
    spawn = multiprocessing.get_context("spawn")
    segment = shared_memory.SharedMemory(create=True, size=SEGMENT_BYTES)
    segment.buf[:SEGMENT_BYTES] = bytes(SEGMENT_BYTES)
    told, tell = spawn.Pipe(duplex=False)
    for rank in range(workers):
        spawn.Process(target=work, args=(tell, rank, rank % gpu_count, size_bytes, segment.name)).start()
    started = [told.recv() for _ in range(workers)]
    ready.send({"engine": os.getpid(), "workers": [worker["pid"] for worker in started], "segment": segment.name})
    signal.pause()


def main() -> None:
    """The front end."""
    workers, size_bytes, gpu_count = (int(word) for word in sys.argv[1:4])
    spawn = multiprocessing.get_context("spawn")
    told, tell = spawn.Pipe(duplex=False)
    spawn.Process(target=run_engine, args=(tell, workers, size_bytes, gpu_count)).start()
    print(json.dumps({"front_end": os.getpid(), **told.recv()}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
