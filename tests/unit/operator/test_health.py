"""Probes and metrics over HTTP, as the kubelet and Prometheus ask."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cleanslate_operator import health, metrics

Ask = Callable[..., Awaitable[tuple[int, str]]]


class State:
    """What the probes are told."""

    def __init__(self) -> None:
        self.leader = True
        self.running_s = 0.0
        self.silent_s = 0.0

    def checks(self) -> health.Checks:
        return health.Checks(
            is_leader=lambda: self.leader, running_s=lambda: self.running_s, silent_s=lambda: self.silent_s
        )


def with_server(check: Callable[[State, metrics.Metrics, Ask], Awaitable[None]], bind: str = "127.0.0.1") -> None:
    """Run a check against a server."""

    async def run() -> None:
        state, figures = State(), metrics.Metrics()
        server = health.Server(state.checks(), figures, bind=bind, port=0)
        port = await server.start()

        async def ask(path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, f"http://{host}:{port}{path}") as answer,
            ):
                return answer.status, await answer.text()

        try:
            await check(state, figures, ask)
        finally:
            await server.stop()

    asyncio.run(run())


def test_a_leader_and_a_standby_are_both_live_and_ready() -> None:
    """A standby is ready to take over; the body tells who is who."""

    async def check(state: State, figures: metrics.Metrics, ask: Ask) -> None:
        assert await ask("/livez") == (200, "ok\n")
        assert await ask("/readyz") == (200, "leader\n")
        state.leader = False
        assert await ask("/livez") == (200, "ok\n")
        assert await ask("/readyz") == (200, "standby\n")
        assert await ask("/readyz", "HEAD") == (200, "")

    with_server(check)


def test_a_leader_with_a_stuck_worker_is_not_live() -> None:
    """A standby is: what its workers did before does not count."""

    async def check(state: State, figures: metrics.Metrics, ask: Ask) -> None:
        state.running_s = 299.0
        assert (await ask("/livez"))[0] == 200
        state.running_s = 301.0
        assert await ask("/livez") == (500, "worker: stuck for 301 s, at most 300 s are well\n")
        state.leader = False
        assert (await ask("/livez"))[0] == 200

    with_server(check)


def test_an_operator_that_does_not_reach_the_api_server_is_live_but_not_ready() -> None:
    """A restart would not help."""

    async def check(state: State, figures: metrics.Metrics, ask: Ask) -> None:
        state.silent_s = 61.0
        assert (await ask("/livez"))[0] == 200
        assert await ask("/readyz") == (503, "API server: last heard of 61 s ago, at most 60 s are well\n")
        state.silent_s = float("inf")
        assert await ask("/readyz") == (503, "API server: last heard of never, at most 60 s are well\n")

    with_server(check)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", "/livez", 405),
        ("DELETE", "/metrics", 405),
        ("GET", "/", 404),
        ("GET", "/metrics/x", 404),
        ("GET", "/livez/", 404),
    ],
)
def test_nothing_else_is_answered(method: str, path: str, code: int) -> None:
    """Three paths, two methods."""

    async def check(state: State, figures: metrics.Metrics, ask: Ask) -> None:
        assert (await ask(path, method))[0] == code

    with_server(check)


def test_every_address_means_ipv4_and_ipv6() -> None:
    """Whichever family the cluster uses, the kubelet reaches the probes."""

    async def check(state: State, figures: metrics.Metrics, ask: Ask) -> None:
        assert (await ask("/livez"))[0] == 200
        if socket.has_dualstack_ipv6():
            assert (await ask("/livez", host="[::1]"))[0] == 200

    with_server(check, bind="*")


def test_an_address_that_is_taken_is_told() -> None:
    """The operator ends with the reason; it does not run without probes."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            server = health.Server(State().checks(), metrics.Metrics(), bind="127.0.0.1", port=taken.getsockname()[1])
            with pytest.raises(OSError, match="in use"):
                await server.start()
            await server.stop()

    asyncio.run(run())


def test_metrics_tell_what_happened_in_prometheus_format() -> None:
    """By result, verb and code; never by node or reset."""

    async def check(state: State, figures: metrics.Metrics, ask: Ask) -> None:
        figures.reset_ended("Complete", 3.5)
        figures.reset_ended("Failed", None)
        figures.node_done("NotClean")
        figures.reconciled(0.01)
        figures.reconcile_failed("Conflict")
        figures.requested("get", "200")
        figures.follow(leading=lambda: True, depth=lambda: 7, oldest_s=lambda: 1.5, event_age_s=lambda: 2.5)
        code, text = await ask("/metrics")
        assert code == 200
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        expected = {
            ("cleanslate_resets_total", "Complete"): 1,
            ("cleanslate_resets_total", "Failed"): 1,
            ("cleanslate_node_results_total", "NotClean"): 1,
            ("cleanslate_reset_duration_seconds_count",): 1,
            ("cleanslate_reset_duration_seconds_sum",): 3.5,
            ("cleanslate_reconcile_seconds_count",): 1,
            ("cleanslate_reconcile_errors_total", "Conflict"): 1,
            ("cleanslate_api_requests_total", "200", "get"): 1,
            ("cleanslate_leader",): 1,
            ("cleanslate_queue_depth",): 7,
            ("cleanslate_queue_oldest_seconds",): 1.5,
            ("cleanslate_last_event_age_seconds",): 2.5,
        }
        assert {key: samples.get(key) for key in expected} == expected
        assert samples["process_resident_memory_bytes",] > 0

    with_server(check)
