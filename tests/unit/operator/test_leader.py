"""Two candidates and one Lease, on a server in memory: never two leaders, and always one soon."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from cleanslate_operator import api, leader, paths
from unit.operator import fakeapi
from unit.operator.fakeapi import Clock, FakeApi, status

LEASES = paths.leases("cleanslate-system")
LEASE = paths.lease("cleanslate-system", "cleanslate-operator")
TERMS = leader.Terms(lease_duration_s=15.0, renew_deadline_s=10.0, retry_period_s=0.01)


class World:
    """A server, a clock for all, and candidates."""

    def __init__(self, server: FakeApi) -> None:
        self.server = server
        self.clock = Clock()
        self._clients: list[api.Api] = []

    def candidate(self, identity: str, terms: leader.Terms = TERMS) -> leader.Elector:
        client = api.Api(self.server.configuration(), count=lambda *_: None)
        self._clients.append(client)
        return leader.Elector(
            client,
            namespace="cleanslate-system",
            name="cleanslate-operator",
            identity=identity,
            terms=terms,
            clock=self.clock,
        )

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    def holder(self) -> str | None:
        return self.server.objects[LEASE]["spec"].get("holderIdentity")


def in_world(check: Callable[[World], Awaitable[None]]) -> None:
    """Run a check in a fresh world."""

    async def run() -> None:
        async with FakeApi().serve() as server:
            world = World(server)
            try:
                await asyncio.wait_for(check(world), 20)
            finally:
                await world.close()

    asyncio.run(run())


async def does_not_lead_yet(candidate: leader.Elector, for_s: float = 0.15) -> None:
    """It tries, many times, and does not get the Lease."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(candidate.acquire(), for_s)
    assert not candidate.is_leader()


@contextlib.asynccontextmanager
async def holding(candidate: leader.Elector):  # type: ignore[no-untyped-def]
    """The candidate renews meanwhile."""
    task = asyncio.create_task(candidate.hold())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something, with a limit."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def test_the_first_makes_the_lease_and_leads() -> None:
    """The Lease says who leads, since when, and for how long."""

    async def check(world: World) -> None:
        first = world.candidate("pod-a")
        assert not first.is_leader()
        await first.acquire()
        assert first.is_leader()
        assert first.remaining_s() == 10.0
        spec = world.server.objects[LEASE]["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("pod-a", 15, 1)
        assert spec["acquireTime"] == spec["renewTime"]

    in_world(check)


def test_of_many_that_start_at_once_one_leads() -> None:
    """Creating and replacing are both of one version: the others get a conflict."""

    async def check(world: World) -> None:
        candidates = [world.candidate(f"pod-{number}") for number in range(8)]
        tasks = [asyncio.create_task(one.acquire()) for one in candidates]
        await asyncio.sleep(0.3)
        leaders = [one for one in candidates if one.is_leader()]
        assert len(leaders) == 1
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    in_world(check)


def test_a_standby_waits_while_the_leader_renews_and_takes_over_when_it_does_not() -> None:
    """By the standby's own clock, from when it saw the last renewal."""

    async def check(world: World) -> None:
        first, second = world.candidate("pod-a"), world.candidate("pod-b")
        await first.acquire()
        async with holding(first):
            waiting = asyncio.create_task(second.acquire())
            for _ in range(5):
                world.clock.now_s += 9
                renewed = world.server.objects[LEASE]["metadata"]["resourceVersion"]
                await until(lambda old=renewed: world.server.objects[LEASE]["metadata"]["resourceVersion"] != old)
                await asyncio.sleep(0.05)
                assert first.is_leader()
                assert not second.is_leader()
        await asyncio.sleep(0.1)  # for the standby to see the last renewal
        world.clock.now_s += 14.9
        await asyncio.sleep(0.1)
        assert not second.is_leader()
        assert not first.is_leader()
        world.clock.now_s += 0.2
        await waiting
        assert second.is_leader()
        assert world.holder() == "pod-b"
        assert world.server.objects[LEASE]["spec"]["leaseTransitions"] == 2

    in_world(check)


def test_a_container_that_restarts_in_its_pod_leads_at_once() -> None:
    """The same identity needs not wait for itself."""

    async def check(world: World) -> None:
        await world.candidate("pod-a").acquire()
        again = world.candidate("pod-a")
        await asyncio.wait_for(again.acquire(), 1)
        assert again.is_leader()

    in_world(check)


def test_two_processes_of_one_name_do_not_both_lead() -> None:
    """The older of the two finds a term in the Lease that is not its own, and gives up."""

    async def check(world: World) -> None:
        first, second = world.candidate("pod-a"), world.candidate("pod-a")
        await first.acquire()
        await asyncio.sleep(0.001)
        await second.acquire()
        with pytest.raises(leader.LostError, match="held by pod-a now"):
            await first.hold()
        assert not first.is_leader()
        assert second.is_leader()

    in_world(check)


def test_a_lease_given_back_is_taken_at_once() -> None:
    """SIGTERM costs the others no waiting; who gave it back leads no more, not for a moment."""

    async def check(world: World) -> None:
        first, second = world.candidate("pod-a"), world.candidate("pod-b")
        await first.acquire()
        await does_not_lead_yet(second)
        await first.release()
        assert not first.is_leader()
        assert world.holder() is None
        await asyncio.wait_for(second.acquire(), 1)
        assert world.holder() == "pod-b"

    in_world(check)


def test_giving_back_what_another_has_taken_changes_nothing() -> None:
    """A leader that was away for long does not throw the new one out."""

    async def check(world: World) -> None:
        first, second = world.candidate("pod-a"), world.candidate("pod-b")
        await first.acquire()
        await does_not_lead_yet(second)
        world.clock.now_s += 15
        await second.acquire()
        await first.release()
        assert world.holder() == "pod-b"

    in_world(check)


def test_a_leader_outlasts_errors_until_its_deadline_and_not_longer() -> None:
    """Conflicts, 500s and refusals are tried again; at the deadline it is over, exactly."""

    async def check(world: World) -> None:
        first = world.candidate("pod-a")
        await first.acquire()
        world.server.faults.append(fakeapi.always(lambda: status(500, "InternalError"), method="PUT"))
        async with holding(first) as task:
            world.clock.now_s += 9.9
            await asyncio.sleep(0.1)
            assert first.is_leader()
            assert not task.done()
            world.server.faults.clear()
            await until(lambda: first.remaining_s() == 10.0)
            world.server.faults.append(fakeapi.always(lambda: status(500, "InternalError"), method="PUT"))
            world.clock.now_s += 10
            assert not first.is_leader()
            with pytest.raises(leader.LostError) as raised:
                await task
        assert str(raised.value) == (
            "Lease cleanslate-operator: cannot lead: not renewed for 10 s; this process ends and starts anew as a candidate"
        )

    in_world(check)


def test_a_leader_does_not_hang_on_a_silent_server() -> None:
    """Requests end before the deadline, so that losing the Lease is noticed by itself."""

    async def check(world: World) -> None:
        world.clock = asyncio.get_running_loop().time  # type: ignore[assignment]
        terms = leader.Terms(lease_duration_s=1.0, renew_deadline_s=0.5, retry_period_s=0.05)
        first = world.candidate("pod-a", terms)
        await first.acquire()
        world.server.faults.append(fakeapi.silence)
        with pytest.raises(leader.LostError):
            await asyncio.wait_for(first.hold(), 3)

    in_world(check)


def test_a_renewal_counts_from_before_it_was_asked_for() -> None:
    """A slow answer does not make a term longer than the others believe it to be."""

    async def check(world: World) -> None:
        first = world.candidate("pod-a")

        async def slow(request: web.Request) -> None:
            world.clock.now_s += 4 if request.method == "POST" else 0

        world.server.faults.append(slow)
        await first.acquire()
        assert first.remaining_s() == 6.0

    in_world(check)


def test_a_lease_that_somebody_else_wrote_is_lost() -> None:
    """However it came about, a leader that finds another's name in the Lease stops."""

    async def check(world: World) -> None:
        first = world.candidate("pod-a")
        await first.acquire()
        world.server.objects[LEASE]["spec"]["holderIdentity"] = "pod-b"
        world.server.put(LEASE, world.server.objects[LEASE])
        with pytest.raises(leader.LostError, match="held by pod-b now"):
            await first.hold()
        assert not first.is_leader()

    in_world(check)


def test_a_lease_that_somebody_deleted_or_touched_is_written_again() -> None:
    """A label on the Lease, or its deletion, is no change of leaders."""

    async def check(world: World) -> None:
        first = world.candidate("pod-a")
        await first.acquire()
        async with holding(first) as task:
            world.server.remove(LEASE)
            await until(lambda: LEASE in world.server.objects)
            touched = world.server.put(LEASE, {**world.server.objects[LEASE]})["metadata"]["resourceVersion"]
            await until(lambda: int(world.server.objects[LEASE]["metadata"]["resourceVersion"]) > int(touched))
            assert not task.done()
            assert first.is_leader()
            assert world.holder() == "pod-a"

    in_world(check)


def test_a_renewal_whose_answer_was_lost_does_no_harm() -> None:
    """The next one meets a conflict with its own writing, and goes on."""

    async def check(world: World) -> None:
        first = world.candidate("pod-a")
        await first.acquire()
        lost: list[str] = []

        async def lose(request: web.Request) -> web.Response | None:
            if request.method != "PUT" or lost:
                return None
            lost.append(request.path)
            world.server.put(LEASE, await request.json())
            return status(504, "Timeout")

        world.server.faults.append(lose)
        async with holding(first) as task:
            world.clock.now_s += 5
            await until(lambda: first.remaining_s() == 10.0)
            assert lost
            assert not task.done()

    in_world(check)


@pytest.mark.parametrize(
    "spec",
    [
        None,
        [],
        {"holderIdentity": 7},
        {"holderIdentity": "x", "leaseDurationSeconds": 10**9},
        {"leaseTransitions": "many"},
    ],
    ids=["none", "a list", "a number", "for ever", "not a count"],
)
def test_a_spoiled_lease_is_taken_in_the_end(spec: object) -> None:
    """Nonsense in the Lease costs at most one lease's duration."""

    async def check(world: World) -> None:
        world.server.put(LEASE, {"metadata": {}, "spec": spec})
        first = world.candidate("pod-a")
        waiting = asyncio.create_task(first.acquire())
        await asyncio.sleep(0.05)
        world.clock.now_s += 15
        await asyncio.wait_for(waiting, 2)
        assert world.holder() == "pod-a"

    in_world(check)


def test_a_candidate_outlasts_an_api_server_that_refuses_it() -> None:
    """Errors are logged and tried again, with no end."""

    async def check(world: World) -> None:
        first = world.candidate("pod-a")
        world.server.faults.append(fakeapi.always(lambda: status(403, "Forbidden")))
        await does_not_lead_yet(first)
        world.server.faults.clear()
        await asyncio.wait_for(first.acquire(), 1)
        assert world.holder() == "pod-a"

    in_world(check)
