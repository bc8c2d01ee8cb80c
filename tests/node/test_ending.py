"""Ending holds against everything that happens meanwhile: reused pids, supervisors, storms, zombies, stuck processes, death."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from gpusim import gpusim
from node import servers
from node.eight_gpus import CLEAN, NOT_CLEAN, results, verdict
from node.machine import Machine
from node.result import Result
from node.running import Running

NOW = ("--timeout", "15s", "--shm-min-age", "0s")
WORKER = ("--title", "VLLM::Worker_TP0")
UNCOLLECTING = (
    sys.executable,
    "-c",
    "import signal, subprocess, sys; p = subprocess.Popen(sys.argv[1:]); signal.pause()",
)


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with two GPUs."""
    with Machine(gpus=gpusim.gpus(2)) as one:
        yield one


@contextlib.contextmanager
def paused_reset(machine: Machine, function: str, pid: int) -> Iterator[Running]:
    """A reset that stands before its first call of `function` about `pid`; `go` lets it go on."""
    machine.path("/run/paused").unlink(missing_ok=True)
    machine.path("/run/go").unlink(missing_ok=True)
    os.mkfifo(machine.path("/run/go"))
    with machine.python("paused.py", function, str(pid), "reset", "--output", "json", *NOW) as run:
        machine.wait_until(machine.path("/run/paused").exists, f"{function} about pid {pid}")
        yield run


def go(machine: Machine, run: Running) -> Result:
    """Lets a paused reset go on to its end."""
    machine.path("/run/go").write_text("go")
    return Result.of(run.completed())


@pytest.mark.parametrize("moment", ["os.pidfd_open", "signal.pidfd_send_signal"])
def test_a_reused_pid_is_never_signalled(machine: Machine, moment: str) -> None:
    """A newcomer under a leftover's pid survives, whether it came before or after the pid was pinned."""
    with (
        servers.role(machine, *WORKER, gpus=[0], under=servers.SHELL) as leftover,
        paused_reset(machine, moment, leftover) as run,
    ):
        machine.kill(leftover)
        machine.wait_until(lambda: machine.state(leftover) is None, "its parent collecting it")
        with machine.popen("sleep", "600", pid=leftover) as newcomer:
            assert newcomer.pid == leftover
            born = machine.start_ticks(newcomer.pid)
            assert verdict(go(machine, run)) == CLEAN
            assert machine.alive(newcomer.pid)
            assert machine.start_ticks(newcomer.pid) == born


def test_a_pid_reused_by_another_leftover_is_judged_anew(machine: Machine) -> None:
    """If the newcomer is a leftover too, it is ended as itself: a later round sees it."""
    with (
        servers.role(machine, *WORKER, gpus=[0], under=servers.SHELL, pid=4000) as first,
        paused_reset(machine, "signal.pidfd_send_signal", first) as run,
    ):
        machine.kill(first)
        machine.wait_until(lambda: not machine.with_title("role.py"), "the end of its shell too")
        with servers.role(machine, *WORKER, gpus=[1], under=servers.SHELL, pid=4000) as second:
            assert second == first
            assert verdict(go(machine, run)) == CLEAN
            assert not machine.alive(second)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("moment", ["pinned", "first worker", "second worker", "engine", "purge", "verified"])
def test_a_reset_that_was_killed_is_finished_by_the_next(machine: Machine, method: str, moment: str) -> None:
    """SIGKILL at any moment leaves nothing of the program, and running it again finishes the job."""
    machine.path("/dev/shm/psm_0badcafe").write_bytes(b"left over")
    with servers.leak(machine, method=method) as leaked:
        function, pid = {
            "pinned": ("os.pidfd_open", leaked.engine),
            "first worker": ("signal.pidfd_send_signal", leaked.workers[0]),
            "second worker": ("signal.pidfd_send_signal", leaked.workers[1]),
            "engine": ("signal.pidfd_send_signal", leaked.engine),
            "purge": ("os.unlink", 0),
            "verified": ("os.uname", 0),
        }[moment]
        with paused_reset(machine, function, pid) as run:
            run.kill()
            run.wait()
        machine.wait_until(lambda: not machine.with_title("paused.py"), "the end of its children")
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN, result.report
        assert not any(map(machine.alive, leaked.pids))
        assert machine.names() == set()


@pytest.mark.parametrize("first_of_a_container", [False, True], ids=["by hand", "in a pod"])
def test_a_reset_stops_at_sigterm_and_leaves_no_child(machine: Machine, first_of_a_container: bool) -> None:
    """SIGTERM ends a waiting reset at once and nothing of it stays, also where it is PID 1, to which SIGTERM means nothing."""
    machine.driver.update(0, residual_bytes=1 << 30)
    with machine.start_cleanslate("reset", "--timeout", "60s", container=first_of_a_container) as run:
        machine.wait_until(lambda: len(machine.with_title("-m cleanslate")) == 2, "the reader at work")
        run.kill(signal.SIGTERM)
        assert run.wait(5) in {143, -signal.SIGTERM}
    machine.wait_until(lambda: not machine.with_title("-m cleanslate"), "the end of its children")


def test_a_supervisor_that_respawns_its_worker_is_reported(machine: Machine) -> None:
    """Rounds are bounded: a worker that is there again at each look is named with what to end first; its supervisor lives."""
    loop = "while :; do (exec -a VLLM::Worker_TP0 sleep 600); done; true"
    with machine.popen("bash", "-c", loop) as supervisor:
        start = time.monotonic()
        with machine.python("overtaken.py", "VLLM::Worker", "reset", "--output", "json", *NOW) as run:
            result = Result.of(run.completed())
        assert time.monotonic() - start < 15
        assert verdict(result) == NOT_CLEAN
        ended = [one for one in result.report["processes"] if one["verdict"] == "End"]
        assert {one["outcome"] for one in ended} == {"Ended", "NotEnded"}
        assert any(f"end its parent {supervisor.pid} first" in warning for warning in result.report["warnings"])
        assert machine.alive(supervisor.pid)


def test_a_worker_that_comes_back_during_the_verification_is_not_clean(machine: Machine) -> None:
    """A reset does not call a node clean on which a leftover runs again when it ends."""
    loop = "while :; do (exec -a VLLM::Worker_TP0 sleep 600); done; true"
    with machine.popen("bash", "-c", loop):
        machine.wait_until(lambda: bool(machine.with_title("VLLM::Worker")), "the worker")
        assert verdict(machine.cleanslate("reset", *NOW)) == NOT_CLEAN
        assert machine.with_title("VLLM::Worker")


def test_a_fork_storm_is_ended(machine: Machine) -> None:
    """A worker that forks without a pause goes with all its children, within the bounded rounds."""
    with servers.role(machine, *WORKER, "--storm", "150", gpus=[0], under=servers.SHELL) as storm:
        machine.wait_until(lambda: len(machine.with_title("VLLM::Worker")) > 20, "the storm")
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN, result.report["warnings"]
        assert not machine.alive(storm)
        assert machine.with_title("VLLM::Worker") == set()


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(machine: Machine) -> None:
    """Live work has its grace period and no more."""
    with servers.role(machine, "--ignore-term", gpus=[0]) as stubborn:
        result = machine.cleanslate("reset", "--scope", "all", "--grace", "300ms", *NOW)
        assert verdict(result) == CLEAN, result.report
        assert result.outcomes(stubborn) == ["Ended"]
        assert result.report["timings"]["end"] >= 0.3


def test_a_zombie_is_named_with_its_parent_and_not_called_ended(machine: Machine) -> None:
    """A dead worker whose parent does not collect it holds nothing: it is named, and what to do about it."""
    with servers.role(machine, *WORKER, gpus=[0], under=UNCOLLECTING) as worker:
        parent = machine.parent(worker)
        machine.kill(worker)
        assert machine.state(worker) == "Z"
        for verb in ("inspect", "reset"):
            result = machine.cleanslate(verb)
            assert verdict(result) == CLEAN
            assert result.outcomes(worker) == ["Zombie"]
            assert any(f"zombie, its parent {parent}" in warning for warning in result.report["warnings"])


def test_what_becomes_a_zombie_is_called_one() -> None:
    """Leftovers ended under a PID 1 that collects nobody are dead but not gone, and the report says so."""
    with Machine(init="careless", gpus=gpusim.gpus(2)) as machine, servers.leak(machine) as leaked:
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN
        assert result.outcomes(*leaked.workers) == ["Zombie"] * 2 or result.outcomes(*leaked.workers) == ["Ended"] * 2
        assert result.outcomes(leaked.engine) == ["Zombie"]


def test_a_process_in_uninterruptible_sleep_is_classed(machine: Machine) -> None:
    """SIGKILL has to wait for it: it is named with its state and the next step, and the rest is ended."""
    if not machine.freezable():
        pytest.skip("needs the freezer of cgroup version 1 on the host")
    with servers.leak(machine) as leaked:
        stuck, free = leaked.workers
        with machine.frozen(stuck):
            start = time.monotonic()
            result = machine.cleanslate("reset", "--timeout", "3s", "--shm-min-age", "0s")
            assert time.monotonic() - start < 8
            assert verdict(result) == NOT_CLEAN
            assert result.outcomes(stuck, free, leaked.engine) == ["Uninterruptible", "Ended", "Ended"]
            assert results(result) == ["Unkillable", "Clean"]
            assert any(f"pid {stuck}" in warning and "reboot" in warning for warning in result.report["warnings"])
            assert {name[:4] for name in leaked.names_left()} >= {"psm_"}  # mapped still: the lease says so
        assert verdict(machine.cleanslate("reset", *NOW)) == CLEAN
        assert not any(map(machine.alive, leaked.pids))
        assert leaked.names_left() == frozenset()
