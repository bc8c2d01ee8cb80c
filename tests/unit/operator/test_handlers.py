"""kopf as event source, against a server in memory: what it watches, what it names, what it never does."""

import asyncio
from collections.abc import Awaitable, Callable

from cleanslate_operator import eventsource, handlers, names, paths
from unit.operator import fakeapi
from unit.operator.fakeapi import FakeApi, status

RESETS = "cleanslate-resets"


def pod(reset: str | None) -> fakeapi.Object:
    """A reset's pod; without a reset's name: somebody else's doing."""
    labels = {names.RESET_UID: "u"} | ({names.RESET_NAME: reset} if reset else {})
    return {"metadata": {"labels": labels, "namespace": RESETS, "uid": f"pod-of-{reset}"}}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something, with a limit."""
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


def with_source(check: Callable[[FakeApi, list[str], "asyncio.Task[BaseException | None]"], Awaitable[None]]) -> None:
    """Run a check while events are delivered."""

    async def run() -> None:
        heard: list[str] = []
        async with FakeApi().serve() as server:
            server.put(paths.reset("old"), {"metadata": {"uid": "1"}})
            server.put(paths.pod(RESETS, "p-old"), pod("of-old"))
            server.put(paths.pod("elsewhere", "p"), pod("elsewhere"))
            source = eventsource.EventSource(server.configuration(), namespace=RESETS, enqueue=heard.append)
            task = asyncio.create_task(source.run())
            try:
                await until(lambda: len(server.watches) == 2 or task.done())
                await check(server, heard, task)
            finally:
                await asyncio.to_thread(source.stop, 10.0)
                await asyncio.wait({task}, timeout=5)

    asyncio.run(run())


def test_all_there_is_and_all_that_happens_is_named_and_nothing_is_written() -> None:
    """Resets of the whole cluster, pods of one namespace and by label; kopf itself writes, posts and patches nothing."""

    async def check(server: FakeApi, heard: list[str], _: object) -> None:
        await until(lambda: sorted(heard) == ["of-old", "old"])
        heard.clear()
        server.put(paths.reset("new"), {"metadata": {"uid": "2"}})
        server.put(paths.pod(RESETS, "p-new"), pod("of-new"))
        server.put(paths.pod(RESETS, "p-odd"), pod(None))
        await until(lambda: sorted(heard) == ["new", "of-new"])
        heard.clear()
        server.remove(paths.reset("new"))
        server.remove(paths.pod(RESETS, "p-new"))
        await until(lambda: sorted(heard) == ["new", "of-new"])
        assert server.writes() == []
        asked = {path for _, path, _ in server.requests}
        assert not any("customresourcedefinitions" in path or path.endswith("/namespaces") for path in asked)
        watched = sorted(server.watches)
        assert watched[0].startswith(f"/api/v1/namespaces/{RESETS}/pods?")
        assert "labelSelector=cleanslate.dev/reset-uid" in watched[0].replace("%2F", "/")
        assert watched[1].startswith("/apis/cleanslate.dev/v1alpha1/gpunoderesets?")

    with_source(check)


def test_an_api_server_that_is_away_does_not_end_it() -> None:
    """It asks again, with pauses, for as long as it takes."""

    async def check(server: FakeApi, heard: list[str], task: "asyncio.Task[BaseException | None]") -> None:
        server.faults.append(fakeapi.always(lambda: status(503, "ServiceUnavailable")))
        server.drop_watches()
        asked = len(server.requests)
        await until(lambda: len(server.requests) > asked + 2)
        server.put(paths.reset("later"), {"metadata": {"uid": "3"}})
        server.faults.clear()
        await until(lambda: "later" in heard)
        await until(lambda: len(server.watches) == 4)
        assert not task.done()

    with_source(check)


def test_pauses_grow_to_half_a_minute_and_never_end() -> None:
    """kopf gives up, and ends, when its pauses are used up."""
    pauses = iter(handlers.Pauses())
    first = [next(pauses) for _ in range(100)]
    assert 0.5 <= first[0] <= 1.0
    assert all(15 <= pause <= 30 for pause in first[10:])
    assert 0.5 <= next(iter(handlers.Pauses())) <= 1.0


def test_kopf_signs_in_as_the_other_client_does() -> None:
    """The same server, certificates and token, token fresh."""

    async def check() -> None:
        server = FakeApi()
        server.url = "http://127.0.0.1:6443"
        configuration = server.configuration()
        configuration.api_key["BearerToken"] = "bearer abc"
        configuration.ssl_ca_cert = "/ca.crt"
        made = await handlers.credentials(configuration)
        assert (made.server, made.ca_path, made.scheme, made.token) == (server.url, "/ca.crt", "bearer", "abc")
        assert made.insecure is False

    asyncio.run(check())
