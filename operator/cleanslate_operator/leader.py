"""Which replica leads: a Lease, and a fence in front of everything that a leader writes.

The terms are those of client-go (and of `kubernetes.aio.leaderelection`): lease duration, renew deadline, retry period. The
client's own elector is not used: it counts by the wall clock, asks with a timeout of five minutes, so that a silent API
server leaves two leaders, ends on a broken connection, cannot say whether it still leads, and never gives the Lease back.

Clocks of different machines are never compared. A candidate takes the Lease over when it has seen it unchanged for the lease's
duration by its own clock; a leader counts from before it asked for its last renewal, and for less: by then it has stopped.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cleanslate_operator import api, paths

_LONGEST_LEASE_S = 300  # a Lease that asks for more was not written by us
_log = logging.getLogger(__name__)


class LostError(Exception):
    """This process does not lead any more; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long things take, in seconds: retry period < renew deadline < lease duration."""

    lease_duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_period_s: float = 2.0


class Elector:
    """One candidate. `identity` is its own: a container that restarts in its pod keeps it, and takes over from itself at once."""

    def __init__(
        self,
        client: api.Api,
        *,
        namespace: str,
        name: str,
        identity: str,
        terms: Terms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = client
        self._namespace = namespace
        self._name = name
        self._path = paths.lease(namespace, name)
        self._identity = identity
        self._terms = terms
        self._clock = clock
        self._lease: api.Json | None = None  # as last read or written
        self._seen: tuple[str, float] | None = None  # its version, and when that was first seen
        self._acquired = ""  # acquireTime of our own term: tells us from another process of our name
        self._until = float("-inf")

    def remaining_s(self) -> float:
        """For how long this process surely leads yet, in seconds; 0 or less if it does not."""
        return self._until - self._clock()

    def is_leader(self) -> bool:
        """Whether this process surely leads."""
        return self.remaining_s() > 0

    async def acquire(self) -> None:
        """Wait until this process leads. API errors are logged and outlasted."""
        while not await self._attempt():
            await self._pause()
        _log.info("Lease %s: this replica leads", self._name, extra={"identity": self._identity})

    async def hold(self) -> None:
        """Renew the Lease for as long as that goes well. Raises LostError, at the latest when `remaining_s()` is over."""
        while True:
            await self._pause()
            if not self.is_leader():
                raise LostError(self._text(f"not renewed for {self._terms.renew_deadline_s:g} s"))
            try:
                async with asyncio.timeout(self.remaining_s()):
                    await self._renew()
            except (api.ApiError, TimeoutError) as error:
                _log.warning(
                    "Lease %s: cannot renew: %s; tried again for %.1f s",
                    self._name,
                    error,
                    max(0.0, self.remaining_s()),
                )

    async def release(self) -> None:
        """Give the Lease back, so that another replica takes over at once. This process does not lead from here on."""
        led, self._until = self.is_leader(), float("-inf")
        if not led or self._lease is None:
            return
        try:
            await self._api.replace(self._path, self._written("", self._now()), timeout_s=self._terms.retry_period_s)
        except api.ApiError as error:
            _log.warning("Lease %s: cannot give back: %s; another replica takes over by itself", self._name, error)

    async def _attempt(self) -> bool:
        try:
            lease = await self._read()
            if lease is not None and not self._is_free(lease):
                return False
            await self._take()
        except api.Conflict:
            return False  # another replica was faster
        except api.ApiError as error:
            _log.warning("Lease %s: cannot take: %s; tried again by itself", self._name, error)
            return False
        return True

    async def _read(self) -> api.Json | None:
        try:
            self._lease = await self._api.get(self._path, timeout_s=self._request_s)
        except api.NotFound:
            self._lease = None
            return None
        version = str(self._lease["metadata"].get("resourceVersion"))
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, self._clock())
        return self._lease

    def _is_free(self, lease: api.Json) -> bool:
        holder = _spec(lease).get("holderIdentity")
        if not holder or holder == self._identity:
            return True
        return self._seen is not None and self._clock() - self._seen[1] >= self._duration_s(lease)

    def _duration_s(self, lease: api.Json) -> float:
        """What its holder goes by may be longer than our own, in the middle of an update."""
        theirs = _spec(lease).get("leaseDurationSeconds")
        lawful = isinstance(theirs, int) and 0 < theirs <= _LONGEST_LEASE_S
        return max(self._terms.lease_duration_s, float(theirs or 0)) if lawful else self._terms.lease_duration_s

    async def _take(self) -> None:
        now = self._now()
        self._acquired = now
        await self._write(self._written(self._identity, now))

    async def _renew(self) -> None:
        try:
            if self._lease is None:
                await self._reread()
            await self._write(self._written(self._identity, self._now()))
        except (api.Conflict, api.NotFound):
            self._lease = None  # somebody wrote it; look before the next try
            await self._reread()
            await self._write(self._written(self._identity, self._now()))

    async def _reread(self) -> None:
        """Read the Lease anew. Raises LostError if it is another's, or another process's of the same name."""
        lease = await self._read()
        if lease is None:
            return
        spec = _spec(lease)
        if spec.get("holderIdentity") != self._identity or spec.get("acquireTime") != self._acquired:
            self._until = float("-inf")
            raise LostError(self._text(f"held by {str(spec.get('holderIdentity') or 'nobody')[:253]} now"))

    async def _write(self, lease: api.Json) -> None:
        """Create or replace the Lease, of the version that was read only: of two that try, one gets Conflict."""
        started = self._clock()
        if "resourceVersion" in lease["metadata"]:
            self._lease = await self._api.replace(self._path, lease, timeout_s=self._request_s)
        else:
            self._lease = await self._api.create(paths.leases(self._namespace), lease, timeout_s=self._request_s)
        self._until = started + self._terms.renew_deadline_s

    def _written(self, holder: str, now: str) -> api.Json:
        lease: dict[str, Any] = dict(self._lease or {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"})
        lease["metadata"] = dict(lease.get("metadata") or {"name": self._name, "namespace": self._namespace})
        before = _spec(lease)
        lease["spec"] = {
            **{name: value for name, value in before.items() if name != "holderIdentity"},
            **({"holderIdentity": holder} if holder else {}),  # a Lease that nobody holds names nobody
            "leaseDurationSeconds": max(1, round(self._terms.lease_duration_s)),
            "acquireTime": self._acquired,
            "renewTime": now,
            "leaseTransitions": _transitions(before) + (before.get("acquireTime") != self._acquired),
        }
        return lease

    @property
    def _request_s(self) -> float:
        """Time for two tries, and more, before the deadline."""
        return self._terms.renew_deadline_s / 2.5

    async def _pause(self) -> None:
        await asyncio.sleep(self._terms.retry_period_s)

    def _text(self, cause: str) -> str:
        return f"Lease {self._name}: cannot lead: {cause}; this process ends and starts anew as a candidate"

    @staticmethod
    def _now() -> str:
        """For people: no replica decides by it."""
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _spec(lease: api.Json) -> dict[str, Any]:
    spec = lease.get("spec")
    return spec if isinstance(spec, dict) else {}


def _transitions(spec: dict[str, Any]) -> int:
    value = spec.get("leaseTransitions")
    return value if isinstance(value, int) and 0 <= value < 1 << 30 else 0
