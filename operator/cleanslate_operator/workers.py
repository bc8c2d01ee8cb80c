"""The workers: take a key, look at that reset, decide by the outcome when to look again. Nothing one reset does stops them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from cleanslate_operator import api, metrics, workqueue

Reconcile = Callable[[str], Awaitable[float | None]]
_log = logging.getLogger(__name__)


class Workers:
    """So many at a time, on one queue. `reconcile` answers in how many seconds to look again, or None: when something happens."""

    def __init__(
        self,
        queue: workqueue.WorkQueue,
        reconcile: Reconcile,
        figures: metrics.Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._figures = figures
        self._clock = clock
        self._running: dict[str, float] = {}

    async def run(self, count: int) -> None:
        """Work until the queue is closed; what is in hand then is finished."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._work())

    def running_s(self) -> float:
        """For how long the longest look has been going on, in seconds."""
        return self._clock() - min(self._running.values(), default=self._clock())

    async def _work(self) -> None:
        while (key := await self._queue.get()) is not None:
            self._running[key] = self._clock()
            try:
                again = await self._look(key)
            finally:
                self._figures.reconciled(self._clock() - self._running.pop(key))
                self._queue.done(key)
            again()

    async def _look(self, key: str) -> Callable[[], None]:
        """One look; what it answers is to be called when the key is free again."""
        try:
            delay_s = await self._reconcile(key)
        except Exception as error:  # noqa: BLE001 - a reset that no one foresaw must not stop the others
            return self._failed(key, error)
        self._queue.forget(key)
        return lambda: None if delay_s is None else self._queue.add_after(key, delay_s)

    def _failed(self, key: str, error: Exception) -> Callable[[], None]:
        self._figures.reconcile_failed(type(error).__name__)
        if not isinstance(error, api.ApiError):
            _log.error(
                "GPUNodeReset %s: cannot go on: %r; tried again by itself",
                key,
                error,
                exc_info=error,
                extra={"reset": key},
            )
            return lambda: self._queue.add_rate_limited(key)
        level = logging.INFO if isinstance(error, api.Conflict) else logging.WARNING  # a conflict is everyday life
        _log.log(level, "GPUNodeReset %s: cannot go on: %s; tried again by itself", key, error, extra={"reset": key})
        return lambda: self._queue.add_rate_limited(key, error.retry_after_s or 0.0)
