"""Events: each piece of news once, counted when it is told again, in order, and never in anybody's way."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from cleanslate_operator import api, events, paths
from unit.operator import fakeapi
from unit.operator.fakeapi import Clock, FakeApi, status

UID = "5e1c7f3a-1b2c-4d5e-8f90-a1b2c3d4e5f6"


def recorder(server: FakeApi, clients: list[api.Api], clock: Clock) -> events.Recorder:
    """A recorder with a connection of its own, as each process has."""
    clients.append(api.Api(server.configuration(), count=lambda *_: None))
    return events.Recorder(clients[-1], identity="operator-0", clock=clock, monotonic=clock)


def with_recorder(check: Callable[[FakeApi, Callable[[], events.Recorder], Clock], Awaitable[None]]) -> None:
    """Run a check; the function it gets makes recorders, each with its writer running."""

    async def run() -> None:
        clients: list[api.Api] = []
        tasks: list[asyncio.Task[None]] = []
        clock = Clock(1_796_126_400.0)  # 2026-12-01T12:00:00Z

        async with FakeApi().serve() as server:

            def make() -> events.Recorder:
                made = recorder(server, clients, clock)
                tasks.append(asyncio.create_task(made.run()))
                return made

            try:
                await check(server, make, clock)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                for client in clients:
                    await client.close()

    asyncio.run(run())


def told(server: FakeApi) -> list[dict[str, object]]:
    """The Events in the cluster."""
    return [body for path, body in server.objects.items() if path.startswith(paths.events())]


def test_an_event_is_where_kubectl_describe_looks_for_it() -> None:
    """In namespace default, about an object that has none."""

    async def check(server: FakeApi, make: Callable[[], events.Recorder], clock: Clock) -> None:
        one = make()
        one.post(name="pool-a", uid=UID, reason="Started", message="resetting 2 nodes: a, b")
        await one.flush(5)
        (event,) = told(server)
        assert event["metadata"]["namespace"] == "default"  # type: ignore[index]
        assert event["metadata"]["name"].startswith("pool-a.")  # type: ignore[index]
        assert event["involvedObject"] == {
            "apiVersion": "cleanslate.dev/v1alpha1",
            "kind": "GPUNodeReset",
            "name": "pool-a",
            "uid": UID,
        }
        assert (event["type"], event["reason"], event["message"]) == ("Normal", "Started", "resetting 2 nodes: a, b")
        assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-12-01T12:00:00Z"
        assert (event["reportingComponent"], event["reportingInstance"]) == ("cleanslate-operator", "operator-0")
        assert event["count"] == 1

    with_recorder(check)


def test_the_same_news_is_counted_also_by_the_next_process() -> None:
    """One Event, whatever crashed in between; no right to read Events is used."""

    async def check(server: FakeApi, make: Callable[[], events.Recorder], clock: Clock) -> None:
        for number in range(2):
            one = make()
            for _ in range(2):
                one.post(name="pool-a", uid=UID, reason="NotClean", message="node a: Busy", warning=True)
            await one.flush(5)
            clock.now_s += 60
            (event,) = told(server)
            assert event["count"] == 2 * (number + 1)
        assert event["lastTimestamp"] == "2026-12-01T12:01:00Z"
        assert event["type"] == "Warning"
        assert [method for method, *_ in server.requests if method == "GET"] == []

    with_recorder(check)


def test_other_news_is_another_event_and_they_keep_their_order() -> None:
    """By object, reason and message."""

    async def check(server: FakeApi, make: Callable[[], events.Recorder], clock: Clock) -> None:
        one = make()
        for reason, message, uid in (("A", "x", UID), ("A", "y", UID), ("B", "x", UID), ("A", "x", "another")):
            one.post(name="pool-a", uid=uid, reason=reason, message=message)
        await one.flush(5)
        assert [(event["reason"], event["message"]) for event in told(server)] == [
            ("A", "x"),
            ("A", "y"),
            ("B", "x"),
            ("A", "x"),
        ]

    with_recorder(check)


def test_an_event_that_has_expired_is_told_anew() -> None:
    """The API server forgets Events after an hour."""

    async def check(server: FakeApi, make: Callable[[], events.Recorder], clock: Clock) -> None:
        one = make()
        one.post(name="pool-a", uid=UID, reason="A", message="x")
        await one.flush(5)
        server.objects.clear()
        one.post(name="pool-a", uid=UID, reason="A", message="x")
        await one.flush(5)
        (event,) = told(server)
        assert event["count"] == 1

    with_recorder(check)


def test_an_event_that_cannot_be_written_is_dropped_and_the_next_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """The log says so, and no reset hears of it."""

    async def check(server: FakeApi, make: Callable[[], events.Recorder], clock: Clock) -> None:
        one = make()
        server.faults.append(fakeapi.once(status(403, "Forbidden", "no right"), method="POST"))
        one.post(name="pool-a", uid=UID, reason="A", message="lost")
        one.post(name="pool-a", uid=UID, reason="B", message="kept")
        await one.flush(5)
        assert [event["message"] for event in told(server)] == ["kept"]

    with caplog.at_level(logging.WARNING):
        with_recorder(check)
    assert any("Event A: cannot write" in text and "dropped: lost" in text for text in caplog.messages)


def test_a_flood_about_one_object_is_cut_and_leaves_room_for_others() -> None:
    """Forty at once, then one in half a minute, for each object."""

    async def check(server: FakeApi, make: Callable[[], events.Recorder], clock: Clock) -> None:
        one = make()
        for number in range(100):
            one.post(name="pool-a", uid=UID, reason="A", message=str(number))
        one.post(name="pool-b", uid="another", reason="A", message="heard")
        await one.flush(10)
        assert len(told(server)) == 41
        assert told(server)[-1]["message"] == "heard"
        clock.now_s += 31
        one.post(name="pool-a", uid=UID, reason="A", message="again")
        await one.flush(5)
        assert told(server)[-1]["message"] == "again"

    with_recorder(check)


def test_a_server_that_is_away_fills_a_queue_that_has_an_end() -> None:
    """What is told never waits, never raises and never takes more memory than this."""

    async def check(server: FakeApi, make: Callable[[], events.Recorder], clock: Clock) -> None:
        server.faults.append(fakeapi.silence)
        one = make()
        for number in range(events.WAITING_LIMIT + 100):
            one.post(name="pool-a", uid=str(number), reason="A", message="x")
        await one.flush(0.05)
        assert told(server) == []
        assert len(server.requests) <= 1

    with_recorder(check)


@pytest.mark.parametrize(
    "message", ["x" * 5000, "é" * 5000, "\ud800" * 3, ""], ids=["ascii", "two bytes", "surrogates", "empty"]
)
def test_a_message_is_at_most_1024_bytes(message: str) -> None:
    """The API's limit, in bytes; whole characters only."""

    async def check(server: FakeApi, make: Callable[[], events.Recorder], clock: Clock) -> None:
        one = make()
        one.post(name="a" * 253, uid=UID, reason="A", message=message)
        await one.flush(5)
        (event,) = told(server)
        assert len(str(event["message"]).encode()) <= 1024
        assert str(event["message"]).endswith("…") == (len(message) > 1024)
        assert len(event["metadata"]["name"]) <= 253  # type: ignore[index]

    with_recorder(check)
