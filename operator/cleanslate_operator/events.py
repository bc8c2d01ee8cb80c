"""Events on GPUNodeResets, as `kubectl describe gnr` shows them.

kopf's own never show there: it files them under a namespace that kubectl does not look in for a cluster-scoped object. Here an
Event has a name of its own for each (object, reason, message), so that the same news told again, even by another process,
raises the count of the first instead of making a second. Told in order, in the background: no reset waits for an Event, and
one that can't be written is logged and dropped.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cleanslate_operator import api, names, paths, times
from cleanslate_operator.buckets import Buckets, Rate

WAITING_LIMIT = 1000
RATE = Rate(burst=40, per_s=1 / 30)  # of one object; a reset of many nodes says most in its status
_MESSAGE_BYTES = 1024  # the API's own limit
_REASON_LENGTH = 128
_KNOWN_LIMIT = 1000  # counts remembered
_NAME_LENGTH = 200
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One thing to tell of a GPUNodeReset."""

    name: str
    uid: str
    reason: str
    message: str
    warning: bool = False

    @property
    def event_name(self) -> str:
        """The Event's name: the same for the same news, another for any other."""
        text = "\0".join((self.uid, self.reason, self.message, str(self.warning)))
        return f"{self.name[:_NAME_LENGTH].rstrip('.-')}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Recorder:
    """Takes news at once and writes them one by one, while `run` runs."""

    def __init__(
        self,
        client: api.Api,
        *,
        identity: str,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = client
        self._identity = identity
        self._clock = clock
        self._news: asyncio.Queue[News] = asyncio.Queue(WAITING_LIMIT)
        self._rates = Buckets(RATE, monotonic)
        self._counts: OrderedDict[str, int] = OrderedDict()

    def post(self, *, name: str, uid: str, reason: str, message: str, warning: bool = False) -> None:
        """Tell something of a GPUNodeReset. Never waits and never raises: what is too much is logged and dropped."""
        news = News(name=name, uid=uid, reason=reason[:_REASON_LENGTH], message=_cut(message), warning=warning)
        if self._rates.take(uid) > 0:
            _drop(news, "too many of this object")
            return
        try:
            self._news.put_nowait(news)
        except asyncio.QueueFull:
            _drop(news, f"{WAITING_LIMIT} wait already")

    async def run(self) -> None:
        """Write what is told, in order, for ever."""
        while True:
            news = await self._news.get()
            try:
                await self._write(news)
            except api.ApiError as error:
                _drop(news, str(error))
            finally:
                self._news.task_done()

    async def flush(self, within_s: float) -> None:
        """Wait until all that was told is written, but no longer than this."""
        try:
            async with asyncio.timeout(within_s):
                await self._news.join()
        except TimeoutError:
            _log.warning("events: cannot write all: %d left after %g s", self._news.qsize(), within_s)

    async def _write(self, news: News) -> None:
        if news.event_name in self._counts and await self._repeat(news):
            return
        try:
            await self._api.create(paths.events(), self._first(news))
            self._remember(news, 1)
        except api.Conflict:  # told by a process before this one
            await self._repeat(news)

    async def _repeat(self, news: News) -> bool:
        """Raise the count of an Event that exists; False if it has expired meanwhile."""
        path, seen = paths.event(news.event_name), {"lastTimestamp": times.rfc3339(self._clock())}
        count = self._counts.pop(news.event_name, None)
        try:
            if count is None:  # a patch answers with the object: no right to read Events is needed
                count = _count(await self._api.merge_patch(path, seen))
            await self._api.merge_patch(path, {**seen, "count": count + 1})
        except api.NotFound:
            return False
        self._remember(news, count + 1)
        return True

    def _remember(self, news: News, count: int) -> None:
        self._counts[news.event_name] = count
        if len(self._counts) > _KNOWN_LIMIT:
            self._counts.popitem(last=False)

    def _first(self, news: News) -> api.Json:
        now = times.rfc3339(self._clock())
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": news.event_name, "namespace": paths.EVENTS_NAMESPACE},
            # No namespace: kubectl looks for a cluster-scoped object's Events by involvedObject.namespace="".
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": news.name,
                "uid": news.uid,
            },
            "type": "Warning" if news.warning else "Normal",
            "reason": news.reason,
            "message": news.message,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": names.COMPONENT},
            "reportingComponent": names.COMPONENT,
            "reportingInstance": self._identity[:128],
        }


def _drop(news: News, cause: str) -> None:
    _log.warning(
        "Event %s: cannot write: %s; dropped: %s", news.reason, cause, news.message, extra={"reset": news.name}
    )


def _count(event: api.Json) -> int:
    count = event.get("count")
    return count if isinstance(count, int) and 0 < count < 1 << 30 else 1


def _cut(message: str) -> str:
    raw = message.encode("utf-8", "replace")
    if len(raw) <= _MESSAGE_BYTES:
        return raw.decode("utf-8")
    return raw[: _MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "…"
