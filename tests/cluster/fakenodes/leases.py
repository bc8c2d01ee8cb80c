"""Keeps the leases of all nodes that answer fresh, spread evenly over the interval."""

import asyncio
import heapq
import time

from cluster.fakenodes import api
from cluster.fakenodes.nodes import LEASES, Node

# The kubelet renews every 10 s. The controller-manager calls a node silent after its --node-monitor-grace-period (50 s), and an
# operator may after the lease's own 40 s. A renewal costs a small machine 4 ms of CPU, so a large fleet renews less often.
LEAST_RENEW_S = 5.0
MOST_RENEW_S = 30.0
CHEAP_RENEWALS_PER_S = 50.0


def interval_s(count: int) -> float:
    """How often that many nodes renew their leases if nobody says otherwise: 5 s up to 250 nodes, 30 s from 1,500 on.

    The controller-manager's grace period has to be longer by what a busy server needs: 10 s or more.
    """
    return min(MOST_RENEW_S, max(LEAST_RENEW_S, count / CHEAP_RENEWALS_PER_S))


class Leases:
    """Renews what was handed to `keep`. `run` is the task that does it."""

    def __init__(self, server: api.Api, renew_s: float) -> None:
        self._api = server
        self._renew_s = renew_s
        self._queue: list[tuple[float, str, Node]] = []
        self._kept: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def keep(self, node: Node, *, first_s: float) -> None:
        """Renews the node's lease in `first_s` seconds and then once in each interval, while the node answers."""
        if node.name in self._kept:
            return
        self._kept.add(node.name)
        heapq.heappush(self._queue, (time.monotonic() + first_s, node.name, node))
        self._changed.set()

    async def create(self, node: Node) -> None:
        """Makes the lease, or takes over the one that is there."""
        answer = await self._api.call("lease create", "POST", LEASES, node.lease())
        if answer.status == 409:
            await self.renew(node)
        elif answer.ok:
            node.lease_version = answer.data()["metadata"]["resourceVersion"]
        else:
            self._api.figures.trouble(f"lease {node.name}: cannot create: {answer.describe()}")

    async def renew(self, node: Node) -> None:
        """One renewal. A lease that somebody else changed is read and written over; one that is gone is made anew."""
        answer = await self._api.call("lease", "PUT", node.lease_path, node.lease(), urgent=True)
        if answer.status in {409, 422}:  # 422: no version given
            node.lease_version = (await self._version(node)) or node.lease_version
            answer = await self._api.call("lease", "PUT", node.lease_path, node.lease(), urgent=True)
        if answer.ok:
            node.lease_version = answer.data()["metadata"]["resourceVersion"]
        elif answer.status == 404 and not node.is_gone:
            node.lease_version = ""
            await self.create(node)
        else:
            self._api.figures.trouble(f"lease {node.name}: cannot renew: {answer.describe()}")

    async def run(self) -> None:
        """Renews what is due, until it is cancelled."""
        while True:
            now_s = time.monotonic()
            while self._queue and self._queue[0][0] <= now_s:
                due_s, _, node = heapq.heappop(self._queue)
                self._begin(node, due_s)
            self._changed.clear()
            await self._wait(self._queue[0][0] - now_s if self._queue else None)

    async def close(self) -> None:
        """Waits for the renewals that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, node: Node, due_s: float) -> None:
        if node.is_gone or not node.awake.is_set():
            self._kept.discard(node.name)
            return
        task = asyncio.create_task(self._renew_and_requeue(node, due_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew_and_requeue(self, node: Node, due_s: float) -> None:
        """The next renewal is counted from when this one was due, so that the spread stays even; never in the past."""
        try:
            await self.renew(node)
        except Exception as error:
            self._api.figures.trouble(f"lease {node.name}: cannot renew: {type(error).__name__} {error}")
        late_s = time.monotonic() - due_s
        self._api.figures.observe("lease lateness", late_s)
        heapq.heappush(self._queue, (due_s + max(self._renew_s, late_s), node.name, node))
        self._changed.set()

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    async def _version(self, node: Node) -> str:
        answer = await self._api.call("lease", "GET", node.lease_path, urgent=True)
        return answer.data()["metadata"]["resourceVersion"] if answer.ok else ""
