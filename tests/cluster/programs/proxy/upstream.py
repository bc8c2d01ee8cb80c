"""The API server, as the proxy asks it: over TLS, as the client that asked or as the proxy's own identity."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from cluster.programs.proxy import identity
from cluster.programs.proxy.settings import Settings

# RFC 9110 7.6.1, and what belongs to this hop's own framing
_OWN_TO_A_HOP = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NEVER_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_CONNECT_S = 10.0


class Upstream:
    """Connections to the API server. A context manager; made within the network namespace that it connects from."""

    def __init__(self, settings: Settings) -> None:
        self._server = settings.upstream.rstrip("/")
        self._as_client = _session(_context(settings, with_identity=False))
        self._as_itself = _session(_context(settings, with_identity=True)) if settings.identity else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._as_client.close()
        if self._as_itself is not None:
            await self._as_itself.close()

    def session_for(self, request: web.BaseRequest) -> aiohttp.ClientSession:
        """The connections to use for this request.

        A client with a token must not travel with the proxy's certificate: the API server would take the certificate.
        """
        if self._as_itself is None or "Authorization" in request.headers:
            return self._as_client
        return self._as_itself

    def url(self, request: web.BaseRequest) -> URL:
        """The same path and query at the API server, byte for byte."""
        return URL(self._server + request.raw_path, encoded=True)

    async def ask(self, request: web.BaseRequest, body: bytes) -> aiohttp.ClientResponse:
        """Sends the request; returns when the answer's headers are there. Raises aiohttp.ClientError."""
        return await self.session_for(request).request(
            request.method,
            self.url(request),
            headers=end_to_end(request.headers),
            data=body or None,
            allow_redirects=False,
        )


def end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers that a proxy passes on; repeated ones stay repeated."""
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in _OWN_TO_A_HOP)


def _context(settings: Settings, *, with_identity: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca)
    if with_identity:
        identity.load(context, Path(settings.identity))
    return context


def _session(context: ssl.SSLContext) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=context, limit=0),  # each watch holds a connection
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NEVER_ADDED,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),  # watches and logs are endless
        read_bufsize=1 << 20,
    )
