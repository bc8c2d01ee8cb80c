"""The program against a real GPU: real leaks of 20 GiB and more, made with PyTorch, and nothing else on the machine.

Needs an NVIDIA driver and PyTorch. Refuses a GPU that somebody uses: these tests end processes, if only their own.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
LEAK = Path(__file__).with_name("leak.py")
GIB_EACH = 20
WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Server:
    """A shaped server's pids and the name of its segment."""

    front_end: int
    engine: int
    workers: tuple[int, ...]
    segment: str

    @property
    def all(self) -> tuple[int, ...]:
        return (self.front_end, self.engine, *self.workers)

    def kill_front_end(self) -> None:
        os.kill(self.front_end, signal.SIGKILL)
        await_end(self.front_end)


def cleanslate(verb: str, *arguments: str, timeout_s: float = 60) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "cleanslate", verb, "--output", "json", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def await_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        assert select.select([pidfd], [], [], 30)[0], f"pid {pid} lives on"
        os.close(pidfd)


@contextlib.contextmanager
def server(gibibytes: int = GIB_EACH, workers: int = WORKERS) -> Iterator[Server]:
    gpus = len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    argv = [sys.executable, str(LEAK), str(gibibytes), str(workers), str(gpus)]
    started = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    said = json.loads(started.stdout.readline())
    tree = Server(
        front_end=said["frontEnd"], engine=said["engine"], workers=tuple(said["workers"]), segment=said["segment"]
    )
    try:
        yield tree
    finally:
        for pid in tree.all:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await_end(pid)
        started.wait()
        Path("/dev/shm", tree.segment).unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def idle_gpus() -> None:
    """Nothing is tested on a GPU that somebody uses."""
    code, report = cleanslate("inspect")
    if code != 0 or any(gpu["result"] != "Clean" for gpu in report["gpus"]):
        pytest.exit(f"the GPUs are in use, or cannot be read: {report['message']}", returncode=3)


def rows(report: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {process["pid"]: process for process in report["processes"]}


def test_idle_gpus_read_zero_without_what_the_driver_reserves() -> None:
    """Reserved memory does not count as used: an idle GPU is clean, and v1's figure never was."""
    code, report = cleanslate("inspect", "--max-used-mib", "0")
    assert code == 0, report["message"]
    assert all(gpu["usedBytes"] == 0 and gpu["reservedBytes"] > 0 for gpu in report["gpus"])


def test_inspect_finds_engine_and_workers_and_changes_nothing() -> None:
    """A leaked server is named with its GPUs; inspect leaves it as it is."""
    with server() as leaked:
        leaked.kill_front_end()
        code, report = cleanslate("inspect")
        found = rows(report)
        assert code == 3
        assert all(found[pid]["verdict"] == "End" for pid in (leaked.engine, *leaked.workers))
        assert all(found[pid]["gpus"] for pid in leaked.workers)
        assert sum(gpu["usedBytes"] for gpu in report["gpus"]) >= WORKERS * GIB_EACH << 30
        assert all(alive(pid) for pid in (leaked.engine, *leaked.workers))


def test_reset_ends_the_leak_and_proves_the_gpus_clean() -> None:
    """Engine and workers end, the segment goes, every GPU reads zero."""
    with server() as leaked:
        leaked.kill_front_end()
        code, report = cleanslate("reset", "--max-used-mib", "0")
        print(f"reset: {report['durationSeconds']} s, {report['timings']}")
        assert code == 0, report["message"]
        assert not any(alive(pid) for pid in leaked.all)
        assert not Path("/dev/shm", leaked.segment).exists()
        assert all(gpu["result"] == "Clean" and gpu["usedBytes"] == 0 for gpu in report["gpus"])


def test_a_reset_pod_tells_how_much_it_freed_and_which_node_it_is(tmp_path: Path) -> None:
    """As an init container: exit 0 whatever the result, the rest in the termination message."""
    message = tmp_path / "termination-log"
    flags = ("--exit-zero", "--host-name", "gpu-17", "--termination-message", str(message))
    with server(4) as live, server() as leaked:
        leaked.kill_front_end()
        assert cleanslate("reset", *flags)[0] == 0
        summary = json.loads(message.read_text())
        assert (summary["host"], summary["result"], summary["exitCode"]) == ("gpu-17", "Clean", 0)
        assert summary["gpuBytesFreed"] >= WORKERS * GIB_EACH << 30
        assert {gpu["result"] for gpu in summary["gpus"]} == {"Busy"}
        assert all(alive(pid) for pid in live.all)
    with server() as held:
        assert cleanslate("reset", "--scope", "orphans", *flags)[0] == 0
        assert json.loads(message.read_text())["gpuBytesFreed"] == 0
        assert all(alive(pid) for pid in held.all)


def test_a_live_server_beside_a_dead_one_is_not_touched() -> None:
    """The dead server's processes end, the live one's do not, and its GPU is busy by name."""
    with server(4) as live, server() as leaked:
        leaked.kill_front_end()
        code, report = cleanslate("reset")
        assert code == 0, report["message"]
        assert not any(alive(pid) for pid in leaked.all)
        assert all(alive(pid) for pid in live.all)
        assert Path("/dev/shm", live.segment).exists()
        holders = {holder["pid"] for gpu in report["gpus"] if gpu["result"] == "Busy" for holder in gpu["holders"]}
        assert set(live.workers) <= holders


def test_scope_all_ends_a_live_server_by_its_front_end() -> None:
    """SIGTERM to the front end, and the tree leaves by itself: nothing is left."""
    with server() as live:
        code, report = cleanslate("reset", "--scope", "all")
        assert code == 0, report["message"]
        assert not any(alive(pid) for pid in live.all)
        assert not Path("/dev/shm", live.segment).exists()


def test_the_gate_opens_when_the_holder_dies_and_not_before() -> None:
    """While memory is in use the gate waits; from the holder's death to its exit is no time to speak of."""
    with server(workers=1) as live:
        argv = [sys.executable, "-m", "cleanslate", "gate", "--timeout", "60", "--output", "json"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as gate:
            assert gate.stderr is not None
            assert "waiting" in gate.stderr.readline()
            pidfds = [os.pidfd_open(pid) for pid in live.workers]
            for pid in (live.front_end, live.engine, *live.workers):
                os.kill(pid, signal.SIGKILL)
            assert select.select(pidfds, [], [], 30)[0]
            died = time.monotonic()
            assert gate.wait(timeout=30) == 0
            print(f"gate: {time.monotonic() - died:.3f} s from the holder's end to its exit")


def test_the_gate_gives_up_at_its_deadline() -> None:
    """Memory that stays gives exit 3 and names GPU and bytes."""
    with server(workers=1):
        code, report = cleanslate("gate", "--timeout", "1s")
        assert code == 3
        assert "MiB used" in report["message"]


def test_a_process_that_only_looks_is_a_monitor() -> None:
    """Something that has NVML open, as nvitop and exporters do, is kept and does not make a GPU dirty."""
    watcher = "import pynvml, sys; pynvml.nvmlInit(); pynvml.nvmlDeviceGetHandleByIndex(0); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", watcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as looking:
        assert looking.stdout is not None
        looking.stdout.readline()
        code, report = cleanslate("reset", "--scope", "all")
        assert code == 0, report["message"]
        assert rows(report)[looking.pid]["reason"] == "a monitor, which holds no GPU memory"
        assert alive(looking.pid)
        looking.kill()
