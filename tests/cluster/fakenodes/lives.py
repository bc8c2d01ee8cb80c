"""The life of one simulated pod: its play, written to the API as it goes on, and its end."""

import asyncio
import math
import time
from collections.abc import Awaitable

from cluster.fakenodes import api, plays, statuses
from cluster.fakenodes.behaviours import Behaviour
from cluster.fakenodes.nodes import Node
from cluster.fakenodes.pods import Pod


class Life:
    """One pod on one node, driven by one task (`lead`). The other methods tell that task what happened, and never wait."""

    def __init__(self, pod: Pod, node: Node, behaviour: Behaviour, server: api.Api) -> None:
        self.pod = pod
        self.node = node
        self._play = plays.Play(pod, behaviour, node.clock)
        self._api = server
        self._seen_s = time.monotonic()
        self._pod_ip = node.next_pod_ip()
        self._stirred = asyncio.Event()
        self._is_gone = False
        self._is_deleting = False
        self._has_news = False
        self._was_written = False
        self._moments = self._play.moments()
        self._until_s = self._seen_s

    def behave(self, behaviour: Behaviour) -> None:
        """From here on the pod does this, from the state that it is in."""
        if behaviour == self._play.behaviour:
            return
        self._play.behaviour = behaviour
        self._moments = self._play.moments()
        self._until_s = time.monotonic()
        self._stirred.set()

    def delete(self) -> None:
        """Somebody asked for the pod's end."""
        if not self._is_deleting:
            self._is_deleting = True
            self._stirred.set()

    def vanish(self) -> None:
        """The pod is no longer in the API."""
        self._is_gone = True
        self._stirred.set()

    def tell_again(self) -> None:
        """Its node answers again: what the API has may be old, or the controller's guess."""
        self._has_news = True
        self._stirred.set()

    async def lead(self) -> None:
        """Plays until the pod is gone from the API."""
        while not self._is_gone and not self._is_deleting:
            if time.monotonic() >= self._until_s:
                stays_s = next(self._moments)
                self._until_s += stays_s
                self._has_news = True
                if stays_s == 0:
                    continue
            await self._tell()
            await self._wait_until(self._until_s)
        if not self._is_gone:
            await self._end()

    async def _end(self) -> None:
        """As a kubelet does: the containers end, the last status is written, then the pod is deleted without a grace period."""
        begun_s = time.monotonic()
        while not self._is_gone:
            deletion_s = self._play.behaviour.deletion_s
            until_s = math.inf if deletion_s is None else begun_s + deletion_s
            if time.monotonic() >= until_s and self.node.awake.is_set():
                break
            await self._wait_until(until_s if self.node.awake.is_set() else math.inf)
        if self._is_gone:
            return
        self._play.end()
        self._has_news = True
        await self._tell()
        await self._delete()

    async def _tell(self) -> None:
        """Writes the state, if it is new and the node answers."""
        if not self._has_news or not self._play.is_visible or not self.node.awake.is_set():
            return
        self._has_news = False
        body = statuses.patch(self._play, host_ip=self.node.host_ip, pod_ip=self._pod_ip)
        if not self._was_written:
            self._was_written = True
            self._api.figures.observe("pod seen to first write", time.monotonic() - self._seen_s)
        await self._answered(
            self._api.call(
                "pod status",
                "PATCH",
                f"{self.pod.path}/status",
                body,
                content=api.STRATEGIC_PATCH,
                accept=api.ONLY_METADATA,
            )
        )

    async def _delete(self) -> None:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.pod.uid}}
        await self._answered(self._api.call("pod delete", "DELETE", self.pod.path, options, accept=api.ONLY_METADATA))

    async def _answered(self, call: Awaitable[api.Answer]) -> None:
        """404: the pod is gone. 409: another one has its name now. Other refusals are for a person to read."""
        answer = await call
        if answer.status in {404, 409}:
            self._is_gone = True
        elif not answer.ok:
            self._api.figures.trouble(f"pod {self.pod.namespace}/{self.pod.name}: cannot write: {answer.describe()}")

    async def _wait_until(self, until_s: float) -> None:
        """Until that time, or until something happened."""
        timeout_s = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
        try:
            await asyncio.wait_for(self._stirred.wait(), timeout_s)
        except TimeoutError:
            return
        self._stirred.clear()
