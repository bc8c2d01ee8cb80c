"""The client of the API server, against a server in memory: what it sends, what it makes of answers, and that it never hangs."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from cleanslate_operator import api, connection, paths
from unit.operator import fakeapi
from unit.operator.fakeapi import FakeApi

NODE = paths.node("gpu-17")


def with_api(check: Callable[[FakeApi, api.Api], Awaitable[None]]) -> list[tuple[str, str]]:
    """Run a check on a fresh server; returns what was counted."""
    counted: list[tuple[str, str]] = []

    async def run() -> None:
        async with FakeApi().serve() as server:
            client = api.Api(server.configuration(), count=lambda verb, code: counted.append((verb, code)))
            try:
                await check(server, client)
            finally:
                await client.close()

    asyncio.run(run())
    return counted


def test_an_object_is_made_read_changed_and_deleted() -> None:
    """Every verb does to the object what it says, and each request is counted once."""

    async def check(server: FakeApi, client: api.Api) -> None:
        await client.create(paths.nodes(), {"metadata": {"name": "gpu-17", "uid": "u"}, "spec": {"a": 1}})
        await client.merge_patch(NODE, {"spec": {"b": 2}})
        await client.apply(NODE, {"spec": {"c": 3}})
        assert (await client.get(NODE))["spec"] == {"a": 1, "b": 2, "c": 3}
        await client.replace(NODE, {"metadata": {"name": "gpu-17", "uid": "u"}, "spec": {}})
        assert server.objects[NODE]["spec"] == {}
        await client.delete(NODE, uid="u", grace_s=0)
        assert server.objects == {}
        assert server.requests[-1][2] == {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": "u"},
            "gracePeriodSeconds": 0,
        }
        assert server.headers[0]["User-Agent"].startswith("cleanslate-operator/")

    counted = with_api(check)
    assert counted == [
        ("create", "201"),
        ("patch", "200"),
        ("apply", "200"),
        ("get", "200"),
        ("replace", "200"),
        ("delete", "200"),
    ]


def test_apply_names_the_field_manager_and_its_own_format() -> None:
    """Server-side apply is under the operator's name and takes fields that others hold."""
    asked: list[web.Request] = []

    async def check(server: FakeApi, client: api.Api) -> None:
        async def note(request: web.Request) -> None:
            asked.append(request)

        server.faults.append(note)
        await client.apply(NODE, {"spec": {}})
        assert dict(asked[0].query) == {"fieldManager": "cleanslate-operator", "force": "true"}
        assert asked[0].headers["Content-Type"] == "application/apply-patch+yaml"

    with_api(check)


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (400, "BadRequest", api.Invalid),
        (401, "Unauthorized", api.Denied),
        (403, "Forbidden", api.Denied),
        (404, "NotFound", api.NotFound),
        (409, "Conflict", api.Conflict),
        (410, "Expired", api.Gone),
        (413, "RequestEntityTooLarge", api.Invalid),
        (422, "Invalid", api.Invalid),
        (429, "TooManyRequests", api.Throttled),
        (500, "InternalError", api.Unavailable),
        (503, "ServiceUnavailable", api.Unavailable),
        (504, "Timeout", api.Unavailable),
    ],
)
def test_each_refusal_has_its_class_and_says_what_the_server_said(
    code: int, reason: str, error: type[api.ApiError]
) -> None:
    """A caller branches on the class; a person reads path, verb, status, reason and message."""

    async def check(server: FakeApi, client: api.Api) -> None:
        server.faults.append(fakeapi.always(lambda: fakeapi.status(code, reason, "so it is")))
        with pytest.raises(api.ApiError) as raised:
            await client.get(NODE)
        assert type(raised.value) is error
        assert str(raised.value) == f"/api/v1/nodes/gpu-17: cannot get: {code} {reason}: so it is"

    assert with_api(check) == [("get", str(code))]


def test_an_eviction_that_a_budget_forbids_names_the_budget_and_when_to_ask_again() -> None:
    """Throttled carries the causes and the wait, also from a hostile Status."""
    cause = {
        "reason": "DisruptionBudget",
        "message": "The disruption budget llama needs 2 healthy pods and has 2 currently",
    }

    async def check(server: FakeApi, client: api.Api) -> None:
        answer = fakeapi.status(
            429, "TooManyRequests", "Cannot evict", causes=[cause, "no cause"], retryAfterSeconds=10
        )
        server.faults.append(fakeapi.once(answer))
        with pytest.raises(api.Throttled) as raised:
            await client.create(paths.eviction("ml", "llama-0"), {"kind": "Eviction"})
        assert raised.value.causes == (api.Cause(reason=cause["reason"], message=cause["message"]),)
        assert raised.value.retry_after_s == 10.0
        server.faults.append(fakeapi.once(web.Response(status=429, headers={"Retry-After": "99999"}, body=b"[1")))
        with pytest.raises(api.Throttled) as raised:
            await client.get(NODE)
        assert raised.value.retry_after_s == 300.0
        assert raised.value.message == "no Status in the answer"

    with_api(check)


def test_what_exists_already_is_told_from_another_version() -> None:
    """Both are 409."""

    async def check(server: FakeApi, client: api.Api) -> None:
        body = {"metadata": {"name": "gpu-17"}}
        made = await client.create(paths.nodes(), dict(body))
        with pytest.raises(api.Conflict) as raised:
            await client.create(paths.nodes(), dict(body))
        assert raised.value.already_exists
        server.put(NODE, {"metadata": {"name": "gpu-17"}})
        with pytest.raises(api.Conflict) as raised:
            await client.replace(NODE, made)
        assert not raised.value.already_exists
        with pytest.raises(api.Conflict):
            await client.delete(NODE, uid="another's")
        assert NODE in server.objects

    with_api(check)


def test_a_silent_server_is_left_at_the_deadline() -> None:
    """No request outlasts its time: a worker is never held up by a server that says nothing."""

    async def check(server: FakeApi, client: api.Api) -> None:
        server.faults.append(fakeapi.silence)
        started = time.monotonic()
        with pytest.raises(api.Unavailable, match=r"gpu-17: cannot get: no answer in 0\.1 s; tried again by itself"):
            await client.get(NODE, timeout_s=0.1)
        assert time.monotonic() - started < 2

    assert with_api(check) == [("get", "none")]


@pytest.mark.parametrize(
    "answer", [b"", b"<html>", b"[]", b"\xff\xfe", b"[" * 100_000], ids=["none", "html", "list", "raw", "deep"]
)
def test_an_answer_that_is_no_object_is_unavailable(answer: bytes) -> None:
    """Whatever a proxy puts in between, the caller gets an ApiError."""

    async def check(server: FakeApi, client: api.Api) -> None:
        server.faults.append(fakeapi.always(lambda: web.Response(body=answer)))
        with pytest.raises(api.Unavailable, match=f"answer of {len(answer)} bytes is no JSON object"):
            await client.get(NODE)

    with_api(check)


def test_an_answer_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, whatever the server sends."""
    monkeypatch.setattr(api, "ANSWER_LIMIT_BYTES", 1 << 20)

    async def check(server: FakeApi, client: api.Api) -> None:
        server.faults.append(fakeapi.once(web.Response(body=b"x" * (2 << 20))))
        with pytest.raises(api.Unavailable, match="an answer of more than 1 MiB"):
            await client.get(NODE)

    with_api(check)


def test_no_server_at_all_is_unavailable() -> None:
    """A refused connection is an ApiError as any other."""

    async def run() -> None:
        configuration = connection.Configuration()
        configuration.host = "http://127.0.0.1:1"
        client = api.Api(configuration, count=lambda *_: None)
        with pytest.raises(api.Unavailable, match="cannot get"):
            await client.get(NODE)
        assert client.silent_s() == float("inf")
        await client.close()

    asyncio.run(run())


def test_a_long_list_comes_whole_and_cut_down() -> None:
    """1,201 objects are three pages; what `keep` leaves is all that is kept."""

    async def check(server: FakeApi, client: api.Api) -> None:
        for number in range(1201):
            server.put(paths.node(f"n{number:04}"), {"spec": {"big": "x" * 100}})
        found, version = await client.list(paths.nodes(), keep=lambda node: {"name": node["metadata"]["name"]})
        assert [node["name"] for node in found] == [f"n{number:04}" for number in range(1201)]
        assert found[0] == {"name": "n0000"}
        assert version == "1301"

    assert with_api(check) == [("list", "200")] * 3


def test_a_list_whose_rest_has_expired_is_begun_anew() -> None:
    """410 in the middle costs a second list, not the list."""

    async def check(server: FakeApi, client: api.Api) -> None:
        for number in range(501):
            server.put(paths.node(f"n{number:04}"), {})
        seen: list[str] = []

        async def expire(request: web.Request) -> web.Response | None:
            seen.append(request.query.get("continue", ""))
            return fakeapi.status(410, "Expired") if len(seen) == 2 else None

        server.faults.append(expire)
        found, _ = await client.list(paths.nodes())
        assert len(found) == 501
        assert seen == ["", "500", "", "500"]

    with_api(check)


def test_a_list_that_always_expires_is_given_up() -> None:
    """The queue tries again later; here nothing turns for ever."""

    async def check(server: FakeApi, client: api.Api) -> None:
        server.faults.append(fakeapi.always(lambda: fakeapi.status(410, "Expired")))
        with pytest.raises(api.Gone):
            await client.list(paths.nodes())
        assert len(server.requests) == 3

    with_api(check)


def test_a_follower_writes_nothing_but_may_read() -> None:
    """Behind the fence a write is not even sent."""

    async def check(server: FakeApi, client: api.Api) -> None:
        left_s = 5.0
        fenced = client.fenced(lambda: left_s)
        server.put(NODE, {})
        await fenced.merge_patch(NODE, {"spec": {"a": 1}})
        left_s = 0.0
        writes: list[Awaitable[Any]] = [
            fenced.merge_patch(NODE, {"spec": {"a": 2}}),
            fenced.apply(NODE, {}),
            fenced.replace(NODE, {}),
            fenced.create(paths.nodes(), {"metadata": {"name": "b"}}),
            fenced.delete(NODE),
            fenced.delete_collection(paths.nodes(), "a=b"),
        ]
        for write in writes:
            with pytest.raises(api.NotLeading, match="this replica does not lead any more"):
                await write
        assert server.writes() == [("PATCH", NODE)]
        assert (await fenced.get(NODE))["spec"] == {"a": 1}

    with_api(check)


def test_a_leaders_write_ends_before_its_term() -> None:
    """A write that is on its way when the term ends is given up then, before another replica can lead."""

    async def check(server: FakeApi, client: api.Api) -> None:
        server.faults.append(fakeapi.silence)
        with pytest.raises(api.Unavailable, match=r"no answer in 0\.1 s"):
            await client.fenced(lambda: 0.1).delete(NODE)

    with_api(check)


def test_it_knows_since_when_the_server_is_silent() -> None:
    """Any answer but 5xx counts as heard of."""
    clock = fakeapi.Clock()

    async def run() -> None:
        async with FakeApi().serve() as server:
            client = api.Api(server.configuration(), count=lambda *_: None, clock=clock)
            server.put(NODE, {})
            await client.fenced(lambda: 1.0).get(NODE)
            clock.now_s += 5
            assert client.silent_s() == 5.0
            server.faults.append(fakeapi.always(lambda: fakeapi.status(500, "InternalError")))
            with pytest.raises(api.Unavailable):
                await client.get(NODE)
            assert client.silent_s() == 5.0
            await client.close()

    asyncio.run(run())


def test_a_renewed_token_is_used_and_a_lost_one_is_an_api_error(tmp_path: Any) -> None:
    """The Authorization header is made afresh for each request."""

    async def check(server: FakeApi, client: api.Api) -> None:
        configuration = server.configuration()
        tokens = iter(["one", "two"])

        def renew(made: connection.Configuration) -> None:
            token = next(tokens, None)
            if token is None:
                raise OSError("token: no such file")
            made.api_key["BearerToken"] = f"Bearer {token}"

        configuration.api_key["BearerToken"] = "Bearer zero"
        configuration.refresh_api_key_hook = renew
        with_token = api.Api(configuration, count=lambda *_: None)
        server.put(NODE, {})
        for _ in range(2):
            await with_token.get(NODE)
        with pytest.raises(api.Unavailable, match="token: cannot read"):
            await with_token.get(NODE)
        await with_token.close()
        assert [headers.get("Authorization") for headers in server.headers] == ["Bearer one", "Bearer two"]

    with_api(check)


def test_a_name_cannot_leave_its_place_in_the_path() -> None:
    """What a user or a node calls itself stays one part of the path."""
    assert paths.node("../../evil") == "/api/v1/nodes/..%2F..%2Fevil"
    assert paths.pod("..", "a?b=c") == "/api/v1/namespaces/-/pods/a%3Fb%3Dc"
    assert paths.reset_status("gpu 17") == "/apis/cleanslate.dev/v1alpha1/gpunoderesets/gpu%2017/status"
    assert paths.eviction("ml", "llama-0") == "/api/v1/namespaces/ml/pods/llama-0/eviction"
