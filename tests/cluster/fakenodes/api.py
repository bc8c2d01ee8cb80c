"""The API server over one pool of connections: calls that are repeated until they are answered, and watches."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from cluster.fakenodes.figures import Figures
from cluster.fakenodes.kubeconfig import Access

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
# Saves the server writing, and us reading, whole objects that nobody looks at.
ONLY_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

CALL_TIMEOUT_S = 60.0  # the API server's own --request-timeout
WATCH_S = 300  # then the server ends the watch and it is begun anew
WATCH_SILENCE_S = 120.0  # bookmarks come about once a minute: a longer silence is a dead connection
URGENT_CONNECTIONS = 32  # 5,000 leases are 170 renewals a second, and a busy server takes 0.1 s for one
WATCHES = 2  # of pods, and for a while of nodes
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 5.0


class GoneError(Exception):
    """A watch cannot go on from where it was (410): list again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server said in the end."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether it did what was asked."""
        return self.status < 300

    def data(self) -> dict[str, Any]:
        """The object in it. Raises ValueError."""
        return json.loads(self.body)

    def describe(self) -> str:
        """For messages: the code and the beginning of what the server said."""
        return f"{self.status} {self.body[:300].decode(errors='replace')}"


class Api:
    """One API server. A context manager; `connections` bounds the calls under way at once, urgent ones apart."""

    def __init__(self, access: Access, figures: Figures, *, connections: int) -> None:
        self.figures = figures
        self._access = access
        self._connections = connections

    async def __aenter__(self) -> Self:
        # Compression would cost the server more than it saves on one machine.
        headers = {"Accept-Encoding": "identity", "User-Agent": "fakenodes"}
        if self._access.token:
            headers["Authorization"] = f"Bearer {self._access.token}"
        limit = self._connections + URGENT_CONNECTIONS + WATCHES
        connector = aiohttp.TCPConnector(limit=limit, ssl=self._access.tls, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(self._access.server, connector=connector, headers=headers)
        self._slots = asyncio.Semaphore(self._connections)
        self._urgent_slots = asyncio.Semaphore(URGENT_CONNECTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(
        self,
        kind: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        content: str = JSON,
        accept: str = JSON,
        urgent: bool = False,
        **query: str,
    ) -> Answer:
        """The answer to one request. `kind` is its name in the figures. Urgent ones do not queue behind others.

        429, 5xx and broken connections are repeated for ever, after Retry-After or a growing pause with jitter: whoever wants
        a deadline cancels. Every other code is an answer.
        """
        headers = {"Content-Type": content, "Accept": accept}
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        pause_s = FIRST_PAUSE_S
        while True:
            async with self._urgent_slots if urgent else self._slots:
                answer, retry_after_s = await self._once(kind, method, path, data, headers, query)
            if answer is not None:
                return answer
            await asyncio.sleep(max(retry_after_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _once(
        self, kind: str, method: str, path: str, data: bytes | None, headers: dict[str, str], query: Mapping[str, str]
    ) -> tuple[Answer | None, float]:
        """One try: its answer, or None and the pause that the server asked for."""
        begun_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        try:
            async with self._session.request(
                method, path, data=data, headers=headers, params=query, timeout=timeout
            ) as reply:
                body = await reply.read()
                status, retry_after = reply.status, reply.headers.get("Retry-After", "")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._repeat(f"{method} {path}", type(error).__name__, str(error))
            return None, 0.0
        if status == 429 or status >= 500:
            self._repeat(f"{method} {path}", str(status), body[:200].decode(errors="replace"))
            return None, float(retry_after) if retry_after.isdigit() else 0.0
        self.figures.note(kind, time.monotonic() - begun_s)
        return Answer(status=status, body=body), 0.0

    def _repeat(self, what: str, cause: str, text: str) -> None:
        self.figures.repeats[cause] += 1
        self.figures.trouble(f"{what}: cannot get an answer: {cause} {text}; repeated until there is one")

    async def listed(self, path: str, *, accept: str = JSON, **query: str) -> dict[str, Any]:
        """All objects at a path, from the server's memory. Raises PermissionError if the server refuses."""
        answer = await self.call("list", "GET", path, accept=accept, resourceVersion="0", **query)
        if not answer.ok:
            raise PermissionError(
                f"{path}: cannot list: {answer.describe()}; use a kubeconfig of a cluster administrator"
            )
        return answer.data()

    async def watch(self, path: str, version: str, **query: str) -> AsyncIterator[dict[str, Any]]:
        """Events after `version` until the server or the connection ends; bookmarks included. Raises GoneError.

        A connection that breaks ends it like one that is closed: begin again from the last version seen.
        """
        parameters = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version, **query}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_SILENCE_S)
        try:
            async with self._session.get(
                path, params={**parameters, "timeoutSeconds": str(WATCH_S)}, headers={"Accept": JSON}, timeout=timeout
            ) as reply:
                if reply.status == 410:
                    raise GoneError
                reply.raise_for_status()
                async for event in _events(reply.content):
                    yield event
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.figures.trouble(f"{path}: cannot watch: {type(error).__name__} {error}; begun again")


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["type"] == "ERROR" and event["object"].get("code") == 410:
                raise GoneError
            yield event
