"""A small HTTPS server in the API server's place: objects under paths, watches, and who asked."""

import asyncio
import gzip
import json
import ssl
import threading
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from cluster.pki import Authority
from cluster.programs.proxy import listener

PROTOBUF = "application/vnd.kubernetes.protobuf"
_DEADLINE_S = 10.0


class LittleApi:
    """Serves from a thread; a context manager.

    Any path is an object: PUT and POST keep it, PATCH too (with the path as it is), DELETE removes it. `?watch=` streams what
    `emit` gives. Every answer says in the header `Asked-By` who the client was: its certificate's name or its token.
    """

    def __init__(self, authority: Authority, *, namespace: str = "") -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.port = 0
        self._authority = authority
        self._namespace = namespace
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._changed = threading.Condition()
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="little-api")

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._serving.wait(_DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends it, and every connection to it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(_DEADLINE_S)
            assert not self._thread.is_alive()

    def forget(self) -> None:
        """Has no objects any more, and remembers no request."""
        self.objects.clear()
        self.asked.clear()

    def emit(self, event: bytes | None) -> None:
        """Gives every running watch these bytes; None ends the streams."""

        def give() -> None:
            for queue in self._watchers:
                queue.put_nowait(event)

        self._loop.call_soon_threadsafe(give)

    def await_watchers(self, count: int) -> None:
        """Blocks until that many watches run, no more and no fewer."""
        with self._changed:
            reached = self._changed.wait_for(lambda: len(self._watchers) == count, _DEADLINE_S)
        assert reached, f"{len(self._watchers)} watches run, {count} were awaited"

    def _run(self) -> None:
        if self._namespace:
            listener.enter(self._namespace)
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = web.Server(self._answer, handler_cancellation=True, access_log=None)
        listening = await self._loop.create_server(server, "127.0.0.1", 0, ssl=_context(self._authority.folder))
        self.port = listening.sockets[0].getsockname()[1]
        self._serving.set()
        await self._stopped.wait()
        listening.close()
        while server.connections:
            for connection in server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(0)  # the loop closes their sockets

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()
        self.asked.append((request.method, request.raw_path))
        headers = {"Asked-By": _who(request), "Asked-As": request.headers.get("User-Agent", "")}
        if request.headers.get("Upgrade") == "websocket":
            return await _echo(request)
        if "watch" in request.query or "follow" in request.query:
            return await self._stream(request, headers)
        if "Accept" in request.headers and "gzip" in request.headers.get("Accept-Encoding", ""):
            packed = gzip.compress(self.objects.get(request.path, b""))
            return web.Response(body=packed, headers={**headers, "Content-Encoding": "gzip"})
        response = self._object(request.method, request.path, body)
        response.headers.update(headers)
        response.headers.extend([("Warning", '299 - "one"'), ("Warning", '299 - "two"')])
        return response

    def _object(self, method: str, path: str, body: bytes) -> web.Response:
        if method in ("PUT", "POST", "PATCH"):
            self.objects[path] = body
        if path not in self.objects:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        kept = self.objects.pop(path) if method == "DELETE" else self.objects[path]
        return web.Response(body=kept, content_type="application/json")

    async def _stream(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        kind = PROTOBUF if PROTOBUF in request.headers.get("Accept", "") else "application/json"
        out = web.StreamResponse(headers={**headers, "Content-Type": kind})
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        await out.prepare(request)
        self._watch(queue, running=True)
        try:
            while (event := await queue.get()) is not None:
                await out.write(event)
        finally:
            self._watch(queue, running=False)
        return out

    def _watch(self, queue: asyncio.Queue[bytes | None], *, running: bool) -> None:
        with self._changed:
            (self._watchers.add if running else self._watchers.discard)(queue)
            self._changed.notify_all()


def event(name: str, kind: str = "ADDED") -> bytes:
    """A watch event about an object of that name, a line of JSON."""
    value: dict[str, Any] = {"type": kind, "object": {"metadata": {"name": name}}}
    return json.dumps(value).encode() + b"\n"


def _who(request: web.BaseRequest) -> str:
    """As the API server decides it: the certificate first, then the token."""
    assert request.transport is not None
    certificate = request.transport.get_extra_info("peercert")
    if certificate:
        return str(dict(part[0] for part in certificate["subject"])["commonName"])
    return request.headers.get("Authorization", "anonymous").removeprefix("Bearer ")


async def _echo(request: web.BaseRequest) -> web.StreamResponse:
    socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io"], max_msg_size=0)
    if "refused" in request.path:
        return web.Response(status=403)
    await socket.prepare(request)
    async for message in socket:
        await socket.send_bytes(_who(request).encode() + b":" + message.data)
    return socket


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
