"""One replica, from its start to its end: probes, candidate, leader, and out.

It is crash-only. A leader that loses its Lease, or its watches, ends at once and starts anew; whatever it was doing is taken
up again from what the cluster says. Only SIGTERM is a goodbye: the step in hand is finished and the Lease given back.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from cleanslate_operator import (
    api,
    connection,
    events,
    eventsource,
    health,
    leader,
    metrics,
    names,
    paths,
    settings,
    workers,
    workqueue,
)

_STEP_S = 4.0  # for the step in hand at SIGTERM; with the rest that follows below 10 s in all
_FLUSH_S = 1.0
_SOURCE_S = 0.5
_CRD_PAUSE_S = 10.0
_log = logging.getLogger(__name__)


class Controller(Protocol):
    """What knows how to go on with a reset."""

    async def reconcile(self, name: str) -> float | None:
        """One look at the reset of this name: the seconds after which to look again, or None. Raises ApiError for a retry."""


Build = Callable[[api.Api, settings.Settings, events.Recorder, metrics.Metrics], Controller]


class Runtime:
    """One replica. Build it in a running event loop."""

    def __init__(self, given: settings.Settings, configuration: connection.Configuration, build: Build) -> None:
        self._settings = given
        self._configuration = configuration
        self._build = build
        self._stop = asyncio.Event()
        self._heard_at: float | None = None
        self._metrics = metrics.Metrics()
        self._api = api.Api(configuration, count=self._metrics.requested)
        self._elector = leader.Elector(
            self._api,
            namespace=given.operator_namespace,
            name=names.LEADER_LEASE,
            identity=given.identity,
            terms=leader.Terms(
                lease_duration_s=given.lease_duration_s,
                renew_deadline_s=given.renew_deadline_s,
                retry_period_s=given.retry_period_s,
            ),
        )
        fenced = self._api.fenced(self._elector.remaining_s)
        self._queue = workqueue.WorkQueue()
        self._recorder = events.Recorder(fenced, identity=given.identity)
        controller = build(fenced, given, self._recorder, self._metrics)
        self._workers = workers.Workers(self._queue, controller.reconcile, self._metrics)
        self._source = eventsource.EventSource(configuration, namespace=given.resets_namespace, enqueue=self._enqueue)
        self._health = health.Server(self._checks(), self._metrics, bind=given.bind, port=given.port)

    async def run(self) -> int:
        """Serve until SIGTERM or until something ends that must not; the exit status: 0 after a goodbye, else 1."""
        self._listen()
        try:
            port = await self._health.start()
        except OSError as error:
            _log.error("probes: cannot serve on %s port %d: %s", self._settings.bind, self._settings.port, error)
            return 1
        _log.info("probes: served on port %d; waiting for Lease %s", port, names.LEADER_LEASE)
        ready = await self._unless_stopped(self._become_leader())
        return await self._lead() if ready else await self._goodbye()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._metrics.follow(
            leading=self._elector.is_leader,
            depth=self._queue.depth,
            oldest_s=self._queue.oldest_s,
            event_age_s=lambda: float("nan") if self._heard_at is None else time.monotonic() - self._heard_at,
        )

    def _checks(self) -> health.Checks:
        return health.Checks(
            is_leader=self._elector.is_leader, running_s=self._workers.running_s, silent_s=self._api.silent_s
        )

    async def _become_leader(self) -> None:
        await self._until_served()
        await self._elector.acquire()

    async def _until_served(self) -> None:
        """kopf looks for the resource once, at its start: wait until it is there."""
        while True:
            try:
                await self._api.get(f"{paths.resets()}?limit=1")
            except api.NotFound:
                _log.error("%s: cannot list: the API server knows none; install crds/", names.PLURAL)
            except api.ApiError as error:
                _log.warning("%s; tried again in %g s", error, _CRD_PAUSE_S)
            else:
                return
            await asyncio.sleep(_CRD_PAUSE_S)

    async def _lead(self) -> int:
        """Work as the leader. Whichever of these ends first decides how this process ends."""
        working = asyncio.create_task(self._workers.run(self._settings.workers), name="workers")
        holding = asyncio.create_task(self._elector.hold(), name="Lease")
        delivering = asyncio.create_task(self._source.run(), name="watches")
        recording = asyncio.create_task(self._recorder.run(), name="events")
        stopping = asyncio.create_task(self._stop.wait(), name="SIGTERM")
        vital: set[asyncio.Task[Any]] = {working, holding, delivering, recording, stopping}
        ended, _ = await asyncio.wait(vital, return_when=asyncio.FIRST_COMPLETED)
        if not self._stop.is_set():
            _log.critical("operator: cannot go on: %s; starts anew", "; ".join(_outcome(task) for task in ended))
            return 1
        await self._finish(working)
        await _cancel(holding)  # a renewal now would make giving back a conflict
        return await self._goodbye()

    async def _finish(self, working: asyncio.Task[None]) -> None:
        """Let the workers finish the step in hand, and tell what there is to tell."""
        self._queue.close()
        await asyncio.wait({working}, timeout=_STEP_S)
        await _cancel(working)
        await self._recorder.flush(_FLUSH_S)

    async def _goodbye(self) -> int:
        """Give the Lease back, and close what is open."""
        await self._elector.release()
        await asyncio.to_thread(self._source.stop, _SOURCE_S)
        await self._health.stop()
        await self._api.close()
        return 0

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, None]) -> bool:
        """Whether that came to its end before SIGTERM."""
        task, stopping = asyncio.create_task(waiting), asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(stopping)
        if self._stop.is_set():
            await _cancel(task)
            return False
        await task
        return True

    def _enqueue(self, name: str) -> None:
        self._heard_at = time.monotonic()
        self._queue.add(name)


async def _cancel(task: asyncio.Task[Any]) -> None:
    """End a task, and give it a moment to do so."""
    task.cancel()
    await asyncio.wait({task}, timeout=_FLUSH_S)


def _outcome(task: asyncio.Task[Any]) -> str:
    error = task.exception() or task.result()
    return f"{task.get_name()}: {type(error).__name__}: {error}" if error else f"{task.get_name()}: ended by itself"
