"""What /metrics tells. No label names a node or a reset: the number of series does not grow with the cluster."""

from collections.abc import Callable

import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_RESET_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
_RECONCILE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        self._resets = self._counter("resets", "GPUNodeResets that ended, by result", "result")
        self._nodes = self._counter("node_results", "Nodes that were reset, by result", "result")
        self._errors = self._counter(
            "reconcile_errors", "Looks at a GPUNodeReset that have to be repeated, by kind", "kind"
        )
        self._requests = self._counter(
            "api_requests", "Requests to the API server, by verb and HTTP status", "verb", "code"
        )
        self._reset_s = self._histogram("reset_duration_seconds", "From a reset's start to its end", _RESET_S)
        self._reconcile_s = self._histogram("reconcile_seconds", "One look at a GPUNodeReset", _RECONCILE_S)
        self._leader = self._gauge("leader", "1 if this replica leads, else 0")
        self._depth = self._gauge("queue_depth", "GPUNodeResets that wait for a worker")
        self._waiting_s = self._gauge("queue_oldest_seconds", "How long the first of them has waited")
        self._event_s = self._gauge(
            "last_event_age_seconds", "Since the last event from the API server; NaN before the first"
        )
        self._event_s.set(float("nan"))

    def follow(
        self,
        *,
        leading: Callable[[], bool],
        depth: Callable[[], int],
        oldest_s: Callable[[], float],
        event_age_s: Callable[[], float],
    ) -> None:
        """Ask these whenever the metrics are read."""
        self._leader.set_function(lambda: float(leading()))
        self._depth.set_function(depth)
        self._waiting_s.set_function(oldest_s)
        self._event_s.set_function(event_age_s)

    def reset_ended(self, result: str, seconds: float | None) -> None:
        """A GPUNodeReset ended, `seconds` after it started; None if it never did."""
        self._resets.labels(result).inc()
        if seconds is not None:
            self._reset_s.observe(max(0.0, seconds))

    def node_done(self, result: str) -> None:
        """A node's reset ended."""
        self._nodes.labels(result).inc()

    def reconciled(self, seconds: float) -> None:
        """A worker looked at a GPUNodeReset."""
        self._reconcile_s.observe(seconds)

    def reconcile_failed(self, kind: str) -> None:
        """That look has to be repeated; `kind` is the class of the error."""
        self._errors.labels(kind).inc()

    def requested(self, verb: str, code: str) -> None:
        """A request to the API server was answered, or not (`none`)."""
        self._requests.labels(verb, code).inc()

    def render(self) -> bytes:
        """All of it, in the text format."""
        return prometheus_client.generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cleanslate_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"cleanslate_{name}", text, registry=self.registry, buckets=buckets)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"cleanslate_{name}", text, registry=self.registry)
