"""A server in vLLM's shape on a real GPU, with PyTorch: a front end, an engine, workers that hold memory, shared memory.

`leak.py GIB WORKERS GPUS` prints one JSON line when it serves. Titles are set as comm, as the kernel shows them where
setproctitle is not installed.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing import connection, shared_memory

PR_SET_NAME = 15
SEGMENT_BYTES = 64 << 20


def call_oneself(title: str) -> None:
    """Set comm; the kernel keeps 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, title.encode(), 0, 0, 0)


def work(ready: connection.Connection, rank: int, gpu: int, gibibytes: int, segment: str) -> None:
    """Hold memory on a GPU and a mapping of the engine's segment, for ever."""
    import torch

    call_oneself(f"VLLM::Worker_TP{rank}")
    mapped = shared_memory.SharedMemory(name=segment)
    held = torch.empty(gibibytes << 30, dtype=torch.uint8, device=f"cuda:{gpu}").fill_(1)
    torch.cuda.synchronize(gpu)
    ready.send(os.getpid())
    signal.pause()
    del held, mapped


def run_engine(ready: connection.Connection, gibibytes: int, workers: int, gpus: int) -> None:
    """Make the segment and the workers. SIGTERM ends them in order, as the front end asks for."""
    call_oneself("VLLM::EngineCore")
    spawn = multiprocessing.get_context("spawn")
    segment = shared_memory.SharedMemory(create=True, size=SEGMENT_BYTES)
    segment.buf[:SEGMENT_BYTES] = bytes(SEGMENT_BYTES)
    told, tell = spawn.Pipe(duplex=False)
    crew = [spawn.Process(target=work, args=(tell, r, r % gpus, gibibytes, segment.name)) for r in range(workers)]
    for worker in crew:
        worker.start()
    pids = [told.recv() for _ in crew]
    ready.send({"engine": os.getpid(), "workers": pids, "segment": segment.name})
    signal.sigwait({signal.SIGTERM})
    for worker in crew:
        worker.terminate()
    for worker in crew:
        worker.join()
    segment.unlink()
    os._exit(0)


def main() -> None:
    """The front end: starts the engine, says who is who, and ends it on SIGTERM."""
    gibibytes, workers, gpus = (int(word) for word in sys.argv[1:4])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    spawn = multiprocessing.get_context("spawn")
    told, tell = spawn.Pipe(duplex=False)
    engine = spawn.Process(target=run_engine, args=(tell, gibibytes, workers, gpus))
    engine.start()
    print(json.dumps({"frontEnd": os.getpid(), **told.recv()}), flush=True)
    signal.sigwait({signal.SIGTERM})
    engine.terminate()
    engine.join()


if __name__ == "__main__":
    main()
