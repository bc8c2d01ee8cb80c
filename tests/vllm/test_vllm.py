"""The program against real vLLM servers, CPU build: what a killed front end leaves, beside a server that lives."""

from collections.abc import Iterator, Mapping

import pytest

from vllm.servers import LAUNCHES, Server, ServerMachine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

RESET_GOAL_S = 0.6
RESET_LIMIT_S = 2.0  # the goal is a figure to print; a test on a busy machine only tells a wait for something wrong
GRACE_S = 20


@pytest.fixture(scope="module")
def live(machine: ServerMachine) -> Server:
    """A server that nobody harms before the last test."""
    return Server(machine, "program").up()


@pytest.fixture(scope="module")
def doomed(machine: ServerMachine, live: Server) -> Iterator[Mapping[str, Server]]:
    """A server for each way of starting one, all started at once: they wait more than they compute."""
    servers = {launch: Server(machine, launch) for launch in LAUNCHES}
    yield {launch: server.up() for launch, server in servers.items()}
    for server in servers.values():
        server.running.kill()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_what_a_killed_front_end_leaves_is_found_and_ended(
    machine: ServerMachine, live: Server, doomed: Mapping[str, Server], launch: str
) -> None:
    """Engine, worker and both segments of a dead server are leftovers, wherever re-parented; a reset ends them."""
    dead = doomed[launch]
    dead.kill_front_end()
    leftovers = (dead.engine, dead.worker)
    with live.watched() as watch:
        seen = machine.cleanslate("inspect")
        done = machine.cleanslate("reset")
    others = {name for name, server in doomed.items() if server is not dead and machine.alive(server.front_end)}
    spared = live.segments.union(*(doomed[name].segments for name in others))
    print(f"{launch}: reset of a dead vLLM in {done.report['durationSeconds']:.3f} s (goal {RESET_GOAL_S} s)")

    assert seen.verdicts(*leftovers) == ["End", "End"]
    assert seen.removed_names == dead.segments
    assert len(dead.segments) == 2
    assert done.outcomes(*leftovers) == ["Ended", "Ended"]
    assert not any(map(machine.alive, dead.pids))
    assert machine.names() == spared
    assert done.report["durationSeconds"] < RESET_LIMIT_S
    assert (watch.failures, watch.answers > 0) == ([], True)


def test_a_live_server_beside_a_reset_goes_on_serving(live: Server) -> None:
    """After all the resets the live server has lost nothing: it completes a request."""
    assert live.complete(tokens=8) == 8


def test_a_server_starts_behind_the_gate(machine: ServerMachine) -> None:
    """On clean GPUs the gate lets pass at once, and vLLM comes up after it."""
    assert machine.cleanslate("gate").code == 0
    server = Server(machine, "bash").up()
    assert server.complete() == 8


def test_scope_all_ends_live_servers_by_their_front_ends(machine: ServerMachine, live: Server) -> None:
    """Live servers are asked to leave: every process goes within the grace period, and its shared memory too."""
    done = machine.cleanslate("reset", "--scope", "all", "--grace", str(GRACE_S), timeout=GRACE_S + 40)
    print(f"reset --scope all of two live vLLM in {done.report['durationSeconds']:.3f} s")

    assert done.outcomes(live.front_end, live.engine, live.worker) == ["Ended"] * 3
    assert not machine.with_title("VLLM::")
    assert not any(map(machine.alive, live.pids))
    assert machine.names() == set()
    assert done.report["durationSeconds"] < GRACE_S
    assert "Application shutdown complete" in live.log.read_text()
