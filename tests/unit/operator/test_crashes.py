"""The operator lost at every write that it makes, refused at every call, and overtaken by another: the end is always the same."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from cleanslate_operator.api import ApiError, Conflict, NotLeading, Throttled, Unavailable
from unit.operator.world import NODES, Cluster, FakeApi, Killed, Operator

LIMIT = 400  # more writes or calls than any of these resets takes


def three_nodes_in_waves() -> Cluster:
    cluster = Cluster()
    for number in range(3):
        cluster.add_node(f"node-{number}", pool="a")
    cluster.add_reset("one", nodeSelector={"pool": "a"}, rollout={"maxConcurrent": 2})
    return cluster


def two_nodes_with_evictions() -> Cluster:
    cluster = Cluster()
    for number in range(2):
        cluster.add_node(f"node-{number}", pool="a")
        cluster.add_pod(f"llama-{number}", f"node-{number}")
    cluster.objects[f"{NODES}/node-1"]["spec"]["unschedulable"] = True
    cluster.add_reset("one", nodeSelector={"pool": "a"}, scope="All", pods="Evict")
    return cluster


def one_that_is_deleted() -> Cluster:
    cluster = two_nodes_with_evictions()
    cluster.answers = {f"node-{number}": lambda: None for number in range(2)}
    return cluster


WORLDS = [three_nodes_in_waves, two_nodes_with_evictions]


async def bring_to_an_end(cluster: Cluster, operator: Operator | None = None) -> None:
    """Run the reset, with a new operator wherever one is killed, and one more look after the end."""
    operator = operator or Operator(cluster)
    for _ in range(LIMIT):
        try:
            await operator.run("one", looks=LIMIT)
            await Operator(cluster).look("one")
            break
        except Killed:
            operator = Operator(cluster)
        except ApiError:
            cluster.pass_s(0.1)
    cluster.settle()


def outcome(cluster: Cluster) -> Any:
    """What must be the same however it was reached: the status but for its times, every node reset once, nothing left."""
    status = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "TIME", str(cluster.status("one")))
    specs = {path: one["spec"] for path, one in cluster.objects.items() if path.startswith(NODES)}
    return status, sorted(cluster.runs), cluster.left(), specs


def writes_of(world: Callable[[], Cluster]) -> int:
    cluster = world()
    asyncio.run(bring_to_an_end(cluster))
    assert cluster.left() == []
    assert len(cluster.runs) == len(set(cluster.runs)) > 1
    return cluster.writes


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("world", WORLDS)
def test_killed_at_any_write_it_ends_as_if_it_had_not_been(world: Callable[[], Cluster], moment: str) -> None:
    whole = world()
    asyncio.run(bring_to_an_end(whole))
    for number in range(1, writes_of(world) + 1):
        cluster = world()
        cluster.kill = (number, moment)
        asyncio.run(bring_to_an_end(cluster))
        assert outcome(cluster) == outcome(whole), f"killed {moment} write {number}"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_at_any_write_a_deletion_still_undoes_everything(moment: str) -> None:
    async def delete_in_the_middle(cluster: Cluster) -> None:
        operator = Operator(cluster)
        for _ in range(3):
            try:
                await operator.look("one")
            except Killed:
                operator = Operator(cluster)
            cluster.settle()
        if one := cluster.reset("one"):
            if one["metadata"].get("finalizers"):
                one["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
            else:
                del cluster.objects["/apis/cleanslate.dev/v1alpha1/gpunoderesets/one"]
        await bring_to_an_end(cluster, operator)

    whole = one_that_is_deleted()
    asyncio.run(delete_in_the_middle(whole))
    assert whole.left() == []
    for number in range(1, whole.writes + 1):
        cluster = one_that_is_deleted()
        cluster.kill = (number, moment)
        asyncio.run(delete_in_the_middle(cluster))
        assert cluster.left() == [], f"killed {moment} write {number}"
        assert cluster.reset("one") is None
        assert cluster.runs == []


REFUSALS = {
    "conflict": lambda path: Conflict(request=path, status=409, reason="Conflict", message="changed"),
    "throttled": lambda path: Throttled(request=path, status=429, message="too many requests"),
    "unavailable": lambda path: Unavailable(request=path, status=500, message="etcd"),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("refusal", REFUSALS)
def test_refused_at_any_call_it_ends_as_if_it_had_not_been(world: Callable[[], Cluster], refusal: str) -> None:
    whole = world()
    calls = refuse(whole, 0, refusal)
    asyncio.run(bring_to_an_end(whole))
    assert len(calls) > 20
    for number in range(1, len(calls) + 1):
        cluster = world()
        refuse(cluster, number, refusal)
        asyncio.run(bring_to_an_end(cluster))
        assert outcome(cluster) == outcome(whole), f"refused at call {number}, {calls[number - 1]}"


def refuse(cluster: Cluster, number: int, refusal: str) -> list[str]:
    """Refuse the call of this number, once. Returns the list of calls, which grows."""
    calls: list[str] = []

    def fail(verb: str, path: str) -> None:
        calls.append(f"{verb} {path}")
        if len(calls) == number:
            raise REFUSALS[refusal](path)

    cluster.fail = fail
    return calls


def test_a_silent_api_server_delays_and_changes_nothing() -> None:
    cluster, down = three_nodes_in_waves(), 40

    def fail(verb: str, path: str) -> None:
        nonlocal down
        if cluster.writes > 8 and down:
            down -= 1
            raise Unavailable(request=path, message="no answer in 10 s")

    cluster.fail = fail
    asyncio.run(bring_to_an_end(cluster))
    assert down == 0
    assert sorted(cluster.runs) == ["node-0", "node-1", "node-2"]
    assert cluster.left() == []


class LateApi(FakeApi):
    """A client whose write of one number is held back on its way, as that of a process that was stopped."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__(cluster)
        self.number, self.sent = number, 0
        self.held, self.go = asyncio.Event(), asyncio.Event()

    async def _write(self, verb: str, path: str, do: Callable[[], Any]) -> Any:
        self.sent += 1
        if self.sent > self.number:
            raise NotLeading(request=path, message="this replica does not lead any more")
        if self.sent == self.number:
            self.held.set()
            await self.go.wait()
        return await super()._write(verb, path, do)


@pytest.mark.parametrize("world", WORLDS)
def test_a_write_that_comes_after_another_leader_took_over_does_no_harm(world: Callable[[], Cluster]) -> None:
    """A leader is stopped with a write on its way; another one brings the reset to its end; then the write arrives."""

    async def overtaken(cluster: Cluster, number: int) -> bool:
        first = Operator(cluster)
        late = LateApi(cluster, number)
        for part in (first.controller._reader, first.controller._executor):
            part._api = late
        running = asyncio.create_task(first.run("one", looks=LIMIT))
        holding = asyncio.create_task(late.held.wait())
        await asyncio.wait({running, holding}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            holding.cancel()
            return False
        await bring_to_an_end(cluster)
        late.go.set()
        await asyncio.gather(running, return_exceptions=True)  # its one write; then it finds that it leads no more
        cluster.settle()
        await bring_to_an_end(cluster)
        return True

    whole = world()
    asyncio.run(bring_to_an_end(whole))
    for number in range(1, LIMIT):
        cluster = world()
        if not asyncio.run(overtaken(cluster, number)):
            break
        assert outcome(cluster) == outcome(whole), f"write {number} came late"
    assert number > 10
