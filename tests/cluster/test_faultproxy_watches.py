"""Streams pass the fault proxy event by event, and its faults on watches are what a client of them sees."""

import asyncio
import contextlib
import http.client
import json
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest

from cluster.littleapi import PROTOBUF, event
from cluster.littleworld import World

_NODES = "/api/v1/nodes?watch=true"
_PODS = "/api/v1/namespaces/a/pods?watch=true"
_GONE = {"type": "ERROR", "code": 410, "reason": "Expired"}


def _name(line: bytes) -> str:
    return str(json.loads(line)["object"]["metadata"]["name"])


def _error(line: bytes) -> dict[str, object]:
    said = json.loads(line)
    return {"type": said["type"], "code": said["object"]["code"], "reason": said["object"]["reason"]}


def _is_cut(stream: http.client.HTTPResponse) -> bool:
    """Whether the stream ends, without its proper end."""
    try:
        stream.read()
    except (http.client.IncompleteRead, ConnectionResetError):
        return True
    return False


def test_events_pass_one_by_one(world: World) -> None:
    """A watch is there before its first event, and each event comes at once, in pieces or in one."""
    with world.client.stream(_NODES) as stream:
        assert (stream.status, stream.headers["Content-Type"]) == (200, "application/json")
        world.api.await_watchers(1)
        for name in ("a", "b"):
            world.api.emit(event(name))
            assert _name(stream.readline()) == name
        world.api.emit(event("c") + event("d") + event("e")[:9])
        assert [_name(stream.readline()) for _ in "cd"] == ["c", "d"]
        world.api.emit(event("e")[9:])
        assert _name(stream.readline()) == "e"
        world.api.emit(None)
        assert stream.read() == b""
    assert [(one.verb, one.resource, one.code) for one in world.proxy.requests()] == [("watch", "nodes", 200)]


def test_followed_log_passes_as_it_is_written(world: World) -> None:
    """`logs -f` has lines that are no JSON, and no end."""
    with world.client.stream("/api/v1/namespaces/a/pods/p/log?follow=true") as stream:
        world.api.await_watchers(1)
        world.api.emit(b"half")
        assert stream.read1() == b"half"
        world.api.emit(b" a line\n")
        assert stream.readline() == b" a line\n"


def test_watch_ends_at_the_api_server_when_its_client_leaves(world: World) -> None:
    """A quiet watch too: the API server's end does not wait for an event."""
    with world.client.stream(_NODES), world.client.stream(_PODS):
        world.api.await_watchers(2)
    world.api.await_watchers(0)


def test_watch_is_cut_when_the_api_server_ends(mortal_world: World) -> None:
    """An API server that dies is not a stream that came to its end."""
    with mortal_world.client.stream(_NODES) as stream:
        mortal_world.api.await_watchers(1)
        mortal_world.api.stop()
        assert _is_cut(stream)


def test_running_watch_is_cut_now_and_a_new_one_is_not(world: World) -> None:
    """Of those that run only the chosen ones end, here and at the API server."""
    with world.client.stream(_NODES) as nodes, world.client.stream(_PODS) as pods:
        world.api.await_watchers(2)
        with world.proxy.cutting_watches(resource="nodes") as fault:
            assert _is_cut(nodes)
            world.api.await_watchers(1)
            with world.client.stream(_NODES) as again:
                world.api.await_watchers(2)
                world.api.emit(event("a"))
                assert [_name(stream.readline()) for stream in (pods, again)] == ["a", "a"]
            assert fault.hits == 1


def test_clean_end_is_that_of_a_timeout(world: World) -> None:
    """The client sees a stream that is over, as the API server ends each one after minutes."""
    with world.client.stream(_NODES) as stream:
        world.api.await_watchers(1)
        with world.proxy.cutting_watches(cleanly=True):
            assert stream.read() == b""


@pytest.mark.parametrize("count", [0, 1, 3])
def test_new_watch_is_cut_after_some_events(world: World, count: int) -> None:
    """All of those events arrive, also if more came in the same piece, and a running watch is left alone."""
    with world.client.stream(_PODS) as running:
        world.api.await_watchers(1)
        with world.proxy.cutting_watches(now=False, after_events=count, times=1) as fault:
            with world.client.stream(_NODES) as stream:
                fault.wait() if count == 0 else world.api.await_watchers(2)
                world.api.emit(b"".join(map(event, "abcde")))
                assert [_name(stream.readline()) for _ in range(count)] == list("abcde"[:count])
                assert _is_cut(stream)
            with world.client.stream(_NODES) as spared:
                world.api.await_watchers(2)
                world.api.emit(b"".join(map(event, "vwxyz")))
                assert [_name(spared.readline()) for _ in "vwxyz"] == list("vwxyz")
            assert fault.hits == 1
        assert [_name(running.readline()) for _ in "abcde"] == list("abcde")


def test_new_watch_is_cut_after_some_seconds(world: World) -> None:
    """Whether or not an event came."""
    with world.proxy.cutting_watches(after_s=0.2) as fault, world.client.stream(_NODES) as stream:
        world.api.await_watchers(1)
        assert fault.hits == 0
        assert _is_cut(stream)
        assert fault.hits == 1


def test_protobuf_watch_is_cut_between_its_events(world: World) -> None:
    """client-go's watches of built-in kinds are frames behind their length, not lines."""
    frames = [len(body).to_bytes(4, "big") + body for body in (b"k8s\n1", b"k8s\n" + b"2" * 70_000, b"k8s\n3")]
    with world.proxy.cutting_watches(after_events=2), world.client.stream(_NODES, Accept=PROTOBUF) as stream:
        world.api.await_watchers(1)
        world.api.emit(b"".join(frames))
        assert stream.read(len(frames[0] + frames[1])) == frames[0] + frames[1]
        assert _is_cut(stream)


def test_gone_ends_running_watches_by_an_error_event(world: World) -> None:
    """410 comes as the API server's watch cache says it: in the stream, which then ends properly."""
    with world.client.stream(_NODES) as stream:
        world.api.await_watchers(1)
        world.api.emit(event("a"))
        assert _name(stream.readline()) == "a"
        with world.proxy.watches_gone(times=1) as fault:
            assert _error(stream.readline()) == _GONE
            assert (stream.read(), fault.hits) == (b"", 1)
            with world.client.stream(_NODES):
                world.api.await_watchers(1)


def test_gone_is_the_first_event_of_a_new_watch(world: World) -> None:
    """The API server is not asked; a list passes, as the client needs it to start anew."""
    with world.proxy.watches_gone(resource="nodes") as fault:
        with world.client.stream(_NODES) as stream:
            assert (stream.status, _error(stream.readline()), stream.read()) == (200, _GONE, b"")
        assert world.client.ask("GET", "/api/v1/nodes").code == 404
        assert (world.api.asked, fault.hits) == ([("GET", "/api/v1/nodes")], 1)


def test_gone_cuts_a_running_protobuf_watch(world: World) -> None:
    """A JSON event in it would be garbage, which no API server sends."""
    with world.client.stream(_NODES, Accept=PROTOBUF) as stream:
        world.api.await_watchers(1)
        with world.proxy.watches_gone():
            assert _is_cut(stream)


def test_stalled_watch_is_silent_and_then_delivers_all(world: World) -> None:
    """Running and new streams stay open without a word; nothing is lost when the stall ends."""
    with world.client.stream(_NODES) as old, ThreadPoolExecutor(2) as aside:
        world.api.await_watchers(1)
        with contextlib.ExitStack() as streams:
            with world.proxy.stalling_watches(resource="nodes") as fault:
                new, pods = (streams.enter_context(world.client.stream(path)) for path in (_NODES, _PODS))
                world.api.await_watchers(3)
                world.api.emit(event("a") + event("b"))
                lines = [aside.submit(stream.readline) for stream in (old, new)]
                fault.wait(hits=2)
                assert [_name(pods.readline()) for _ in "ab"] == ["a", "b"]
                assert [line.done() for line in lines] == [False, False]
            assert [_name(line.result(10)) for line in lines] == ["a", "a"]
            assert [_name(stream.readline()) for stream in (old, new)] == ["b", "b"]


def test_stalled_watch_can_be_cut(world: World) -> None:
    """Silence first, then the end, as with a connection that a router has forgotten."""
    with world.client.stream(_NODES) as stream, world.proxy.stalling_watches() as stall:
        world.api.await_watchers(1)
        world.api.emit(event("a"))
        stall.wait()
        with world.proxy.cutting_watches():
            assert _is_cut(stream)


def test_answer_faults_hit_watches_too(world: World) -> None:
    """A watch can be refused like any request; faults that need an answer's end leave it alone."""
    with world.proxy.losing_answers() as lost, world.client.stream(_NODES):
        world.api.await_watchers(1)
        with world.proxy.answering(429, verb="watch", retry_after_s=1):
            assert world.client.ask("GET", _NODES).code == 429
        assert lost.hits == 0


def test_running_watches_survive_the_hold_of_new_requests(world: World) -> None:
    """`holding` is about requests that come; streams go on."""
    with world.client.stream(_NODES) as stream:
        world.api.await_watchers(1)
        with world.proxy.holding():
            world.api.emit(event("a"))
            assert _name(stream.readline()) == "a"


async def _say(world: World, path: str, *words: bytes, token: str | None = None) -> list[bytes]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    trust = ssl.create_default_context(cafile=str(world.client.ca))
    speaking: dict[str, Any] = {"ssl": trust, "protocols": ["v5.channel.k8s.io"], "max_msg_size": 0}
    async with asyncio.timeout(10), aiohttp.ClientSession(headers=headers) as session:
        async with session.ws_connect(world.proxy.url + path, **speaking) as socket:
            assert socket.protocol == "v5.channel.k8s.io"
            below = socket.get_extra_info("socket")
            answers = [await _answer(socket, word) for word in words]
        await session.close()
        while below.fileno() != -1:  # aiohttp leaves the closing to a loop that would end before
            await asyncio.sleep(0)
    return answers


async def _answer(socket: aiohttp.ClientWebSocketResponse, word: bytes) -> bytes:
    await socket.send_bytes(word)
    return await socket.receive_bytes()


def test_web_socket_passes(world: World) -> None:
    """exec and port-forward: messages of any size both ways, as the identity or as the token's owner."""
    path = "/api/v1/namespaces/a/pods/p/exec?command=sh"
    large = b"x" * 10_000_000
    assert asyncio.run(_say(world, path, b"ls", large)) == [b"admin:ls", b"admin:" + large]
    assert asyncio.run(_say(world, path, b"ls", token="t")) == [b"t:ls"]
    assert [(one.resource, one.code) for one in world.proxy.requests()] == [("pods/exec", 101)] * 2


def test_web_socket_refused_by_the_api_server_is_refused(world: World) -> None:
    """With the same code."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        asyncio.run(_say(world, "/api/v1/namespaces/a/pods/refused/exec"))
    assert caught.value.status == 403


def test_other_upgrade_is_refused_with_a_reason(world: World) -> None:
    """SPDY does not pass, and says so."""
    answer = world.client.ask("POST", "/api/v1/namespaces/a/pods/p/exec", Connection="Upgrade", Upgrade="SPDY/3.1")
    assert (answer.code, answer.json()["kind"]) == (501, "Status")
    assert "only WebSockets pass" in answer.json()["message"]
