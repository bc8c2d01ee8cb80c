"""One request through the proxy: passed on as it is, or with the fault that the first matching rule asks for."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from cluster.programs.proxy import apirequest, connections, status, upgrade, upstream
from cluster.programs.proxy.faults import Kind
from cluster.programs.proxy.requestlog import Entry, RequestLog
from cluster.programs.proxy.rules import Rule, Rules
from cluster.programs.proxy.watches import End, Watches

_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that has arrived as a whole, and its line in the log."""

    http: web.BaseRequest
    body: bytes
    entry: Entry

    @property
    def asked(self) -> apirequest.ApiRequest:
        """The request in the API server's words."""
        return self.entry.request


class Handler:
    """Answers the clients. An aiohttp handler."""

    def __init__(self, server: upstream.Upstream, rules: Rules, log: RequestLog, watches: Watches) -> None:
        self._server = server
        self._rules = rules
        self._log = log
        self._watches = watches

    async def __call__(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answers one request. Any break on the API server's side is a reset connection to the client."""
        exchange = await self._receive(http)
        rule = self._rules.first(exchange.asked)
        try:
            if rule is None or rule.fault.kind in (Kind.CUT_WATCHES, Kind.STALL_WATCHES) or not rule.hit():
                return await self._pass(exchange, rule)
            return await self._perform(exchange, rule)
        except _BROKEN as error:
            if http.transport is not None and not http.transport.is_closing():
                print(f"{exchange.asked.path}: cannot pass: {error!r}; client cut", file=sys.stderr, flush=True)
            return self._cut(exchange)

    async def _receive(self, http: web.BaseRequest) -> Exchange:
        if http.headers.get("Expect", "").lower() == "100-continue":
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await http.content.read()
        agent = http.headers.get("User-Agent", "")
        asked = apirequest.parse(http.method, http.rel_url.path, http.query, body, agent)
        return Exchange(http, body, self._log.begin(asked))

    async def _perform(self, exchange: Exchange, rule: Rule) -> web.StreamResponse:
        match rule.fault.kind:
            case Kind.ANSWER:
                return await self._answer(exchange, rule)
            case Kind.WATCHES_GONE:
                return self._answered(exchange, web.Response(body=status.gone_event(), content_type="application/json"))
            case Kind.RESET | Kind.LOSE | Kind.KILL | Kind.SILENCE:
                return await self._leave_unanswered(exchange, rule)
            case Kind.HEADERS_ONLY:
                return await self._pass_headers(exchange)
            case Kind.TRUNCATE:
                return await self._pass_part(exchange, rule.fault.after_bytes)
            case Kind.HOLD:
                await rule.ended.wait()
            case Kind.DELAY:
                await _wait(rule.ended, rule.fault.seconds)
        return await self._pass(exchange, None)

    async def _answer(self, exchange: Exchange, rule: Rule) -> web.StreamResponse:
        if rule.fault.upstream_first:
            await self._let_happen(exchange)
        return self._answered(exchange, status.response(rule.fault, exchange.asked))

    async def _leave_unanswered(self, exchange: Exchange, rule: Rule) -> web.StreamResponse:
        """Cuts the connection. Whom it kills is a client of this proxy, and alive, since it has just asked."""
        fault = rule.fault
        if fault.kind is Kind.LOSE or fault.upstream_first:
            await self._let_happen(exchange)
        if fault.kind is Kind.KILL:
            os.kill(fault.pid, signal.SIGKILL)
        if fault.kind is Kind.SILENCE:
            await rule.ended.wait()
        return self._cut(exchange)

    async def _let_happen(self, exchange: Exchange) -> bytes:
        """Has the API server do it, and keeps its answer from the client."""
        async with await self._server.ask(exchange.http, exchange.body) as answer:
            return await answer.read()

    async def _pass_headers(self, exchange: Exchange) -> web.StreamResponse:
        async with await self._server.ask(exchange.http, exchange.body) as answer:
            out = await self._begin_like(exchange, answer)
        connections.reset(exchange.http.transport)
        return out

    async def _pass_part(self, exchange: Exchange, length: int | None) -> web.StreamResponse:
        """The headers of the whole answer, and that many bytes of its body: half of them for None."""
        async with await self._server.ask(exchange.http, exchange.body) as answer:
            whole = await answer.read()
            out = await self._begin_like(exchange, answer)
        await out.write(whole[: len(whole) // 2 if length is None else length])
        connections.close(exchange.http.transport)
        return out

    async def _pass(self, exchange: Exchange, rule: Rule | None) -> web.StreamResponse:
        """The API server's answer, streamed as it comes."""
        if "Upgrade" in exchange.http.headers:
            return await upgrade.tunnel(self._server, exchange.http, self._log, exchange.entry)
        async with await self._server.ask(exchange.http, exchange.body) as answer:
            out = await self._begin_like(exchange, answer)
            if exchange.asked.verb == "watch" and answer.status == 200:
                end = await self._watches.relay(exchange.asked, rule, answer, out)
                if end is End.CUT:
                    connections.reset(exchange.http.transport)
                elif end is End.TORN:
                    connections.close(exchange.http.transport)
                return out
            async for piece in answer.content.iter_any():
                await out.write(piece)
        return out

    async def _begin_like(self, exchange: Exchange, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Sends the client the answer's status and headers."""
        out = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=upstream.end_to_end(answer.headers)
        )
        if "Content-Length" in answer.headers:
            out.content_length = int(answer.headers["Content-Length"])
        self._log.answered(exchange.entry, answer.status)
        await out.prepare(exchange.http)
        return out

    def _answered(self, exchange: Exchange, response: web.StreamResponse) -> web.StreamResponse:
        self._log.answered(exchange.entry, response.status)
        return response

    def _cut(self, exchange: Exchange) -> web.StreamResponse:
        """aiohttp writes no answer to a connection that is closing, so the returned one is never seen."""
        connections.reset(exchange.http.transport)
        return web.Response()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
