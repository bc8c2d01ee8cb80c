"""exec, attach and port-forward: WebSockets are tunnelled message by message, other upgrades refused.

kubectl has used WebSockets first since 1.31; SPDY, its fallback, is not HTTP after the upgrade, and aiohttp cannot pass it.
"""

import asyncio

import aiohttp
from aiohttp import web

from cluster.programs.proxy import connections, status, upstream
from cluster.programs.proxy.faults import Fault, Kind, Which
from cluster.programs.proxy.requestlog import Entry, RequestLog

_NEGOTIATED_PER_HOP = "sec-websocket-"


async def tunnel(server: upstream.Upstream, http: web.BaseRequest, log: RequestLog, entry: Entry) -> web.StreamResponse:
    """Serves one upgraded connection to its end. A refusal of the API server's is passed on as a Status."""
    protocol = http.headers["Upgrade"]
    if protocol.lower() != "websocket":
        return _refuse(log, entry, 501, f"fault proxy: cannot upgrade to {protocol}: only WebSockets pass; use those")
    offered = [one.strip() for one in http.headers.get("Sec-WebSocket-Protocol", "").split(",") if one.strip()]
    headers = {
        key: value
        for key, value in upstream.end_to_end(http.headers).items()
        if not key.lower().startswith(_NEGOTIATED_PER_HOP)
    }
    try:
        theirs = await server.session_for(http).ws_connect(
            server.url(http), headers=headers, protocols=offered, autoclose=False, autoping=False, max_msg_size=0
        )
    except aiohttp.WSServerHandshakeError as error:
        return _refuse(log, entry, error.status, f"fault proxy: refused by the API server: {error.message}")
    async with theirs:
        protocols = () if theirs.protocol is None else (theirs.protocol,)
        ours = web.WebSocketResponse(
            protocols=protocols, autoclose=False, autoping=False, compress=False, max_msg_size=0
        )
        log.answered(entry, 101)
        await ours.prepare(http)
        code = await _pump_both(ours, theirs)
        if code is None:
            connections.close(http.transport)
        else:
            await ours.close(code=code)
    return ours


def _refuse(log: RequestLog, entry: Entry, code: int, message: str) -> web.Response:
    log.answered(entry, code)
    return status.response(Fault(kind=Kind.ANSWER, which=Which(), code=code, message=message), entry.request)


async def _pump_both(ours: web.WebSocketResponse, theirs: aiohttp.ClientWebSocketResponse) -> int | None:
    """Until one side closes; returns the code to close the client's side with, None for no closing frame."""
    up, down = asyncio.create_task(_pump(ours, theirs)), asyncio.create_task(_pump(theirs, ours))
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in (up, down):
            way.cancel()
        await asyncio.wait({up, down})
    return _code(up) if down.cancelled() else _code(down)


def _code(way: "asyncio.Task[int | None]") -> int | None:
    return None if way.cancelled() or way.exception() is not None else way.result()


async def _pump(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    target: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
) -> int | None:
    """Passes messages on; returns the code of the closing frame, None if the source ended without one.

    The closing frame is read here: aiohttp's own answer to it takes an API server that has gone meanwhile for a break.
    """
    while True:
        message = await source.receive()
        match message.type:
            case aiohttp.WSMsgType.BINARY:
                await target.send_bytes(message.data)
            case aiohttp.WSMsgType.TEXT:
                await target.send_str(message.data)
            case aiohttp.WSMsgType.PING:
                await target.ping(message.data)
            case aiohttp.WSMsgType.PONG:
                await target.pong(message.data)
            case aiohttp.WSMsgType.CLOSE:
                return int(message.data or aiohttp.WSCloseCode.OK)
            case _:
                return None
