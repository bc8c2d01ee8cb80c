"""Leftover servers are found wherever they were re-parented and ended without a name left; what lives is not touched."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from gpusim import gpusim
from node import servers
from node.eight_gpus import CLEAN, NOT_CLEAN, results, verdict
from node.machine import Machine

NOW = ("--timeout", "15s", "--shm-min-age", "0s")
POD = "/kubepods/burstable/pod0c2f6f0e-7a52-4a3b-9f0e-6f3a4f0a9d11/" + "a1" * 32


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with four GPUs."""
    with Machine(gpus=gpusim.gpus(4)) as one:
        yield one


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("launcher", servers.LAUNCHERS)
def test_a_leaked_server_is_ended_and_none_of_its_names_is_left(machine: Machine, method: str, launcher: str) -> None:
    """Engine and workers go wherever the kernel put them, and the spared tracker takes the shared memory away."""
    with servers.leak(machine, method=method, launcher=launcher) as leaked:
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN, result.report
        assert results(result) == ["Clean"] * 4
        assert result.verdicts(*leaked.orphans) == ["End"] * 3
        assert result.outcomes(*leaked.orphans, leaked.tracker) == ["Ended"] * 4
        assert not any(map(machine.alive, leaked.pids))
        assert leaked.names_left() == frozenset()


@pytest.mark.parametrize("init", ["bash", "python", "careless"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_leaked_server_is_ended_under_any_pid_1(init: str, method: str) -> None:
    """A shell as PID 1, and a program of any other kind that is PID 1 of a PID namespace, hide no leftover."""
    with Machine(init=init, gpus=gpusim.gpus(2)) as machine, servers.leak(machine, method=method) as leaked:
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN, result.report
        assert result.verdicts(*leaked.orphans) == ["End"] * 3
        assert not any(map(machine.alive, leaked.pids))
        assert leaked.names_left() == frozenset()


@pytest.mark.parametrize(
    ("first", "outcome"),
    [(["sleep", "600"], "Zombie"), (["bash", "-c", "read line"], "Ended")],
    ids=["a program that collects nobody", "a shell"],
)
def test_a_leaked_server_in_a_living_container_is_ended(machine: Machine, first: list[str], outcome: str) -> None:
    """A container whose first process lives on keeps no leftover alive, and stays itself."""
    with (
        machine.container(*first, cgroup=POD, stdin=True) as box,
        servers.leak(machine, inside=box.pid, cgroup=POD) as leaked,
    ):
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN, result.report
        assert result.outcomes(*leaked.orphans) == [outcome] * 3
        assert not any(map(machine.alive, leaked.pids))
        assert {name.partition("-")[0] for name in leaked.names_left()} <= {"nccl"}  # of a root unknown here
        assert machine.alive(box.pid)


@pytest.mark.parametrize(("titles", "tensor_parallel"), [("sglang", 2), ("untitled", 1), ("untitled", 2)])
def test_other_servers_leftovers_are_ended_too(machine: Machine, titles: str, tensor_parallel: int) -> None:
    """SGLang's titles, and multiprocessing children without any title that hold a GPU or made one that does, are known."""
    with servers.leak(machine, titles=titles, tensor_parallel=tensor_parallel) as leaked:
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN, result.report
        assert not any(map(machine.alive, leaked.pids))
        assert leaked.names_left() == frozenset()


def test_a_live_server_without_titles_is_kept(machine: Machine) -> None:
    """Known by its command lines alone, it is left alone for the same reason as any other: its front end lives."""
    with servers.tree(machine, titles="untitled") as alive:
        result = machine.cleanslate("reset", *NOW)
        assert result.verdicts(*alive.orphans) == ["Keep"] * 3
        assert alive.intact()


def test_an_engine_without_workers_is_ended(machine: Machine) -> None:
    """With one GPU the engine itself holds it."""
    with servers.leak(machine, tensor_parallel=1) as leaked:
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN, result.report
        assert not any(map(machine.alive, leaked.pids))


def test_a_ray_worker_is_left_over_only_without_its_raylet(machine: Machine) -> None:
    """`ray::…` under a raylet is well; when that is gone it is an orphan."""
    machine.run("cp", "/bin/bash", "/run/raylet")
    raylet = ("/run/raylet", *servers.SHELL[1:])
    with servers.role(machine, "--title", "ray::RayWorkerWrapper", gpus=[0], under=raylet) as worker:
        kept = machine.cleanslate("reset", "--timeout", "2s")
        assert kept.verdicts(worker) == ["Keep"]
        assert machine.alive(worker)
        machine.kill(machine.parent(worker))
        machine.wait_until(lambda: machine.parent(worker) == 1, "another parent")
        assert verdict(machine.cleanslate("reset", *NOW)) == CLEAN
        assert not machine.alive(worker)


def test_looking_changes_nothing_and_says_what_a_reset_would_do(machine: Machine) -> None:
    """`inspect` and `reset --dry-run` name the leftovers with their evidence and leave them alone."""
    with servers.leak(machine) as leaked:
        for arguments in (["inspect"], ["reset", "--dry-run"]):
            result = machine.cleanslate(*arguments, "--shm-min-age", "0s")
            assert verdict(result) == NOT_CLEAN
            assert result.verdicts(*leaked.orphans) == ["End"] * 3
            assert result.outcomes(*leaked.orphans) == ["WouldEnd"] * 3
            assert all(result.processes[pid]["evidence"] for pid in leaked.orphans)
        assert all(map(machine.alive, (*leaked.orphans, leaked.tracker)))
        assert leaked.names_left() == leaked.names


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("launcher", servers.LAUNCHERS)
def test_a_live_server_beside_a_dead_one_is_not_touched(machine: Machine, method: str, launcher: str) -> None:
    """Not one process of a living server and not one of its names goes with a dead server's."""
    with (
        servers.tree(machine, method=method, launcher=launcher, gpus=[2, 3]) as live,
        servers.leak(machine, method=method, launcher=launcher, gpus=[0, 1]) as leaked,
    ):
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN, result.report
        assert results(result) == ["Clean", "Clean", "Busy", "Busy"]
        assert not any(map(machine.alive, leaked.pids))
        assert leaked.names_left() == frozenset()
        assert live.intact()
        assert result.removed_names.isdisjoint(live.names)
        assert set(result.verdicts(*live.pids)) <= {"Keep", None}


def test_equal_names_in_two_mount_namespaces_are_told_apart(machine: Machine) -> None:
    """Leftovers with exactly the names that a live server uses in its own /dev/shm go; that server's stay."""
    with (
        machine.container("sleep", "600", cgroup=POD) as box,
        servers.tree(machine, inside=box.pid, cgroup=POD) as live,
    ):
        for name in live.names:
            machine.path(f"/dev/shm/{name}").write_bytes(b"left over")
        result = machine.cleanslate("reset", *NOW)
        assert result.removed_names == live.names
        assert machine.names() == set()
        assert live.intact()


def test_the_same_memory_seen_in_two_places_stays_while_it_is_used(machine: Machine) -> None:
    """A pod's sandbox memory is a root on the host and /dev/shm in the container: in use there, it is kept here."""
    sandbox = "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/" + "5b" * 32 + "/shm"
    machine.path(sandbox).mkdir(parents=True)
    machine.mount("shm", sandbox, "tmpfs")
    bound = ("bash", "-c", f'mount --bind {sandbox} /dev/shm; exec "$@"', "bash", "sleep", "600")
    with machine.container(*bound, cgroup=POD) as box:
        machine.wait_until(lambda: machine.title(box.pid) == "sleep 600", "the container")
        with servers.tree(machine, inside=box.pid, cgroup=POD) as live:
            machine.path(f"{sandbox}/psm_0badcafe").write_bytes(b"left over")
            result = machine.cleanslate("reset", *NOW)
            assert result.removed_names == {"psm_0badcafe"}
            assert live.intact()


@pytest.mark.parametrize("scope", ["orphans", "all"])
def test_programs_that_only_mention_a_server_are_no_concern(machine: Machine, scope: str) -> None:
    """An editor, a pager and a shell with `vllm` in their arguments are not even reported, in either scope."""
    machine.path("/tmp/vllm.py").write_text("import vllm\n")
    machine.path("/tmp/vllm.log").write_text("VLLM::EngineCore started\n")
    command_lines = (
        ("script", "-qc", "vim /tmp/vllm.py", "/dev/null"),
        ("tail", "-f", "/tmp/vllm.log"),
        ("bash", "-c", "sleep 1000 # python3 vllm\ntrue"),
    )
    with contextlib.ExitStack() as programs:
        for words in command_lines:
            programs.enter_context(machine.popen(*words, stdin=True))
        machine.wait_until(lambda: bool(machine.with_title("vim /tmp/vllm.py")), "the editor")
        machine.wait_until(lambda: bool(machine.with_title("sleep 1000")), "the shell's child")
        mentioning = machine.with_title("vllm") | machine.with_title("sleep 1000")
        result = machine.cleanslate("reset", "--scope", scope, "--timeout", "5s")
        assert verdict(result) == CLEAN
        assert result.processes == {}
        assert all(map(machine.alive, mentioning))


def test_a_name_protects_nobody(machine: Machine) -> None:
    """A user's process that renamed itself nvidia-persistenced, which comm cuts, is not protected."""
    names = ("--comm", "nvidia-persiste", "--title", "/usr/bin/nvidia-persistenced")
    with servers.role(machine, *names, gpus=[0], user=1000) as impostor:
        kept = machine.cleanslate("reset", "--timeout", "2s")
        assert kept.verdicts(impostor) == ["Keep"]
        assert kept.processes[impostor]["reason"] != "protected"
        assert machine.cleanslate("reset", "--scope", "all", *NOW).verdicts(impostor) == ["End"]
        assert not machine.alive(impostor)


def test_a_service_of_the_node_is_protected_by_its_executable(machine: Machine) -> None:
    """The real thing, root's own executable of that name, is kept in either scope."""
    machine.run("cp", "/bin/bash", "/run/nvidia-persistenced")
    command = ("/run/nvidia-persistenced", "-c", "exec 3<>/dev/nvidia0 4<>/dev/nvidia-uvm; echo up; read line")
    with machine.popen(*command, stdin=True) as service:
        assert service.readline() == "up"
        for scope in ("orphans", "all"):
            result = machine.cleanslate("reset", "--scope", scope, "--timeout", "2s")
            assert result.processes[service.pid]["reason"] == "protected"
            assert machine.alive(service.pid)


def test_a_protected_name_is_kept_with_scope_all(machine: Machine) -> None:
    """`--protect` names an executable that no scope ends."""
    machine.run("cp", "/bin/bash", "/run/trainer")
    command = ("/run/trainer", "-c", "exec 3<>/dev/nvidia0 4<>/dev/nvidia-uvm; echo up; read line")
    with machine.popen(*command, stdin=True) as trainer:
        assert trainer.readline() == "up"
        result = machine.cleanslate("reset", "--scope", "all", "--protect", "trainer", "--timeout", "2s")
        assert result.verdicts(trainer.pid) == ["Keep"]
        assert machine.alive(trainer.pid)


def test_a_server_started_with_nohup_is_kept_and_reported(machine: Machine) -> None:
    """Its login is over, and yet it is no leftover: it is named as what keeps its GPUs busy."""
    with servers.tree(machine, launcher="nohup") as server:
        machine.wait_until(lambda: machine.parent(server.front_end) == 1, "the end of its starter")
        result = machine.cleanslate("reset", *NOW)
        assert verdict(result) == CLEAN
        assert results(result) == ["Busy", "Busy", "Clean", "Clean"]
        assert result.verdicts(*server.workers) == ["Keep", "Keep"]
        assert server.intact()


def test_scope_all_ends_a_living_server_by_its_front_end(machine: Machine) -> None:
    """SIGTERM to the front end alone: the server takes its own shared memory away, NCCL's file too, within its grace."""
    with servers.tree(machine, launcher="nohup") as server:
        result = machine.cleanslate("reset", "--scope", "all", "--timeout", "15s")  # names are too young to be purged
        assert verdict(result) == CLEAN, result.report
        assert result.outcomes(server.front_end, *server.orphans) == ["Ended"] * 4
        assert result.removed_names == set()
        assert server.names_left() == frozenset()


def test_only_the_gpus_named_are_cleared(machine: Machine) -> None:
    """With `--gpu`, a leftover on another GPU stays."""
    with servers.leak(machine, gpus=[0, 1]) as named, servers.leak(machine, gpus=[2, 3]) as other:
        result = machine.cleanslate("reset", "--gpu", "0", "--gpu", "1", *NOW)
        assert verdict(result) == CLEAN, result.report
        assert not any(map(machine.alive, named.pids))
        assert all(map(machine.alive, (*other.orphans, other.tracker)))


def test_a_stopped_leftover_is_ended(machine: Machine) -> None:
    """SIGSTOP keeps nothing alive."""
    with servers.leak(machine) as leaked:
        for pid in leaked.orphans:
            machine.signal(pid, signal.SIGSTOP)
        machine.wait_until(lambda: {machine.state(pid) for pid in leaked.orphans} == {"T"}, "stopped")
        assert verdict(machine.cleanslate("reset", *NOW)) == CLEAN
        assert not any(map(machine.alive, leaked.pids))
        assert leaked.names_left() == frozenset()


def test_a_stopped_server_leaves_in_order_with_scope_all(machine: Machine) -> None:
    """A stopped front end is continued, so that it hears SIGTERM."""
    with servers.tree(machine, launcher="nohup") as server:
        machine.signal(server.front_end, signal.SIGSTOP)
        machine.wait_until(lambda: machine.state(server.front_end) == "T", "stopped")
        result = machine.cleanslate("reset", "--scope", "all", "--timeout", "15s")
        assert verdict(result) == CLEAN, result.report
        assert server.names_left() == frozenset()
