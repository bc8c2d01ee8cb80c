"""Ends of client connections."""

import asyncio
import socket
import struct

_LINGER_NONE = struct.pack("ii", 1, 0)  # socket(7), SO_LINGER: close sends RST and drops what is unsent


def reset(transport: asyncio.BaseTransport | None) -> None:
    """Ends the connection so that the client sees "connection reset by peer"; nothing if it is over already."""
    if transport is None or transport.is_closing() or not isinstance(transport, asyncio.WriteTransport):
        return
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
    transport.abort()


def close(transport: asyncio.BaseTransport | None) -> None:
    """Ends the connection after what has been written, so that the client sees an early end of file."""
    if transport is not None:
        transport.close()
