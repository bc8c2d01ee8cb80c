"""Forwards connections: `forward.py FD HOST PORT`, where FD is a listening socket that may be of another network namespace.

So the machine reaches the API server at 127.0.0.1 and a port that the kernel chose, and no network interface, address or
route of the machine's is touched.
"""

import asyncio
import contextlib
import socket
import sys

CHUNK_BYTES = 1 << 18


async def main(descriptor: int, host: str, port: int) -> None:
    """Serves until it is killed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))

    server = await asyncio.start_server(serve, sock=socket.socket(fileno=descriptor))
    await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
