"""One replica from start to end, against a server in memory, with kopf, probes and signals as they are in a cluster."""

import asyncio
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
import yaml

from cleanslate_operator import api, events, metrics, names, paths, runtime, settings
from unit.operator import fakeapi
from unit.operator.fakeapi import FakeApi, status

LEASE = paths.lease("cleanslate-system", names.LEADER_LEASE)
OPERATOR = pathlib.Path(runtime.__file__).parents[1]


class Diary:
    """A controller that notes what it is asked to look at, and writes a label to it as a reset's step would."""

    def __init__(self) -> None:
        self.looks: list[str] = []
        self.slow_s = 0.0
        self.finished = 0

    def build(
        self, client: api.Api, given: settings.Settings, recorder: events.Recorder, figures: metrics.Metrics
    ) -> runtime.Controller:
        self._api, self._recorder = client, recorder
        return self

    async def reconcile(self, name: str) -> float | None:
        self.looks.append(name)
        await asyncio.sleep(self.slow_s)
        await self._api.merge_patch(paths.reset(name), {"metadata": {"labels": {"seen": "yes"}}})
        self._recorder.post(name=name, uid="1", reason="Seen", message="seen")
        self.finished += 1
        return None


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def given(**known: object) -> settings.Settings:
    """Settings of one replica, on a port of its own."""
    plain = {"image": "a", "identity": "pod-a", "port": free_port(), "bind": "127.0.0.1", "retry_period_s": 0.05}
    return settings.Settings(**(plain | known))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool], within_s: float = 15) -> None:
    """Wait for something, with a limit."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def probe(port: int, path: str) -> tuple[int, str]:
    """What a probe answers."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


def with_replica(check: Callable[[FakeApi, Diary, settings.Settings], Awaitable[None]], **known: object) -> int:
    """Run a replica in this process, a check beside it, then SIGTERM; returns the exit status."""
    prepare = known.pop("prepare", None)

    async def run() -> int:
        async with FakeApi().serve() as server:
            if callable(prepare):
                prepare(server)
            diary, mine = Diary(), given(**known)
            replica = asyncio.create_task(runtime.Runtime(mine, server.configuration(), diary.build).run())
            try:
                await asyncio.wait_for(check(server, diary, mine), 30)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                code = await asyncio.wait_for(replica, 15)
            return code

    return asyncio.run(run())


def holder(server: FakeApi) -> str | None:
    """Who leads, by the Lease."""
    found = server.objects.get(LEASE, {"spec": {}})["spec"].get("holderIdentity")
    return None if found is None else str(found)


def test_a_replica_leads_works_and_says_goodbye() -> None:
    """All resets there are and those that come are looked at; SIGTERM gives the Lease back and is no failure."""
    servers: list[FakeApi] = []

    async def check(server: FakeApi, diary: Diary, mine: settings.Settings) -> None:
        servers.append(server)
        await until(lambda: "old" in diary.looks)
        server.put(paths.reset("new"), {"metadata": {"uid": "2"}})
        await until(lambda: "new" in diary.looks)
        await until(lambda: server.objects[paths.reset("new")]["metadata"].get("labels") == {"seen": "yes"})
        assert holder(server) == "pod-a"
        assert await probe(mine.port, "/livez") == (200, "ok\n")
        assert await probe(mine.port, "/readyz") == (200, "leader\n")
        text = (await probe(mine.port, "/metrics"))[1]
        assert "cleanslate_leader 1.0" in text
        assert 'cleanslate_api_requests_total{code="200",verb="patch"}' in text
        age = float(text.split("\ncleanslate_last_event_age_seconds ")[1].split()[0])
        assert 0 <= age < 15

    code = with_replica(check, prepare=lambda server: server.put(paths.reset("old"), {"metadata": {"uid": "1"}}))
    assert code == 0
    assert holder(servers[0]) is None
    assert [body["reason"] for path, body in servers[0].objects.items() if path.startswith(paths.events())] == [
        "Seen"
    ] * 2


def test_the_step_in_hand_is_finished_before_the_lease_is_given_back() -> None:
    """SIGTERM in the middle of a look: it writes what it had to write, as the leader that it still is."""
    diaries: list[Diary] = []
    servers: list[FakeApi] = []

    async def check(server: FakeApi, diary: Diary, mine: settings.Settings) -> None:
        diary.slow_s = 0.5
        diaries.append(diary)
        servers.append(server)
        server.put(paths.reset("slow"), {"metadata": {"uid": "1"}})
        await until(lambda: diary.looks == ["slow"])

    started = time.monotonic()
    assert with_replica(check) == 0
    assert time.monotonic() - started < 12
    assert diaries[0].finished == 1
    writes = [path for method, path in servers[0].writes() if method in {"PATCH", "PUT"}]
    assert writes.index(paths.reset("slow")) < len(writes) - 1
    assert writes[-1] == LEASE
    assert holder(servers[0]) is None


def test_a_standby_serves_probes_and_touches_nothing() -> None:
    """Until the Lease is free: then it works at once."""

    def other_leads(server: FakeApi) -> None:
        server.put(LEASE, {"spec": {"holderIdentity": "pod-b", "leaseDurationSeconds": 15}})
        server.put(paths.reset("old"), {"metadata": {"uid": "1"}})

    async def check(server: FakeApi, diary: Diary, mine: settings.Settings) -> None:
        await until(lambda: len([path for _, path, _ in server.requests if path == LEASE]) > 5)
        assert await probe(mine.port, "/livez") == (200, "ok\n")
        assert await probe(mine.port, "/readyz") == (200, "standby\n")
        assert "cleanslate_leader 0.0" in (await probe(mine.port, "/metrics"))[1]
        assert (diary.looks, server.writes(), server.watches) == ([], [], [])
        server.put(LEASE, {"spec": {"leaseDurationSeconds": 15}})
        await until(lambda: "old" in diary.looks)

    assert with_replica(check, prepare=other_leads) == 0


def test_a_standby_ends_at_once_when_told_to() -> None:
    """And leaves the leader's Lease alone."""
    servers: list[FakeApi] = []

    async def check(server: FakeApi, diary: Diary, mine: settings.Settings) -> None:
        servers.append(server)
        await until(lambda: any(path == LEASE for _, path, _ in server.requests))

    prepare = lambda server: server.put(LEASE, {"spec": {"holderIdentity": "pod-b"}})  # noqa: E731
    assert with_replica(check, prepare=prepare) == 0
    assert holder(servers[0]) == "pod-b"


def test_a_cluster_without_the_crd_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """No crash loop: the log says what to do, and the probes answer."""

    async def check(server: FakeApi, diary: Diary, mine: settings.Settings) -> None:
        await until(lambda: "gpunoderesets: cannot list: the API server knows none; install crds/" in caplog.text)
        assert await probe(mine.port, "/readyz") == (200, "standby\n")

    missing = fakeapi.always(lambda: status(404, "NotFound"), path=paths.resets())
    assert with_replica(check, prepare=lambda server: server.faults.append(missing)) == 0


def test_a_port_that_is_taken_ends_it_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """An operator that nobody can probe does not run."""

    async def run() -> int:
        async with FakeApi().serve() as server:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                mine = given(port=taken.getsockname()[1])
                return await runtime.Runtime(mine, server.configuration(), Diary().build).run()

    assert asyncio.run(run()) == 1
    assert "probes: cannot serve on 127.0.0.1 port" in caplog.text


@asynccontextmanager
async def process(server: FakeApi, folder: pathlib.Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The operator's command in a process of its own, with a kubeconfig for that server; killed if it has not ended."""
    config = folder / "kubeconfig"
    cluster = {"name": "fake", "cluster": {"server": server.url}}
    context = {"name": "fake", "context": {"cluster": "fake", "user": "fake"}}
    users = [{"name": "fake", "user": {"token": "secret-0123456789"}}]
    document = {"current-context": "fake", "clusters": [cluster], "contexts": [context], "users": users}
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    line = [
        "--image",
        "a",
        "--identity",
        "pod-a",
        "--bind",
        "127.0.0.1",
        "--port",
        "0",
        "--kubeconfig",
        str(config),
        *flags,
    ]
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cleanslate_operator",
        *line,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{OPERATOR}:{OPERATOR.parent / 'initcontainer'}"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


def test_the_command_leads_and_ends_with_0_on_sigterm(tmp_path: pathlib.Path) -> None:
    """The real command line, the real controller, a kubeconfig; its log is JSON and tells no token."""

    async def run() -> None:
        async with FakeApi().serve() as server, process(server, tmp_path, "--log-level", "debug") as operator:
            await until(lambda: len(server.watches) == 2, 30)
            assert holder(server) == "pod-a"
            assert {headers.get("Authorization", "").lower() for headers in server.headers} == {
                "bearer secret-0123456789"
            }
            asked_at = time.monotonic()
            operator.send_signal(signal.SIGTERM)
            _, log = await asyncio.wait_for(operator.communicate(), 15)
            assert operator.returncode == 0
            assert time.monotonic() - asked_at < 10
            assert holder(server) is None
            assert b"secret-0123456789" not in log
            assert all(line.startswith(b"{") for line in log.splitlines())

    asyncio.run(run())


def test_a_leader_that_lost_its_lease_ends_with_1_at_once(tmp_path: pathlib.Path) -> None:
    """And writes nothing more, not even to give back what is another's."""

    async def run() -> None:
        async with FakeApi().serve() as server, process(server, tmp_path, "--retry-period", "100ms") as operator:
            await until(lambda: len(server.watches) == 2, 30)
            server.put(LEASE, {**server.objects[LEASE], "spec": {"holderIdentity": "pod-b"}})
            _, log = await asyncio.wait_for(operator.communicate(), 5)
            assert operator.returncode == 1
            assert b"Lease cleanslate-operator: cannot lead: held by pod-b now" in log
            assert holder(server) == "pod-b"

    asyncio.run(run())


def test_a_leader_whose_watches_end_starts_anew(tmp_path: pathlib.Path) -> None:
    """When the CRD is deleted under it, kopf ends, and so does the process."""

    async def run() -> None:
        async with FakeApi().serve() as server, process(server, tmp_path) as operator:
            await until(lambda: len(server.watches) == 2, 30)
            server.faults.append(fakeapi.always(lambda: status(404, "NotFound"), path=paths.resets()))
            server.drop_watches()
            _, log = await asyncio.wait_for(operator.communicate(), 20)
            assert operator.returncode == 1
            assert b"operator: cannot go on: watches:" in log

    asyncio.run(run())


def test_a_kubeconfig_that_is_not_there_ends_it_with_2(tmp_path: pathlib.Path) -> None:
    """One line of reason, and what to do."""

    async def run() -> None:
        async with (
            FakeApi().serve() as server,
            process(server, tmp_path, "--kubeconfig", str(tmp_path / "none")) as operator,
        ):
            _, log = await asyncio.wait_for(operator.communicate(), 20)
            assert operator.returncode == 2
            assert b"API server: cannot connect" in log

    asyncio.run(run())
