"""The queue of what to look at: keys only, each once, and never one key by two workers.

It behaves as client-go's does. A key that is added while it waits is there already; one that is added while it is worked on
comes again when that is done. Everything runs in one event loop, on its clock.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from cleanslate_operator.buckets import Buckets, Rate

EVENTS = Rate(burst=10, per_s=4.0)  # a storm of events about one reset is looked at four times a second
STEPS = Rate(burst=200, per_s=20.0)  # a reset that always asks for one more step at once keeps no worker to itself
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 30.0
_random = random.SystemRandom()


@dataclass(slots=True)
class _Timer:
    at: float
    handle: asyncio.TimerHandle


class WorkQueue:
    """Keys to be worked on. Build and use it in one running event loop."""

    def __init__(self, *, events: Rate = EVENTS, steps: Rate = STEPS) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Queue[str | None] = asyncio.Queue()
        self._waiting: dict[str, float] = {}  # key: since when it is ready
        self._working: set[str] = set()
        self._again: set[str] = set()
        self._timers: dict[str, _Timer] = {}
        self._failures: dict[str, int] = {}
        self._events = Buckets(events, self._loop.time)
        self._steps = Buckets(steps, self._loop.time)
        self._closed = False

    def add(self, key: str) -> None:
        """Something happened to `key`: look at it soon."""
        self._offer(key, self._events)

    def add_after(self, key: str, delay_s: float) -> None:
        """Look at `key` in a while, or at once. Of several such moments the earliest counts, and none once it is looked at."""
        if delay_s > 0:
            self._schedule(key, delay_s, self._push)
        else:
            self._offer(key, self._steps)

    def add_rate_limited(self, key: str, at_least_s: float = 0.0) -> None:
        """Work on `key` failed: look at it again, later each time, at most LAST_RETRY_S unless the API server asks for more."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 20))
        self.add_after(key, max(at_least_s, delay_s * _random.uniform(0.8, 1.0)))

    def forget(self, key: str) -> None:
        """Work on `key` went well: the next failure is the first."""
        self._failures.pop(key, None)

    async def get(self) -> str | None:
        """The next key; None once the queue is closed. Tell `done` when its work is over."""
        key = await self._ready.get()
        if key is None or self._closed:
            self._ready.put_nowait(None)  # for the next worker
            return None
        del self._waiting[key]
        self._working.add(key)
        self._cancel(key)
        return key

    def done(self, key: str) -> None:
        """Work on `key` is over. It comes again if it was added meanwhile."""
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self._offer(key, self._events)

    def close(self) -> None:
        """Hand out no more keys."""
        self._closed = True
        for key in tuple(self._timers):
            self._cancel(key)
        self._ready.put_nowait(None)

    def depth(self) -> int:
        """How many keys are ready and not yet worked on."""
        return len(self._waiting)

    def oldest_s(self) -> float:
        """How long the first of them has been ready, in seconds; 0 if there is none."""
        first = next(iter(self._waiting.values()), None)
        return 0.0 if first is None else self._loop.time() - first

    def _offer(self, key: str, buckets: Buckets) -> None:
        """Make `key` ready now, or as soon as it may be again."""
        if key in self._working:
            self._again.add(key)
        elif key not in self._waiting:
            wait_s = buckets.take(key)
            if wait_s > 0:
                self._schedule(key, wait_s, lambda due: self._offer(due, buckets))
            else:
                self._push(key)

    def _push(self, key: str) -> None:
        if key in self._working:
            self._again.add(key)
        elif key not in self._waiting and not self._closed:
            self._waiting[key] = self._loop.time()
            self._ready.put_nowait(key)

    def _schedule(self, key: str, delay_s: float, then: Callable[[str], None]) -> None:
        at = self._loop.time() + delay_s
        timer = self._timers.get(key)
        if self._closed or (timer and timer.at <= at):
            return
        self._cancel(key)
        self._timers[key] = _Timer(at, self._loop.call_at(at, self._due, key, then))

    def _due(self, key: str, then: Callable[[str], None]) -> None:
        del self._timers[key]
        then(key)

    def _cancel(self, key: str) -> None:
        timer = self._timers.pop(key, None)
        if timer:
            timer.handle.cancel()
