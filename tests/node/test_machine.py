"""The machine isolates and goes away entirely, and the server trees in it behave as real ones. Everything else rests on this."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusim import gpusim
from node import servers
from node.machine import DRIVER_DIRECTORY, ROOT, Machine

POD = "/kubepods/besteffort/pod5e1c6a7e-0b1f-4c3e-9a55-2f1d3c4b5a69/" + "3f" * 32
USED = f"""
import ctypes
ctypes.CDLL({DRIVER_DIRECTORY + "/libnvidia-ml.so.1"!r})
import pynvml
pynvml.nvmlInit()
gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in (0, 1)]
print([pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).used >> 30 for gpu in gpus])
"""


def processes_outside(marker: str) -> list[int]:
    """The host's processes whose command line contains `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def cgroups_outside(name: str) -> list[Path]:
    """The cgroups called `name` in any hierarchy of the host."""
    return [*Path("/sys/fs/cgroup").glob(f"*/{name}"), *Path("/sys/fs/cgroup").glob(name)]


def wait_outside(condition: Callable[[], bool]) -> None:
    """For facts about the host. Fails after 10 s."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_of_the_host_is_invisible(machine: Machine) -> None:
    """A machine's /proc shows no process but its own."""
    with subprocess.Popen(["sleep", "7654.25"]) as other:
        try:
            wait_outside(lambda: processes_outside("7654.25") == [other.pid])  # seen a little after exec
            assert machine.with_title("7654.25") == set()
            assert machine.pids() <= {1, 2, 3}
        finally:
            other.kill()


def test_shared_memory_devices_and_run_are_its_own(machine: Machine) -> None:
    """What a machine writes to shared memory, /run, /tmp, /var/lib or /dev is not the host's."""
    for folder in ("/dev/shm", "/run", "/tmp", "/var/lib", "/dev"):
        name = f"{folder}/{machine.name}"
        machine.run("sh", "-c", f"echo here > {name}")
        assert machine.path(name).read_text() == "here\n"
        assert not Path(name).exists()


def use_and_fail(machine: Machine, marker: str) -> None:
    """Makes one of everything in the machine and raises."""
    with machine:
        machine.run("touch", f"/dev/shm/{machine.name}", f"/tmp/{machine.name}")
        machine.popen("sleep", marker, cgroup=POD)
        machine.container("sleep", marker, cgroup=POD)
        stuck = machine.popen("sleep", marker, new_session=True)
        if machine.freezable():
            machine.freeze(stuck.pid)
        wait_outside(lambda: len(processes_outside(marker)) == 3)
        assert cgroups_outside(machine.name)
        raise ZeroDivisionError


def test_nothing_is_left_when_a_test_fails() -> None:
    """Processes, containers, frozen processes, cgroups, mounts and files go away with the machine, however its test ended."""
    mounts = Path("/proc/self/mounts").read_text()
    marker = f"{time.monotonic_ns()}.5"
    machine = Machine(gpus=gpusim.gpus(1))
    with pytest.raises(ZeroDivisionError):
        use_and_fail(machine, marker)
    assert processes_outside(marker) == []
    assert processes_outside(machine.name) == []
    assert cgroups_outside(machine.name) == []
    assert Path("/proc/self/mounts").read_text() == mounts
    assert not Path("/dev/shm", machine.name).exists()
    assert not Path("/tmp", machine.name).exists()


def test_a_machine_goes_away_with_a_killed_test() -> None:
    """A test run that is SIGKILLed leaves no machine behind."""
    code = "from node.machine import Machine\nwith Machine() as m: print(m.name, flush=True); m.run('sleep', '600')"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    ) as run:
        name = run.stdout.readline().strip()
        assert cgroups_outside(name)
        run.kill()
    wait_outside(lambda: not processes_outside(name) and not cgroups_outside(name))


def test_cgroup_paths_read_as_made(machine: Machine) -> None:
    """A process in a cgroup of the machine shows exactly that path in every hierarchy that the machine has."""
    text = machine.run("cat", "/proc/self/cgroup", cgroup=POD).stdout
    assert {line.split(":", 2)[1]: line.split(":", 2)[2] for line in text.splitlines()}[""] == POD
    only_second = machine.run("cat", "/proc/self/cgroup", cgroup=f"unified:{POD}").stdout
    assert [line for line in only_second.splitlines() if line.endswith(POD)] == [f"0::{POD}"]


def test_a_pid_can_be_forced(machine: Machine) -> None:
    """A program gets the pid that the test asks for, again and again."""
    for _ in range(3):
        with machine.popen("sleep", "60", pid=4321) as running:
            assert running.pid == 4321
            machine.wait_until(lambda: machine.title(4321) == "sleep 60", "the program")


def test_a_user_without_rights_has_none(machine: Machine) -> None:
    """`user` runs the tests' own Python without a single capability."""
    code = "print(open('/proc/self/status').read())"
    status = machine.run(sys.executable, "-c", code, user=1000).stdout
    assert "Uid:\t1000\t1000\t1000\t1000" in status
    assert "CapEff:\t0000000000000000" in status


def test_a_frozen_process_sleeps_uninterruptibly(machine: Machine) -> None:
    """SIGKILL ends a frozen process only when it is thawed."""
    if not machine.freezable():
        pytest.skip("needs the freezer of cgroup version 1 on the host")
    with machine.popen("sleep", "60") as running:
        with machine.frozen(running.pid):
            running.kill()
            assert machine.state(running.pid) == "D"
        assert running.wait() == -signal.SIGKILL


def test_a_container_has_its_own_processes_and_shared_memory(machine: Machine) -> None:
    """A container's PID 1, /proc and /dev/shm are its own, and its cgroup is known from outside."""
    machine.run("touch", "/dev/shm/outer")
    with machine.container(
        "sh", "-c", "touch /dev/shm/inner; ls /dev/shm; echo /proc/[0-9]*; read line; exit 0", cgroup=POD, stdin=True
    ) as box:
        assert box.readline() == "inner"
        assert box.readline() == "/proc/1"
        assert machine.pid_of(1, box.pid) == box.pid
        assert machine.names() == {"outer"}
        assert POD in machine.run("cat", f"/proc/{box.pid}/cgroup").stdout
        assert machine.run("ls", "/dev/shm", inside=box.pid).stdout == "inner\n"
        box.close_stdin()
        assert box.wait() == 0


@pytest.mark.parametrize(("init", "left"), [("tini", None), ("python", None), ("careless", "Z")])
def test_each_init_collects_orphans_or_not(init: str, left: str | None) -> None:
    """Every init but the careless one collects a dead orphan."""
    with Machine(init=init) as machine:
        orphan = int(machine.run("sh", "-c", "sleep 60 > /dev/null 2>&1 & echo $!").stdout)
        machine.wait_until(lambda: machine.parent(orphan) == 1, "an orphan under PID 1")
        machine.kill(orphan)
        machine.wait_until(lambda: machine.state(orphan) == left, f"state {left}")
        assert machine.state(orphan) == left


def test_a_program_that_is_not_there_is_an_error(machine: Machine) -> None:
    """Starting what does not exist raises, and the machine goes on."""
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        machine.run("no-such-program")
    assert machine.run("cat", input="still here").stdout == "still here"


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("launcher", servers.LAUNCHERS)
def test_a_server_outlives_its_front_end(machine: Machine, method: str, launcher: str) -> None:
    """After SIGKILL of the front end engine, workers and tracker live on under another parent, and every name stays."""
    with servers.tree(machine, method=method, launcher=launcher) as tree:
        assert tree.intact()
        assert len(set(tree.pids)) == 5
        tree.kill_front_end()
        machine.wait_until(lambda: machine.parent(tree.engine) != tree.front_end, "another parent of the engine")
        assert machine.title(machine.parent(tree.engine)).startswith(
            "/run/tini" if not launcher.startswith("subreaper") else f"{sys.executable} {servers.PROGRAMS}/subreaper.py"
        )
        assert all(map(machine.alive, (*tree.orphans, tree.tracker)))
        assert tree.names_left() == tree.names


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_spared_tracker_unlinks_its_dead_family_s_names(machine: Machine, method: str) -> None:
    """When all but the resource tracker are killed it unlinks segments and semaphores and ends; NCCL's file stays."""
    with servers.tree(machine, method=method) as tree:
        tree.kill_front_end()
        machine.kill(*tree.orphans)
        machine.wait_gone(tree.tracker)
        assert {name.partition("-")[0] for name in tree.names_left()} == {"nccl"}


def test_names_stay_when_the_tracker_is_killed_too(machine: Machine) -> None:
    """Killing the whole tree at once, tracker first, leaks every name: the fault that the program must not have."""
    with servers.tree(machine, method="fork") as tree:
        machine.kill(tree.tracker, tree.front_end, *tree.orphans)
        assert tree.names_left() == tree.names


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_server_told_to_stop_leaves_nothing(machine: Machine, method: str) -> None:
    """SIGTERM to the front end ends the tree in order and unlinks every name."""
    with servers.tree(machine, method=method) as tree:
        tree.stop()
        assert tree.names_left() == frozenset()


def test_an_orphaned_engine_waits_for_its_dead_front_end(machine: Machine) -> None:
    """SIGTERM to an orphaned engine does not end it soon: it and its workers still live when it has taken notice."""
    with servers.tree(machine, method="fork", options=["--orphan-patience-s", "600"]) as tree:
        tree.kill_front_end()
        machine.signal(tree.engine, signal.SIGTERM)
        machine.wait_until(lambda: _ignores_sigterm(machine, tree.engine), "the engine taking notice")
        assert all(map(machine.alive, tree.orphans))


def used_gib(machine: Machine) -> list[int]:
    """Whole GiB in use on the first two GPUs, as NVML tells it in the machine."""
    return json.loads(machine.run(sys.executable, "-c", USED).stdout)


def _ignores_sigterm(machine: Machine, pid: int) -> bool:
    status = machine.path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(("titles", "tensor_parallel"), [("vllm", 1), ("vllm", 2), ("sglang", 2), ("untitled", 2)])
def test_workers_hold_simulated_gpus_until_they_die(titles: str, tensor_parallel: int) -> None:
    """GPU memory belongs to live workers, or to the engine of a server on one GPU, and is freed by their death alone."""
    with Machine(gpus=gpusim.gpus(2)) as machine:
        with servers.tree(machine, tensor_parallel=tensor_parallel, titles=titles) as tree:
            expected = [1] * tensor_parallel + [0] * (2 - tensor_parallel)
            assert used_gib(machine) == expected
            tree.kill_front_end()
            machine.kill(*tree.orphans)
        assert used_gib(machine) == [0, 0]


def test_two_servers_in_two_containers_have_their_own_names() -> None:
    """A server in a container has its pids told as the machine's, and its names in the container's shared memory alone."""
    with (
        Machine() as machine,
        machine.container("sleep", "600", cgroup=POD) as box,
        servers.tree(machine, method="fork", inside=box.pid) as inside,
        servers.tree(machine, method="fork") as outside,
    ):
        assert inside.intact()
        assert outside.intact()
        assert not machine.names() & inside.names
        assert machine.title(inside.engine) == machine.title(outside.engine) == "VLLM::EngineCore"
