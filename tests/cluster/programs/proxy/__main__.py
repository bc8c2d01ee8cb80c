"""The proxy as a program: its standard input is a socket to the test's side, and its life is that socket's.

The first line read is the settings, the first one written the address; then come questions. See `control`.
"""

import asyncio
import json
import os
import socket
import ssl
import sys

from aiohttp import web

from cluster.programs.proxy import listener
from cluster.programs.proxy.control import Control
from cluster.programs.proxy.handler import Handler
from cluster.programs.proxy.requestlog import RequestLog
from cluster.programs.proxy.rules import Changes, Rules
from cluster.programs.proxy.settings import Settings
from cluster.programs.proxy.upstream import Upstream
from cluster.programs.proxy.watches import Watches

_KEEP_ALIVE_S = 3600.0  # longer than any client keeps an idle connection: an end at the wrong moment would be a fault
_LONGEST_HEADER_BYTES = 1 << 16


async def serve(channel: socket.socket) -> None:
    """Runs until the other end of the channel closes. Raises OSError, ssl.SSLError or ValueError if it cannot start."""
    reader, writer = await asyncio.open_connection(sock=channel)
    settings = Settings.from_line(await reader.readline())
    changes = Changes()
    rules, log = Rules(changes), RequestLog(changes)
    watches = Watches(rules)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return await handler(request)

    server = web.Server(
        answer,
        handler_cancellation=True,  # a client that goes away ends its request to the API server
        access_log=None,
        keepalive_timeout=_KEEP_ALIVE_S,
        max_line_size=_LONGEST_HEADER_BYTES,
        max_field_size=_LONGEST_HEADER_BYTES,
    )
    front = listener.Listener(settings, server)
    if settings.connect_in:
        listener.enter(settings.connect_in)
    async with Upstream(settings) as upstream:
        handler = Handler(upstream, rules, log, watches)
        async with front:
            address, port = front.address
            writer.write(json.dumps({"address": address, "port": port}).encode() + b"\n")
            await Control(changes, rules, log, watches, front).converse(reader, writer)
            # Nothing to tidy up beyond what the kernel does, and no handler may keep the process alive
            os._exit(0)


def main() -> int:
    """Serves on the socket that standard input is."""
    try:
        asyncio.run(serve(socket.socket(fileno=os.dup(sys.stdin.fileno()))))
    except (OSError, ssl.SSLError, ValueError) as error:
        print(f"fault proxy: cannot serve: {error}; check the paths, the address and the namespaces", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
