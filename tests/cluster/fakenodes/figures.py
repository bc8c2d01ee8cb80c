"""What the simulated nodes did: writes, their latencies, what had to be repeated and what went wrong."""

import collections
import time
from typing import Any

KEPT_LATENCIES = 20_000  # of each kind, the newest
KEPT_TROUBLES = 20
QUANTILES = ((50, 0.5), (90, 0.9), (99, 0.99), (100, 1.0))


class Figures:
    """Counts since the start. All of it is for one event loop: no locks."""

    def __init__(self) -> None:
        self.latencies_s: dict[str, collections.deque[float]] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self.repeats: collections.Counter[str] = collections.Counter()
        self.watches: collections.Counter[str] = collections.Counter()
        self.troubles: collections.deque[str] = collections.deque(maxlen=KEPT_TROUBLES)
        self.troubles_seen = 0
        self.loop_lag_s = 0.0

    def note(self, kind: str, latency_s: float) -> None:
        """One answered request of a kind (node, lease, pod status, …)."""
        self.calls[kind] += 1
        self.observe(kind, latency_s)

    def observe(self, kind: str, latency_s: float) -> None:
        """A latency that is not a request's."""
        self.latencies_s.setdefault(kind, collections.deque(maxlen=KEPT_LATENCIES)).append(latency_s)

    def trouble(self, text: str) -> None:
        """Something that a person should read; the last ones are kept."""
        self.troubles_seen += 1
        self.troubles.append(text)

    def data(self) -> dict[str, Any]:
        """All of it as JSON can hold it; latencies in milliseconds at 50, 90, 99 and 100 %."""
        return {
            "calls": dict(self.calls),
            "latency_ms": {kind: _quantiles(values) for kind, values in self.latencies_s.items()},
            "repeats": dict(self.repeats),
            "watches": dict(self.watches),
            "troubles": self.troubles_seen,
            "last_troubles": list(self.troubles),
            "cpu_s": round(time.process_time(), 2),
            "loop_lag_ms": round(1000 * self.loop_lag_s, 1),
        }


def _quantiles(values: collections.deque[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{name}": round(1000 * ordered[round(part * last)], 1) for name, part in QUANTILES}
