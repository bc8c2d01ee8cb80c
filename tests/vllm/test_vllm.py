"""The program against real vLLM servers, CPU build: what a killed front end leaves, beside a server that lives."""

from collections.abc import Mapping

import pytest

from vllm.servers import Server, ServerMachine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]  # the first test may have to install vLLM

RESET_GOAL_S = 0.6
RESET_LIMIT_S = 2.0  # the goal is a figure to print; a test on a busy machine only tells that something waited
GRACE_S = 20
LAUNCHES = ("bash", "subreaper")  # "nohup" is the server that starts behind the gate, "program" the live one


@pytest.fixture(scope="module")
def live(machine: ServerMachine) -> Server:
    """A server that nobody harms before the last test. It is the first: the others find the model inspected."""
    return Server(machine, "program").up()


@pytest.fixture(scope="module")
def doomed(machine: ServerMachine, live: Server) -> Mapping[str, Server]:
    """A server for each way of starting one, all started at once: their starts wait as much as they compute."""
    servers = {launch: Server(machine, launch) for launch in LAUNCHES}
    return {launch: server.up() for launch, server in servers.items()}


@pytest.fixture(scope="module")
def behind_the_gate(machine: ServerMachine, live: Server) -> Server:
    """A server started with nohup, its shell gone, after the gate has let pass."""
    gate = machine.cleanslate("gate")
    assert (gate.code, gate.report["result"]) == (0, "Clean")
    return Server(machine, "nohup").up()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_what_a_killed_front_end_leaves_is_found_and_ended(
    machine: ServerMachine, live: Server, doomed: Mapping[str, Server], launch: str
) -> None:
    """Engine, worker and both segments of a dead server are leftovers, wherever re-parented; a reset ends them alone."""
    assert_a_kill_is_reset(machine, live, doomed[launch])


def test_a_server_starts_behind_the_gate(behind_the_gate: Server) -> None:
    """On clean GPUs the gate lets pass, and vLLM comes up after it and serves."""
    assert behind_the_gate.complete(tokens=8) == 8


def test_a_server_started_with_nohup_is_a_leftover_only_without_its_front_end(
    machine: ServerMachine, live: Server, behind_the_gate: Server
) -> None:
    """Its login over and its parent PID 1, a live server is kept; killed, its engine and worker end."""
    kept = machine.cleanslate("reset")
    assert kept.verdicts(behind_the_gate.engine, behind_the_gate.worker) == ["Keep", "Keep"]
    assert behind_the_gate.healthy()
    assert_a_kill_is_reset(machine, live, behind_the_gate)


def test_a_live_server_beside_the_resets_goes_on_serving(live: Server) -> None:
    """After all the resets the live server has lost nothing: it completes a request."""
    assert live.complete(tokens=8) == 8


def test_scope_all_ends_a_live_server_by_its_front_end(machine: ServerMachine, live: Server) -> None:
    """A live server is asked to leave: every process goes within the grace period, and its shared memory too."""
    done = machine.cleanslate("reset", "--scope", "all", "--grace", str(GRACE_S), timeout=GRACE_S + 40)
    print(f"reset --scope all of a live vLLM in {done.report['durationSeconds']:.3f} s")

    assert done.outcomes(live.front_end, live.engine, live.worker) == ["Ended"] * 3
    assert not any(map(machine.alive, live.pids))
    assert live.running.wait() == 0
    assert machine.names() == set()
    assert done.report["durationSeconds"] < GRACE_S
    assert (done.code, done.report["result"]) == (0, "Clean")


def assert_a_kill_is_reset(machine: ServerMachine, live: Server, dead: Server) -> None:
    """SIGKILLs a front end and resets; asserts what the program saw, what it ended, and what it left alone."""
    spared = machine.names() - dead.segments
    dead.kill_front_end()
    with live.watched() as watch:
        seen = machine.cleanslate("inspect", "--shm-min-age", "0")  # the segments are as young as their server
        done = machine.cleanslate("reset")
    print(f"{dead.launch}: reset of a dead vLLM in {done.report['durationSeconds']:.3f} s, goal {RESET_GOAL_S} s")
    print(f"{dead.launch}: {done.report['timings']}; the live server answered {watch.answers} times meanwhile")

    assert len(dead.segments) == 2
    assert seen.verdicts(dead.engine, dead.worker) == ["End", "End"]
    assert seen.removed_names >= dead.segments
    assert not seen.removed_names & spared
    assert done.outcomes(dead.engine, dead.worker) == ["Ended", "Ended"]
    assert not any(map(machine.alive, dead.pids))
    assert machine.names() == spared
    assert done.report["durationSeconds"] < RESET_LIMIT_S
    assert (watch.failures, watch.answers > 0) == ([], True)
    assert all(map(machine.alive, live.pids))
