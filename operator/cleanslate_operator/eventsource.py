"""kopf, in a thread and an event loop of its own: at its end it cancels every task of the loop that it runs in."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

import kopf

from cleanslate_operator import connection, handlers

_log = logging.getLogger(__name__)


class EventSource:
    """Calls `enqueue` in the event loop that built it, with the name of each GPUNodeReset that something happened to.

    At its start it names all there are. GPUNodeResets are watched in the whole cluster, since they belong to no namespace;
    pods in `namespace` only.
    """

    def __init__(
        self, configuration: connection.Configuration, *, namespace: str, enqueue: Callable[[str], None]
    ) -> None:
        self._configuration = configuration
        self._namespace = namespace
        self._enqueue = enqueue
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._kopf: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._thread = threading.Thread(target=self._main, name="events", daemon=True)

    async def run(self) -> BaseException | None:
        """Deliver events until kopf ends by itself; what it ended with, None if it ended well."""
        self._thread.start()
        return await self._ended

    def stop(self, within_s: float) -> None:
        """Deliver no more events. Blocks until kopf has ended, but no longer than this."""
        if self._kopf is not None and self._thread.is_alive():
            loop, flag = self._kopf
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                loop.call_soon_threadsafe(flag.set)
            self._thread.join(within_s)

    def _main(self) -> None:
        # kopf warns that it can't handle signals in a thread; they are handled in the main one.
        logging.getLogger("kopf._core.reactor.running").addFilter(lambda record: "OS signals" not in str(record.msg))
        try:
            asyncio.run(self._serve())
            outcome = None
        except BaseException as error:  # noqa: BLE001 - told to the main thread, which ends the process
            outcome = error
        self._call(self._end, outcome)

    async def _serve(self) -> None:
        # Not threading.Event: kopf waits for one in a thread of its own, which nothing ends if kopf ends by itself.
        flag = asyncio.Event()
        self._kopf = (asyncio.get_running_loop(), flag)
        await kopf.operator(
            registry=handlers.registry(lambda name: self._call(self._enqueue, name), self._configuration),
            settings=handlers.settings(),
            namespaces=[self._namespace],
            standalone=True,
            stop_flag=flag,
        )

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _log.debug("events: the main loop is closed; what comes now is for the next process")

    def _end(self, outcome: BaseException | None) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)
