"""The proxy's address: its port stays its own also while connections are refused."""

import asyncio
import contextlib
import ctypes
import os
import socket
import ssl
from collections.abc import Iterator
from typing import Self

from aiohttp import web

from cluster.programs.proxy import connections
from cluster.programs.proxy.settings import Settings

_CLONE_NEWNET = 0x40000000  # sched.h
_OWN = "/proc/self/ns/net"
_BACKLOG = 1024


def enter(namespace: str) -> None:
    """Moves this thread, and those that it will start, into a network namespace given as a file.

    Sockets stay in the namespace in which they were made. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    finally:
        os.close(descriptor)


class Listener:
    """Listens in the namespace of `listen_in`. An async context manager; open when entered."""

    def __init__(self, settings: Settings, server: web.Server) -> None:
        self._server = server
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(settings.certificate, settings.key)
        # Held open: the path of a process's namespace goes with the process, and "self" will mean another one
        self._namespace = os.open(settings.listen_in or _OWN, os.O_RDONLY | os.O_CLOEXEC)
        # Bound, and never listening: it keeps the port, and leaves connections to whoever listens, or to be refused
        self._reservation = self._bound(settings.address, settings.port)
        self._listening: asyncio.Server | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Address and port."""
        address, port = self._reservation.getsockname()[:2]
        return address, port

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        self._reservation.close()
        os.close(self._namespace)

    async def open(self) -> None:
        """Listens; nothing if it does already."""
        if self._listening is None:
            one = self._bound(*self.address)
            loop = asyncio.get_running_loop()
            self._listening = await loop.create_server(self._server, sock=one, ssl=self._tls, backlog=_BACKLOG)

    def close(self) -> int:
        """Refuses connections and resets those that there are; returns how many."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        transports = [connection.transport for connection in self._server.connections]
        for transport in transports:
            connections.reset(transport)
        return len(transports)

    def _bound(self, address: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with self._inside():
            one = socket.socket(family, socket.SOCK_STREAM)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((address, port))
        return one

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """The thread is in the listener's namespace; no other runs meanwhile, since nothing awaits."""
        before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(f"/proc/self/fd/{self._namespace}")
            yield
            enter(f"/proc/self/fd/{before}")
        finally:
            os.close(before)
