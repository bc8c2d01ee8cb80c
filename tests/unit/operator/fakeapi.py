"""An API server in memory, as far as the operator's runtime needs one: versions, conflicts, pages, watches, and faults on demand.

It speaks HTTP on a port of this machine, so that real clients talk to it, kopf included.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

from cleanslate_operator import connection, names

Object = dict[str, Any]
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]

_NAMED = re.compile(
    r"(?P<list>(?:/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/[^/]+)?/(?!namespaces/)[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)
_DISCOVERY: dict[str, Object] = {
    "/api": {"versions": ["v1"]},
    "/apis": {
        "groups": [
            {
                "name": group,
                "preferredVersion": {"version": version, "groupVersion": f"{group}/{version}"},
                "versions": [{"version": version, "groupVersion": f"{group}/{version}"}],
            }
            for group, version in ((names.GROUP, names.VERSION), ("apiextensions.k8s.io", "v1"))
        ]
    },
    "/api/v1": {
        "resources": [
            {"name": "pods", "singularName": "pod", "kind": "Pod", "namespaced": True, "verbs": ["list", "watch"]},
            {
                "name": "namespaces",
                "singularName": "namespace",
                "kind": "Namespace",
                "namespaced": False,
                "verbs": ["list"],
            },
            {"name": "events", "singularName": "event", "kind": "Event", "namespaced": True, "verbs": ["create"]},
        ]
    },
    f"/apis/{names.GROUP}/{names.VERSION}": {
        "resources": [
            {
                "name": names.PLURAL,
                "singularName": "gpunodereset",
                "kind": names.KIND,
                "namespaced": False,
                "verbs": ["get", "list", "watch", "patch"],
            }
        ]
    },
    "/apis/apiextensions.k8s.io/v1": {
        "resources": [
            {
                "name": "customresourcedefinitions",
                "singularName": "customresourcedefinition",
                "kind": "CustomResourceDefinition",
                "namespaced": False,
                "verbs": ["list", "watch"],
            }
        ]
    },
}


def status(code: int, reason: str, message: str = "so it is", **details: Any) -> web.Response:
    """What an API server answers when it does not do what was asked."""
    body = {
        "kind": "Status",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
        "details": details,
    }
    return web.json_response(body, status=code)


class FakeApi:
    """The server. `objects` by path, `requests` as (method, path, body); `faults` answer first if they like."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Fault] = []
        self.url = ""
        self.watches: list[str] = []
        self._version = 100
        self._history: list[tuple[int, str, Object]] = []
        self._streams: list[tuple[str, asyncio.Queue[Object | None]]] = []

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["FakeApi"]:
        """Serve for as long as the context is open."""
        application = web.Application(client_max_size=8 << 20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def configuration(self) -> connection.Configuration:
        """How to reach it."""
        made = connection.Configuration()
        made.host = self.url
        return made

    def put(self, path: str, body: Object) -> Object:
        """Store an object as the server would, and tell the watches."""
        self._version += 1
        new = path not in self.objects
        body.setdefault("metadata", {})["resourceVersion"] = str(self._version)
        body["metadata"].setdefault("name", path.rpartition("/")[2])
        self.objects[path] = body
        self._tell("ADDED" if new else "MODIFIED", path, body)
        return body

    def remove(self, path: str) -> None:
        """Delete an object, and tell the watches."""
        self._version += 1
        self._tell("DELETED", path, self.objects.pop(path))

    def drop_watches(self) -> None:
        """End all watches, as an API server does that restarts."""
        for _, queue in self._streams:
            queue.put_nowait(None)
        self._streams.clear()

    def writes(self) -> list[tuple[str, str]]:
        """Method and path of all that was asked but reads."""
        return [(method, path) for method, path, _ in self.requests if method != "GET"]

    def _tell(self, kind: str, path: str, body: Object) -> None:
        place, event = path.rpartition("/")[0], {"type": kind, "object": body}
        self._history.append((self._version, place, event))
        for listed, queue in self._streams:
            if place == listed:
                queue.put_nowait(event)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        self.requests.append((request.method, request.path, body))
        self.headers.append(dict(request.headers))
        for fault in self.faults:
            answer = await fault(request)
            if answer is not None:
                return answer
        if request.path in _DISCOVERY:
            return web.json_response(_DISCOVERY[request.path])
        return await self._resource(request, body)

    async def _resource(self, request: web.Request, body: Any) -> web.StreamResponse:
        found = _NAMED.fullmatch(request.path)
        if not found:
            return status(404, "NotFound", f"no {request.path}")
        if found["sub"] == "eviction":
            self.remove(request.path.removesuffix("/eviction"))
            return web.json_response({"kind": "Status", "status": "Success"})
        path = request.path.removesuffix("/status") if found["sub"] else request.path
        if not found["name"]:
            return await self._listed(request, found["list"], body)
        return self._named(request, path, body)

    async def _listed(self, request: web.Request, path: str, body: Any) -> web.StreamResponse:
        if request.method == "POST":
            place = f"{path}/{body['metadata']['name']}"
            if place in self.objects:
                return status(409, "AlreadyExists", f"{place} already exists")
            return web.json_response(self.put(place, body), status=201)
        if request.query.get("watch") == "true":
            return await self._watch(request, path)
        return self._page(request, path)

    def _page(self, request: web.Request, path: str) -> web.Response:
        items = [body for place, body in sorted(self.objects.items()) if place.rpartition("/")[0] == path]
        start, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "0")) or len(items)
        metadata = {"resourceVersion": str(self._version)}
        if start + limit < len(items):
            metadata["continue"] = str(start + limit)
        return web.json_response({"kind": "List", "items": items[start : start + limit], "metadata": metadata})

    async def _watch(self, request: web.Request, path: str) -> web.StreamResponse:
        response, queue = web.StreamResponse(), asyncio.Queue[Object | None]()
        await response.prepare(request)
        since = int(request.query.get("resourceVersion", "0"))
        for version, place, event in self._history:
            if version > since and place == path:
                queue.put_nowait(event)
        self._streams.append((path, queue))
        self.watches.append(f"{path}?{request.query_string}")
        while (news := await queue.get()) is not None:
            await response.write(json.dumps(news).encode() + b"\n")
        return response

    def _named(self, request: web.Request, path: str, body: Any) -> web.Response:
        old = self.objects.get(path)
        if request.method == "PATCH" and "apply-patch" in request.headers["Content-Type"]:
            return web.json_response(self.put(path, _merged(old or {}, body)))
        if old is None:
            return status(404, "NotFound", f"{path} not found")
        if request.method == "GET":
            return web.json_response(old)
        if request.method == "DELETE":
            return self._deleted(path, old, body or {})
        if isinstance(body, list):  # a JSON patch: only what a test reads back of it
            return web.json_response(old)
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != old["metadata"]["resourceVersion"]:
            return status(409, "Conflict", f"{path} has been modified")
        return web.json_response(self.put(path, body if request.method == "PUT" else _merged(old, body)))

    def _deleted(self, path: str, old: Object, options: Object) -> web.Response:
        uid = options.get("preconditions", {}).get("uid")
        if uid is not None and uid != old["metadata"].get("uid"):
            return status(409, "Conflict", "the UID in the precondition does not match")
        self.remove(path)
        return web.json_response({"kind": "Status", "status": "Success"})


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    kept = {key: value for key, value in old.items() if key not in patch}
    return kept | {key: _merged(old.get(key, {}), value) for key, value in patch.items() if value is not None}


def once(answer: web.Response, *, method: str = "", path: str = "") -> Fault:
    """A fault: this answer to the first request of that method and path, then none."""
    left: Iterator[web.Response] = iter((answer,))

    async def fault(request: web.Request) -> web.Response | None:
        fits = request.method.startswith(method) and request.path.startswith(path)
        return next(left, None) if fits else None

    return fault


def always(make: Callable[[], web.Response], *, method: str = "", path: str = "") -> Fault:
    """A fault: such an answer to every request of that method and path."""

    async def fault(request: web.Request) -> web.Response | None:
        fits = request.method.startswith(method) and request.path.startswith(path)
        return make() if fits else None

    return fault


async def silence(_: web.Request) -> None:
    """A fault: no answer at all."""
    await asyncio.Event().wait()


class Clock:
    """A clock that a test moves."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
