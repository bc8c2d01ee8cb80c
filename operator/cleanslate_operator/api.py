"""The API server, as plain JSON: one method a verb, one request each, bounded in time and size, and never retried here.

`kubernetes.aio` brings the configuration, TLS and the renewal of tokens. Its models are left out: reading 2,000 nodes into
them takes 1.25 s, as JSON 0.15 s, and they refuse objects with fields that are younger than the client.
"""

import asyncio
import importlib.metadata
import json
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from kubernetes.aio.client import api_client

from cleanslate_operator import apierrors, connection, names
from cleanslate_operator.apierrors import (
    ApiError,
    Cause,
    Conflict,
    Denied,
    Gone,
    Invalid,
    NotFound,
    NotLeading,
    Throttled,
    Unavailable,
)

__all__ = (
    "Api",
    "ApiError",
    "Cause",
    "Conflict",
    "Denied",
    "Gone",
    "Invalid",
    "Json",
    "NotFound",
    "NotLeading",
    "Throttled",
    "Unavailable",
)

Json = dict[str, Any]
Items = list[Json]

REQUEST_S = 10.0  # a silent API server holds up nobody longer than this
ANSWER_LIMIT_BYTES = 64 << 20  # 500 nodes with 50 images each are about 7 MB
PAGE = 500
_PAGES = 2000
_LISTS = 3  # how often a list is begun anew before it is left to a later try
_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "apply": "PATCH",
    "patch": "PATCH",
    "replace": "PUT",
    "delete": "DELETE",
    "deletecollection": "DELETE",
}
_READS = frozenset({"get", "list"})


class Api:
    """The API server. Every method raises ApiError; `timeout_s` is for one whole request, REQUEST_S if not given."""

    def __init__(
        self,
        configuration: connection.Configuration,
        *,
        count: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`count` is told the verb and HTTP status (`none` without an answer) of each request."""
        self._client = api_client.ApiClient(configuration)
        self._client.user_agent = f"cleanslate-operator/{importlib.metadata.version('cleanslate')}"
        self._count = count
        self._clock = clock
        self._allowed_s: Callable[[], float] | None = None
        self._reached: list[float] = []

    def fenced(self, allowed_s: Callable[[], float]) -> "Api":
        """The same API server for a leader: a write that would outlast `allowed_s()` is not sent, or given up in time.

        Raises NotLeading for what is not sent.
        """
        other = object.__new__(Api)
        other.__dict__.update(self.__dict__, _allowed_s=allowed_s)
        return other

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    def silent_s(self) -> float:
        """Seconds since the API server last answered anything but 5xx; infinite if it never did."""
        return self._clock() - self._reached[0] if self._reached else float("inf")

    async def get(self, path: str, *, timeout_s: float = REQUEST_S) -> Json:
        """The object at a path."""
        return await self._send("get", path, timeout_s=timeout_s)

    async def list(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        keep: Callable[[Json], Json] = lambda item: item,
        timeout_s: float = REQUEST_S,
    ) -> tuple[Items, str]:
        """All objects of a list and its resourceVersion, page by page; `keep` cuts each object down to what is needed.

        A list whose rest has expired is begun anew. `timeout_s` is for each page.
        """
        for _ in range(_LISTS - 1):
            try:
                return await self._pages(path, params or {}, keep, timeout_s)
            except Gone:
                continue
        return await self._pages(path, params or {}, keep, timeout_s)

    async def create(self, path: str, body: Json, *, timeout_s: float = REQUEST_S) -> Json:
        """Make an object in a list, or a sub-resource such as an eviction. Raises Conflict (`already_exists`)."""
        return await self._send("create", path, _MANAGED, body, timeout_s=timeout_s)

    async def apply(self, path: str, body: Json, *, force: bool = True, timeout_s: float = REQUEST_S) -> Json:
        """Server-side apply, as the operator's field manager."""
        params = {**_MANAGED, "force": "true" if force else "false"}
        return await self._send("apply", path, params, body, "application/apply-patch+yaml", timeout_s)

    async def merge_patch(self, path: str, patch: Json, *, timeout_s: float = REQUEST_S) -> Json:
        """A merge patch; with `metadata.resourceVersion` in it, of that version only (else Conflict)."""
        return await self._send("patch", path, _MANAGED, patch, "application/merge-patch+json", timeout_s)

    async def replace(self, path: str, body: Json, *, timeout_s: float = REQUEST_S) -> Json:
        """Replace an object, of the version in `metadata.resourceVersion` only (else Conflict)."""
        return await self._send("replace", path, _MANAGED, body, timeout_s=timeout_s)

    async def delete(
        self,
        path: str,
        *,
        uid: str | None = None,
        propagation: str = "Background",
        grace_s: int | None = None,
        timeout_s: float = REQUEST_S,
    ) -> Json:
        """Delete an object, only the one with this UID if it is given (else Conflict)."""
        options: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        return await self._send("delete", path, {}, options, timeout_s=timeout_s)

    async def delete_collection(self, path: str, label_selector: str, *, timeout_s: float = REQUEST_S) -> Json:
        """Delete all objects of a list that a label selector chooses."""
        params = {"labelSelector": label_selector}
        return await self._send(
            "deletecollection", path, params, {"kind": "DeleteOptions", "apiVersion": "v1"}, timeout_s=timeout_s
        )

    async def _pages(
        self, path: str, params: Mapping[str, str], keep: Callable[[Json], Json], timeout_s: float
    ) -> tuple[Items, str]:
        found: Items = []
        wanted = {"limit": str(PAGE), **params}
        for _ in range(_PAGES):
            page = await self._send("list", path, wanted, timeout_s=timeout_s)
            found += [keep(item) for item in page.get("items") or ()]
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return found, metadata.get("resourceVersion", "")
            wanted["continue"] = metadata["continue"]
        raise Unavailable(
            request=_request("list", path), reason="TooLong", message=f"more than {_PAGES} pages of {PAGE}"
        )

    async def _send(
        self,
        verb: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout_s: float = REQUEST_S,
    ) -> Json:
        request = _request(verb, path)
        allowed_s = self._allowed(verb, request, timeout_s)
        url = path + ("?" + urllib.parse.urlencode(params) if params else "")
        try:
            async with asyncio.timeout(allowed_s):
                status, retry_after, raw = await self._exchange(_METHODS[verb], url, body, content_type)
        except (OSError, ValueError, aiohttp.ClientError, connection.ConnectError) as error:
            self._count(verb, "none")
            cause = f"no answer in {allowed_s:.3g} s" if isinstance(error, TimeoutError) else _described(error)
            raise Unavailable(request=request, message=f"{cause}; tried again by itself") from error
        self._count(verb, str(status))
        return self._answer(request, status, retry_after, raw)

    def _allowed(self, verb: str, request: str, timeout_s: float) -> float:
        """Seconds that a request may take; a write no longer than this process surely leads."""
        if verb in _READS or self._allowed_s is None:
            return timeout_s
        allowed_s = self._allowed_s()
        if allowed_s <= 0:
            raise NotLeading(
                request=request, message="not sent: this replica does not lead any more; another one goes on"
            )
        return min(timeout_s, allowed_s)

    async def _exchange(self, method: str, url: str, body: Any, content_type: str) -> tuple[int, str | None, bytes]:
        configuration = self._client.configuration
        headers = {**self._client.default_headers, "Accept": "application/json", "Content-Type": content_type}
        authorization = await connection.authorization(configuration)
        if authorization:
            headers["Authorization"] = authorization
        answer = await self._client.call_api(
            method,
            configuration.host.rstrip("/") + url,
            header_params=headers,
            body=body,
            _request_timeout=aiohttp.ClientTimeout(total=None),  # the whole of it is timed by the caller
        )
        async with answer.response as response:
            return response.status, response.headers.get("Retry-After"), await _bounded(response.content)

    def _answer(self, request: str, status: int, retry_after: str | None, raw: bytes) -> Json:
        if status < 500:
            self._reached[:] = [self._clock()]
        document = _parsed(raw)
        if not 200 <= status < 300:
            raise apierrors.from_answer(request, status, document, retry_after)
        if not isinstance(document, dict):
            raise Unavailable(
                request=request, status=status, message=f"the answer of {len(raw)} bytes is no JSON object"
            )
        return document


_MANAGED = {"fieldManager": names.FIELD_MANAGER}


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    chunks, size = [], 0
    async for chunk in content.iter_any():
        size += len(chunk)
        if size > ANSWER_LIMIT_BYTES:
            raise ValueError(f"an answer of more than {ANSWER_LIMIT_BYTES >> 20} MiB")
        chunks.append(chunk)
    return b"".join(chunks)


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _request(verb: str, path: str) -> str:
    return f"{path}: cannot {verb}"


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
