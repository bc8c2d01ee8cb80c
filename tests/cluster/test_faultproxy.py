"""The fault proxy passes what it should not touch, and makes each fault as a client sees it."""

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import select
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cluster import littleworld
from cluster.faultproxy import FaultProxy
from cluster.littleapi import LittleApi
from cluster.littleworld import World
from cluster.pki import Authority
from cluster.plainclient import Client
from cluster.programs.proxy import listener

_NODE = "/api/v1/nodes/n"
_STATUS = "/api/v1/nodes/n/status"
_CUT = (ConnectionResetError, ssl.SSLEOFError, http.client.RemoteDisconnected)


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_what_is_asked_and_answered_passes_unchanged(world: World) -> None:
    """Path and query byte for byte, body, status, repeated headers and the user agent are not the proxy's business."""
    target = "/api/v1/nodes/a%2Fb%20c?fieldManager=x%26y&force=true&empty="
    answer = world.client.ask("PATCH", target, b'{"a": 1}', User_Agent="kubectl/v1")
    assert world.api.asked == [("PATCH", target)]
    assert (answer.code, answer.json(), answer.headers["Asked-As"]) == (200, {"a": 1}, "kubectl/v1")
    assert answer.headers.get_all("Warning") == ['299 - "one"', '299 - "two"']
    assert world.client.ask("GET", "/api/v1/nodes/none").code == 404


def test_bodies_of_any_size_pass(world: World) -> None:
    """No limit of the proxy's own lies below the API server's."""
    body = os.urandom(30_000_000)
    assert world.client.ask("PUT", _NODE, body).body == body
    assert world.client.ask("GET", _NODE).body == body


def test_large_body_announced_by_expect_passes(world: World) -> None:
    """curl asks before it sends a large body, and is told to go on."""
    assert world.client.ask("PUT", _NODE, b"x" * 2_000_000, Expect="100-continue").code == 200
    assert len(world.api.objects[_NODE]) == 2_000_000


def test_compressed_answer_stays_compressed(world: World) -> None:
    """gzip is between the client and the API server."""
    world.api.objects[_NODE] = b"x" * 10_000
    answer = world.client.ask("GET", _NODE, Accept_Encoding="gzip", Accept="application/json")
    assert (answer.headers["Content-Encoding"], gzip.decompress(answer.body)) == ("gzip", b"x" * 10_000)
    assert int(answer.headers["Content-Length"]) == len(answer.body)


def test_client_without_token_is_the_identity_and_with_one_itself(world: World) -> None:
    """A token is never overruled by the proxy's certificate."""
    assert world.client.ask("GET", _NODE).headers["Asked-By"] == "admin"
    assert world.client_with("operator-token").ask("GET", _NODE).headers["Asked-By"] == "operator-token"


def test_without_identity_a_client_stays_anonymous(authority: Authority, tmp_path: Path) -> None:
    """The proxy lends nobody what it was not given."""
    with LittleApi(authority) as api, littleworld.proxy_to(api, authority, tmp_path, identity=None) as proxy:
        client = Client(proxy.url, authority.certificate)
        assert client.ask("GET", _NODE).headers["Asked-By"] == "anonymous"


def test_kubeconfig_leads_to_the_proxy(world: World) -> None:
    """Whoever uses it meets the proxy, trusts it by the cluster's authority, and brings the token."""
    plain, other = (json.loads(world.proxy.kubeconfig(token=token).read_text()) for token in (None, "t"))
    assert plain["clusters"][0]["cluster"] == {"server": world.proxy.url, "certificate-authority": str(world.client.ca)}
    assert (plain["users"][0]["user"].get("token"), other["users"][0]["user"]) == (None, {"token": "t"})


def test_answer_is_a_status_and_the_api_server_is_not_asked(world: World) -> None:
    """429 as the API server says it, with its header and details; other requests are not touched."""
    with world.proxy.answering(429, verb="patch", resource="nodes/status", retry_after_s=3) as fault:
        answer = world.client.ask("PATCH", _STATUS, b"{}")
        assert world.client.ask("PATCH", _NODE, b"{}").code == 200
        assert world.client.ask("PUT", _STATUS, b"{}").code == 200
        assert fault.hits == 1
    assert (answer.code, answer.headers["Retry-After"]) == (429, "3")
    said = answer.json()
    assert (said["kind"], said["reason"], said["code"]) == ("Status", "TooManyRequests", 429)
    assert said["details"] == {"name": "n", "kind": "nodes", "retryAfterSeconds": 3}
    assert ("PATCH", _STATUS) not in world.api.asked
    assert world.client.ask("PATCH", _STATUS, b"{}").code == 200
    assert fault.hits == 1


def test_conflict_of_a_create_is_already_exists(world: World) -> None:
    """409 has two reasons, and clients tell them apart."""
    with world.proxy.answering(409, resource="nodes"):
        created = world.client.ask("POST", "/api/v1/nodes", b'{"metadata": {"name": "n"}}')
        updated = world.client.ask("PUT", _NODE, b"{}")
    assert (created.json()["reason"], updated.json()["reason"]) == ("AlreadyExists", "Conflict")
    assert created.json()["details"]["name"] == "n"


def test_fault_for_some_times_lets_the_next_one_pass(world: World) -> None:
    """`times` counts requests that were hit."""
    with world.proxy.answering(500, times=2, verb="update") as fault:
        assert [world.client.ask("PUT", _NODE, b"{}").code for _ in range(3)] == [500, 500, 200]
        assert fault.hits == 2


def test_first_fault_that_matches_counts(world: World) -> None:
    """Of several active faults the one that began first decides, and the next one once that is spent."""
    with world.proxy.answering(500, name="n", times=1) as first, world.proxy.answering(503) as second:
        codes = [world.client.ask("GET", path).code for path in (_NODE, "/api/v1/nodes/m", _NODE)]
    assert (codes, first.hits, second.hits) == ([500, 503, 503], 1, 2)


def test_names_are_patterns_and_fields_take_several(world: World) -> None:
    """A selection is a pattern a field, or several of which one must match."""
    with world.proxy.answering(500, verb=("get", "delete"), name="gpu-*"):
        asked = [("GET", "gpu-1"), ("DELETE", "gpu-2"), ("PUT", "gpu-1"), ("GET", "cpu-1")]
        codes = [world.client.ask(method, f"/api/v1/nodes/{name}", b"{}").code for method, name in asked]
    assert codes == [500, 500, 200, 404]


@pytest.mark.parametrize(
    ("selection", "message"),
    [({"verb": "apply"}, "verb 'apply': cannot match anything"), ({"kind": "Node"}, "kind: cannot select requests")],
    ids=["unknown verb", "unknown field"],
)
def test_selection_that_matches_nothing_is_refused(world: World, selection: dict[str, str], message: str) -> None:
    """A slip of the pen is not a fault that never hits."""
    with pytest.raises(ValueError, match=message):
        world.proxy.answering(500, **selection)  # type: ignore[arg-type]


def test_write_happens_though_the_client_is_told_otherwise(world: World) -> None:
    """`upstream_first`: the world has changed, the answer is 500."""
    with world.proxy.answering(500, upstream_first=True):
        assert world.client.ask("PUT", _NODE, b"written").code == 500
    assert world.api.objects[_NODE] == b"written"


def test_lost_answer_leaves_the_write_and_a_cut_connection(world: World) -> None:
    """The client cannot know whether it happened; it did."""
    with world.proxy.losing_answers(verb="update") as fault, pytest.raises(_CUT):
        world.client.ask("PUT", _NODE, b"written")
    assert (world.api.objects[_NODE], fault.hits) == (b"written", 1)
    assert [one.code for one in world.proxy.requests(verb="update")] == [None]


@pytest.mark.parametrize("after_headers", [False, True], ids=["at once", "after the headers"])
def test_reset_is_a_reset(world: World, after_headers: bool) -> None:
    """The client's kernel says ECONNRESET, which is not what an early end of file is."""
    world.api.objects[_NODE] = b"x" * 1000
    with world.proxy.resetting(after_headers=after_headers):
        head, error = asyncio.run(_read_all(world.client))
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") == after_headers
    assert b"xxx" not in head
    assert isinstance(error, ConnectionResetError)
    assert bool(world.api.asked) == after_headers


async def _read_all(client: Client) -> tuple[bytes, OSError | None]:
    """By asyncio, since Python's blocking TLS sockets took a reset for an end of file until 3.11.9 (gh-115627)."""
    context = ssl.create_default_context(cafile=str(client.ca))
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(client.url).port, ssl=context)
    read = b""
    try:
        writer.write(b"GET %s HTTP/1.1\r\nHost: proxy\r\n\r\n" % _NODE.encode())
        while piece := await asyncio.wait_for(reader.read(4096), 10):
            read += piece
    except OSError as error:
        return read, error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await asyncio.wait_for(writer.wait_closed(), 10)
    return read, None


@pytest.mark.parametrize(
    ("after_bytes", "length"), [(None, 500), (3, 3), (0, 0)], ids=["half", "three bytes", "nothing"]
)
def test_truncated_body_ends_early(world: World, after_bytes: int | None, length: int) -> None:
    """The headers promise more than comes."""
    world.api.objects[_NODE] = b"x" * 1000
    with world.proxy.truncating(after_bytes=after_bytes), pytest.raises(http.client.IncompleteRead) as caught:
        world.client.ask("GET", _NODE)
    assert (len(caught.value.partial), caught.value.expected) == (length, 1000 - length)


def test_delayed_request_takes_so_long(world: World) -> None:
    """The delay lies before the API server."""
    with world.proxy.delaying(0.3):
        began = time.monotonic()
        assert world.client.ask("PUT", _NODE, b"{}").code == 200
    assert 0.3 <= time.monotonic() - began < 3


def test_held_request_passes_when_the_block_ends(world: World, aside: ThreadPoolExecutor) -> None:
    """While it is held neither side hears anything; afterwards all goes on. A delay ends with its block too."""
    with world.proxy.holding(verb="update") as holding, world.proxy.delaying(60, verb="get") as delaying:
        held, delayed = (
            aside.submit(world.client.ask, "PUT", _NODE, b"{}"),
            aside.submit(world.client.ask, "GET", _NODE),
        )
        holding.wait()
        delaying.wait()
        assert world.client.ask("DELETE", "/api/v1/nodes/m").code == 404
        assert (held.done(), delayed.done(), world.api.asked) == (False, False, [("DELETE", "/api/v1/nodes/m")])
    assert held.result(10).code == 200
    assert delayed.result(10).code in (200, 404)


def test_down_refuses_cuts_and_comes_back_at_the_same_address(world: World, aside: ThreadPoolExecutor) -> None:
    """As an API server that has ended: no connection at all, and those that there were are reset."""
    with world.proxy.holding() as holding:
        held = aside.submit(world.client.ask, "GET", _NODE)
        holding.wait()
        with world.proxy.down() as outer, world.proxy.down():
            assert isinstance(held.exception(10), _CUT)
            with pytest.raises(ConnectionRefusedError):
                world.client.ask("GET", _NODE)
        assert outer.hits == 1
    assert world.client.ask("PUT", _NODE, b"{}").code == 200


def test_api_server_that_ends_is_a_cut_connection(mortal_world: World) -> None:
    """The proxy makes up no answer for one that is not there."""
    mortal_world.api.stop()
    with pytest.raises(_CUT):
        mortal_world.client.ask("GET", _NODE)


def test_requests_are_recorded_in_order(world: World) -> None:
    """So a test can say how often, and for what, the API server was asked."""
    began = time.time()
    world.client.ask("PUT", _NODE, b"{}", User_Agent="one")
    middle = time.time()
    world.client.ask("PATCH", "/apis/apps/v1/namespaces/a/daemonsets/d/scale", b"{}", User_Agent="two")
    world.client.ask("GET", "/api/v1/nodes/none", User_Agent="two")
    first, second, third = world.proxy.requests()
    assert (first.verb, first.resource, first.namespace, first.name, first.user_agent, first.code) == (
        "update", "nodes", "", "n", "one", 200,
    )  # fmt: skip
    assert (second.verb, second.group, second.resource, second.namespace) == ("patch", "apps", "daemonsets/scale", "a")
    assert (third.code, began <= first.time_s <= middle <= second.time_s) == (404, True)
    assert world.proxy.requests(user_agent="two", since_s=middle) == (second, third)
    assert world.proxy.requests(resource="daemonsets") == ()
    assert world.proxy.requests(resource="daemonsets/*") == (second,)


def test_waiting_for_requests_ends_when_they_are_answered(world: World, aside: ThreadPoolExecutor) -> None:
    """A test awaits what the operator does, instead of sleeping; what does not come is an error that says so."""
    awaited = aside.submit(world.proxy.wait_for_requests, 2, verb="update")
    for _ in range(2):
        world.client.ask("PUT", _NODE, b"{}")
    assert [one.code for one in awaited.result(10)] == [200, 200]
    with pytest.raises(TimeoutError, match=r"2 requests like .* 3 answered were expected"):
        world.proxy.wait_for_requests(3, verb="update", deadline_s=0.1)
    with world.proxy.holding() as fault, pytest.raises(TimeoutError, match="1 hits within 0 s, 0 came"):
        fault.wait(deadline_s=0.1)


def test_proxy_that_cannot_start_says_why(world: World, authority: Authority) -> None:
    """The reason is in the error, not only in a log."""
    proxy = littleworld.proxy_to(world.api, authority, world.folder, key=world.folder / "none.key")
    with pytest.raises(RuntimeError, match=r"cannot serve: .*No such file"):
        proxy.__enter__()


_STARTER = """
import sys
from pathlib import Path
from cluster.faultproxy import FaultProxy
ca, certificate, key, folder = map(Path, sys.argv[1:])
with FaultProxy(upstream="https://127.0.0.1:1", ca=ca, certificate=certificate, key=key, folder=folder) as proxy:
    print(proxy.pid, flush=True)
    sys.stdin.read()
"""


def test_proxy_ends_with_its_starter(authority: Authority, tmp_path: Path) -> None:
    """SIGKILL to the tests leaves no proxy behind."""
    keys = authority.folder
    paths = (keys / "ca.crt", keys / "proxy.crt", keys / "proxy.key", tmp_path)
    argv = [sys.executable, "-c", _STARTER, *map(str, paths)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as starter:
        assert starter.stdout is not None
        proxy = os.pidfd_open(int(starter.stdout.readline()))
        starter.send_signal(signal.SIGKILL)
    try:
        assert select.select([proxy], [], [], 10)[0], "the proxy lives on"
    finally:
        os.close(proxy)


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """A process in a network namespace of its own."""
    if os.geteuid() != 0:
        pytest.fail("cannot make a network namespace: not root; run the suite as root")
    script = "ip link set lo up && echo up && exec sleep infinity"
    with subprocess.Popen(["unshare", "--net", "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process.pid
        process.kill()


def test_api_server_in_another_namespace_is_reached_from_here(
    authority: Authority, tmp_path: Path, elsewhere: int
) -> None:
    """The proxy listens here and connects there, also after it was down."""
    with LittleApi(authority, namespace=f"/proc/{elsewhere}/ns/net") as api:
        with littleworld.proxy_to(api, authority, tmp_path, connect_in=elsewhere) as proxy:
            client = Client(proxy.url, authority.certificate)
            with proxy.down(), pytest.raises(ConnectionRefusedError):
                client.ask("GET", _NODE)
            assert client.ask("PUT", _NODE, b"{}").headers["Asked-By"] == "admin"
        with pytest.raises(ConnectionRefusedError):
            Client(api.url, authority.certificate).ask("GET", _NODE)


def test_proxy_listens_in_another_namespace(world: World, authority: Authority, elsewhere: int) -> None:
    """A client there meets it, a client here does not; also after it was down."""
    place = Path(f"/proc/{elsewhere}/ns/net")
    with littleworld.proxy_to(world.api, authority, world.folder, listen_in=place) as proxy:
        client = Client(proxy.url, authority.certificate)
        with proxy.down():
            assert isinstance(_ask_from(place, client), ConnectionRefusedError)
        assert _ask_from(place, client) == 404
        with pytest.raises(ConnectionRefusedError):
            client.ask("GET", _NODE)


def _ask_from(place: Path, client: Client) -> int | BaseException:
    """In a thread, since a namespace is a thread's."""

    def ask() -> int:
        listener.enter(str(place))
        return client.ask("GET", _NODE).code

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask)
        return asked.exception(10) or asked.result()


def test_two_proxies_stand_side_by_side(world: World, authority: Authority, tmp_path: Path) -> None:
    """A fault is its own proxy's: an operator can be cut off while its rival is not."""
    other: FaultProxy = littleworld.proxy_to(world.api, authority, tmp_path)
    with other, world.proxy.answering(500):
        assert world.client.ask("GET", _NODE).code == 500
        assert Client(other.url, world.client.ca).ask("GET", _NODE).code == 404
