"""An LLM server in all but the model: the processes, titles, pipes and shared memory of vLLM 0.32 and of SGLang 0.5.

Front end, engine (`VLLM::EngineCore`) and workers (`VLLM::Worker_TP0`) by Python's multiprocessing, one resource tracker for all,
`psm_*` made by the engine and mapped by the workers, `sem.mp-*` of the spawn context, a `nccl-*` file. As in the real one, the
engine does not notice the front end's death, a worker notices its engine's, and SIGTERM to the front end ends all in order.
Prints one line of JSON with the pids (of its PID namespace) and the names when it is up. In a pod, without `--workers`, it
takes the GPUs that NVIDIA_VISIBLE_DEVICES names.
"""

import argparse
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import setproctitle

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gpusim import holder

SEGMENT_BYTES = 1 << 20
SEGMENTS = 2
POD_DRIVER = "/usr/local/nvidia/lib64"
TITLES = {
    "vllm": ("VLLM::EngineCore", "VLLM::Worker_TP{}"),
    "sglang": ("sglang::detokenizer", "sglang::scheduler_TP{}"),
    "untitled": (None, None),  # setproctitle is optional: the command line is multiprocessing's own
}


class StoppedError(Exception):
    """SIGTERM came."""


def main() -> None:
    """The front end, whose title is left alone."""
    options = _parse()
    processes = multiprocessing.get_context(options.method)
    resource_tracker.ensure_running()
    semaphores = [multiprocessing.get_context("spawn").Semaphore() for _ in range(SEGMENTS)]
    signal.signal(signal.SIGTERM, _stop)
    ours, theirs = processes.Pipe()
    engine = processes.Process(target=run_engine, args=(options, theirs, semaphores))
    engine.start()
    theirs.close()
    told = ours.recv()
    try:
        _report(told, engine.pid, semaphores)
        engine.join()
    except StoppedError:
        engine.terminate()
        engine.join()


def run_engine(options: argparse.Namespace, front_end: Any, semaphores: list[Any]) -> None:
    """The engine: makes the segments, starts the workers, and waits for SIGTERM alone."""
    signal.signal(signal.SIGTERM, _stop)
    parent = os.getppid()
    _set_title(options, 0)
    segments = [shared_memory.SharedMemory(create=True, size=SEGMENT_BYTES) for _ in range(SEGMENTS)]
    for segment in segments:
        segment.buf[:] = b"\1" * SEGMENT_BYTES
    try:
        held = None if options.workers else _hold(options, 0)
        workers = [_start_worker(options, rank, segments, semaphores) for rank in range(options.workers)]
        names = [segment.name for segment in segments] + [name for *_, told in workers for name in told]
        front_end.send({"workers": [process.pid for process, *_ in workers], "names": names})
        while True:
            signal.pause()
    except StoppedError:
        if os.getppid() != parent:
            threading.Event().wait(options.orphan_patience_s)  # as vLLM: waits for a front end that is gone
    _stop_workers(workers)
    del held
    for segment in segments:
        segment.close()
        segment.unlink()


def _start_worker(options: argparse.Namespace, rank: int, segments: list[Any], semaphores: list[Any]) -> tuple:
    """The worker's process, our end of its death pipe, and the names it made."""
    processes = multiprocessing.get_context(options.method)
    death, ours = processes.Pipe(duplex=False)
    told, tell = processes.Pipe(duplex=False)
    arguments = (options, rank, [segment.name for segment in segments], semaphores, death, tell, ours)
    process = processes.Process(target=run_worker, args=arguments[: 6 if options.method == "spawn" else 7])
    process.start()
    death.close()
    tell.close()
    return process, ours, told.recv()


def run_worker(
    options: argparse.Namespace,
    rank: int,
    names: list[str],
    semaphores: list[Any],
    death: Any,
    tell: Any,
    inherited: Any = None,
) -> None:
    """A worker: maps the segments, holds its GPU, and ends when its engine's end of the death pipe closes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignore_term else signal.SIG_DFL)
    if inherited:
        inherited.close()  # of a forked child: the engine's own end, which would keep the pipe open for ever
    _set_title(options, rank + 1)
    segments = [shared_memory.SharedMemory(name) for name in names]
    held = _hold(options, rank)
    made = _make_nccl_file() if rank == 0 else None
    tell.send([os.path.basename(made[0])] if made else [])
    multiprocessing.connection.wait([death])
    del held
    for segment in segments:
        segment.close()
    if made:
        os.unlink(made[0])


def _stop_workers(workers: list[tuple]) -> None:
    for _, death, _ in workers:
        death.close()
    for process, *_ in workers:
        process.join()


def _hold(options: argparse.Namespace, rank: int) -> Any:
    if rank >= len(options.gpu):
        return None
    return holder.hold(Path(options.driver), Path("/dev"), {_gpu(options.gpu[rank]): options.gpu_bytes})


def _gpu(name: str) -> int | str:
    """As the driver's list is asked: by place or by UUID."""
    return int(name) if name.isdecimal() else name


def _visible_gpus(driver: str) -> list[str]:
    """The GPUs that NVIDIA's runtime gave this container; unset, empty, "void" and "none" are no GPUs."""
    named = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if named in {"", "void", "none"}:
        return []
    if named == "all":
        return [gpu["uuid"] for gpu in json.loads(Path(driver, holder.STATE).read_text())["gpus"]]
    return named.split(",")


def _make_nccl_file() -> tuple[str, mmap.mmap]:
    descriptor, path = tempfile.mkstemp(prefix="nccl-", dir="/dev/shm")
    os.ftruncate(descriptor, SEGMENT_BYTES)
    memory = mmap.mmap(descriptor, SEGMENT_BYTES)
    os.close(descriptor)
    return path, memory


def _set_title(options: argparse.Namespace, number: int) -> None:
    engine, worker = TITLES[options.titles]
    if engine:
        setproctitle.setproctitle(worker.format(number - 1) if number else engine)


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StoppedError


def _report(told: dict[str, Any], engine: int | None, semaphores: list[Any]) -> None:
    names = told["names"] + ["sem." + semaphore._semlock.name.lstrip("/") for semaphore in semaphores]
    tracker = resource_tracker._resource_tracker._pid
    told |= {"front_end": os.getpid(), "engine": engine, "tracker": tracker, "names": names}
    print(json.dumps(told), flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--method", choices=["fork", "spawn"], default="spawn")
    parser.add_argument(
        "--workers", type=int, help="0: the engine works itself, as with one GPU (default: one for each GPU)"
    )
    parser.add_argument("--titles", choices=sorted(TITLES), default="vllm")
    parser.add_argument("--driver", default=POD_DRIVER)
    parser.add_argument("--gpu", action="append", metavar="INDEX|UUID", default=[], help="the GPU of the next worker")
    parser.add_argument("--gpu-bytes", type=int, default=1 << 30)
    parser.add_argument("--ignore-term", action="store_true", help="workers ignore SIGTERM")
    parser.add_argument("--orphan-patience-s", type=float, default=10.0)
    options = parser.parse_args()
    if options.workers is None:
        options.gpu = options.gpu or _visible_gpus(options.driver)
        options.workers = len(options.gpu) if len(options.gpu) > 1 else 0
    return options


if __name__ == "__main__":
    main()
