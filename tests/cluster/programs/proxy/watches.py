"""Running watch streams: passed on event by event, and ended or silenced by faults."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from enum import StrEnum

import aiohttp
from aiohttp import web

from cluster.programs.proxy import status
from cluster.programs.proxy.apirequest import ApiRequest
from cluster.programs.proxy.faults import Kind
from cluster.programs.proxy.rules import Rule, Rules


class End(StrEnum):
    """How a watch stream ends."""

    ENDED = "ended"  # as the API server ended it, or as it does at a stream's timeout
    CUT = "cut"  # by a reset, which drops what is under way
    TORN = "torn"  # by an early end of file, after all that was written
    GONE = "gone"  # by an ERROR event with code 410


class Watch:
    """One running stream."""

    def __init__(self, request: ApiRequest) -> None:
        self.request = request
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.stalled_by: Rule | None = None

    def finish(self, end: End) -> None:
        """Lets it end so, unless it is ending already."""
        if not self.end.done():
            self.end.set_result(end)


class Watches:
    """All running streams."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._running: set[Watch] = set()

    def apply(self, rule: Rule) -> None:
        """Lets a fault that has just begun hit the streams that run."""
        if not rule.fault.now or rule.fault.kind not in (Kind.CUT_WATCHES, Kind.WATCHES_GONE):
            return
        for watch in self._running:
            if rule.matches(watch.request) and not watch.end.done() and rule.hit():
                watch.finish(_end_by(rule))

    async def relay(
        self, request: ApiRequest, rule: Rule | None, source: aiohttp.ClientResponse, out: web.StreamResponse
    ) -> End:
        """Passes a stream on until it ends; says how it has to end for the client.

        `rule` is the one that this watch began under, if any. An ERROR event has been written when it returns.
        """
        watch = Watch(request)
        self._running.add(watch)
        pump = asyncio.create_task(self._pump(watch, rule, source, out))
        try:
            with _cut_later(watch, rule):
                await asyncio.wait({pump, watch.end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._running.discard(watch)
            if not pump.done():
                pump.cancel()
                await asyncio.wait({pump})
        if not watch.end.done():
            return pump.result()  # raises what the API server's side or the client's side broke with
        if watch.end.result() is End.GONE:
            return await _write_gone(source, out)
        return watch.end.result()

    async def _pump(
        self, watch: Watch, rule: Rule | None, source: aiohttp.ClientResponse, out: web.StreamResponse
    ) -> End:
        delivered = 0
        if rule is not None and _is_over(rule, delivered):
            return _end_after_events(rule)
        async for event in _events(source):
            await self._while_stalled(watch)
            await out.write(event)
            delivered += 1
            if rule is not None and _is_over(rule, delivered):
                return _end_after_events(rule)
        return End.ENDED

    async def _while_stalled(self, watch: Watch) -> None:
        while (rule := self._rules.stalling(watch.request)) is not None:
            if watch.stalled_by is not rule:
                rule.hit()
            watch.stalled_by = rule
            await rule.ended.wait()


def _is_over(rule: Rule, delivered: int) -> bool:
    limit = rule.fault.after_events
    return limit is not None and delivered >= limit and rule.hit()


def _end_after_events(rule: Rule) -> End:
    return End.ENDED if rule.fault.cleanly else End.TORN


def _end_by(rule: Rule) -> End:
    if rule.fault.kind is Kind.WATCHES_GONE:
        return End.GONE
    return End.ENDED if rule.fault.cleanly else End.CUT


@contextlib.contextmanager
def _cut_later(watch: Watch, rule: Rule | None) -> Iterator[None]:
    """Cuts the watch after its rule's seconds, if the rule has any and may hit then."""
    if rule is None or rule.fault.after_s is None:
        yield
        return

    def cut() -> None:
        if not watch.end.done() and rule.hit():
            watch.finish(_end_by(rule))

    timer = asyncio.get_running_loop().call_later(rule.fault.after_s, cut)
    try:
        yield
    finally:
        timer.cancel()


async def _write_gone(source: aiohttp.ClientResponse, out: web.StreamResponse) -> End:
    """An ERROR event fits into a JSON stream only; another one is cut, and the next watch is answered in JSON."""
    if source.content_type != "application/json":
        return End.CUT
    await out.write(status.gone_event())
    return End.ENDED


def _events(source: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The stream event by event; a stream of unknown framing piece by piece, as it arrives."""
    if "Content-Encoding" in source.headers:
        return source.content.iter_any()
    if source.content_type == "application/json":
        return _lines(source.content)
    if source.content_type == "application/vnd.kubernetes.protobuf":
        return _length_delimited(source.content)
    return source.content.iter_any()


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        while (end := rest.find(b"\n") + 1) > 0:
            yield bytes(rest[:end])
            del rest[:end]
    if rest:
        yield bytes(rest)


async def _length_delimited(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Four bytes of length, big-endian, before each event: apimachinery v0.37.2 `pkg/util/framer`."""
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        while len(rest) >= 4 and len(rest) >= (end := 4 + int.from_bytes(rest[:4], "big")):
            yield bytes(rest[:end])
            del rest[:end]
    if rest:
        yield bytes(rest)
