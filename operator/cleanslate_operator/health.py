"""/livez, /readyz and /metrics, served by leader and standby alike. GET and HEAD, nothing else."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from cleanslate_operator import metrics

STUCK_S = (
    300.0  # a wave of 500 nodes is some 1,500 writes in one look; they take 15 s, and on a slow API server minutes
)
SILENT_S = 60.0
_KEEP_ALIVE_S = 15.0
_LINE_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What the probes ask."""

    is_leader: Callable[[], bool]
    running_s: Callable[[], float]  # how long the longest look at a reset has been going on
    silent_s: Callable[[], float]  # since the API server last answered


class Server:
    """The probes' server. That it answers at all says that the event loop turns."""

    def __init__(self, checks: Checks, figures: metrics.Metrics, *, bind: str, port: int) -> None:
        self._checks = checks
        self._figures = figures
        self._bind = bind
        self._port = port
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handle_signals=False,
            keepalive_timeout=_KEEP_ALIVE_S,
            max_line_size=_LINE_BYTES,
            max_field_size=_LINE_BYTES,
            shutdown_timeout=1.0,
        )

    async def start(self) -> int:
        """Serve, and say on which port. Raises OSError if the address can't be had."""
        await self._runner.setup()
        await web.SockSite(self._runner, _listen(self._bind, self._port)).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Serve no more."""
        await self._runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=_LINE_BYTES)
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        return application

    async def _livez(self, _: web.Request) -> web.Response:
        running_s = self._checks.running_s()
        if self._checks.is_leader() and running_s > STUCK_S:
            return web.Response(
                status=500, text=f"worker: stuck for {running_s:.0f} s, at most {STUCK_S:.0f} s are well\n"
            )
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        silent_s = self._checks.silent_s()
        if silent_s > SILENT_S:
            since = "never" if silent_s == float("inf") else f"{silent_s:.0f} s ago"
            return web.Response(
                status=503, text=f"API server: last heard of {since}, at most {SILENT_S:.0f} s are well\n"
            )
        return web.Response(text="leader\n" if self._checks.is_leader() else "standby\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._figures.render(), headers={"Content-Type": metrics.CONTENT_TYPE})


def _listen(bind: str, port: int) -> socket.socket:
    """A socket of that address; for `*` one of IPv6 that takes IPv4 too, or of IPv4 where there is no IPv6."""
    if bind != "*":
        return socket.create_server((bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", port))
