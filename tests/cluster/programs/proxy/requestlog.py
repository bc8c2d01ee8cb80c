"""What the proxy was asked, in order of arrival."""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from cluster.programs.proxy.apirequest import ApiRequest
from cluster.programs.proxy.faults import Which
from cluster.programs.proxy.rules import Changes


@dataclass(slots=True)
class Entry:
    """One request and the code that the client was answered with: None as long as, or if, it had no answer."""

    time_s: float
    request: ApiRequest
    code: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Flat: the fields of the request, `time_s` and `code`."""
        return {**dataclasses.asdict(self.request), "time_s": self.time_s, "code": self.code}


class RequestLog:
    """All requests since the start or the last `forget`; about 0.5 KB each, never cut, since a test counts them."""

    def __init__(self, changes: Changes) -> None:
        self._entries: list[Entry] = []
        self._changes = changes

    def begin(self, request: ApiRequest) -> Entry:
        """Records a request that has arrived."""
        entry = Entry(time.time(), request)
        self._entries.append(entry)
        return entry

    def answered(self, entry: Entry, code: int) -> None:
        """Records the code that the client is about to see."""
        entry.code = code
        self._changes.happened()

    def matching(self, which: Which, since_s: float) -> list[Entry]:
        """The requests that arrived later than `since_s`, in seconds of the epoch."""
        return [one for one in self._entries if one.time_s > since_s and which.matches(one.request)]

    def forget(self) -> None:
        """Empties it."""
        self._entries.clear()
