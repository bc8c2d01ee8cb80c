"""A real API server that refuses, forgets to answer or is out of reach, and two operators that both believe to lead."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from cluster import conftest, operatorworld
from cluster.fakenodes.behaviours import Behaviour
from cluster.faultproxy import FaultProxy, Selection
from cluster.kubectl import Object
from cluster.operatorprocess import OperatorProcess
from cluster.operatorworld import END_S, NODES, SPACE, SYSTEM, WRITES, OperatorWorld, operator_world

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STRIDE = 5  # every fifth write fails: in five resets each of the some 26 writes does
READS = Selection(verb=("get", "list"), namespace=("", SPACE, "kube-node-lease"))
READ_STRIDE = 16  # more reads than one look at a reset needs, so that not every look meets a fault
ANY_WRITE = Selection(verb=("create", "update", "patch", "delete", "deletecollection"))
LEADING = Selection(verb=("create", "update"), resource="leases", namespace=SYSTEM)
SILENCE_S = 30.0
QUICK = ("--lease-duration=6s", "--renew-deadline=4s", "--retry-period=500ms")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorWorld]:
    with operator_world(f"{conftest.PLACE.name}-faults", tmp_path_factory.mktemp("faults")) as one:
        yield one


@pytest.fixture(autouse=True)
def cleared(world: OperatorWorld) -> Iterator[None]:
    yield
    world.clear()


@pytest.fixture
def proxy(world: OperatorWorld) -> Iterator[FaultProxy]:
    with world.proxy() as one:
        yield one


@pytest.fixture
def endless(world: OperatorWorld) -> Iterator[None]:
    """Resets that go on until the test lets them end."""
    world.fakes.set_behaviour(Behaviour(), operatorworld.resets_never_end())
    yield
    let_end(world)


def let_end(world: OperatorWorld) -> None:
    """Resets that run end soon, and so do all later ones."""
    world.fakes.set_behaviour(Behaviour(), *operatorworld.resets_take(0.2))


def ends(world: OperatorWorld, name: str) -> Future[Object]:
    """A reset of the three nodes that is created now, once it is over."""
    world.begin(name)
    return world.ended(name)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"code": 409}, id="409"),
        pytest.param({"code": 429, "retry_after_s": 1}, id="429"),
        pytest.param({"code": 500}, id="500"),
        pytest.param({"code": 500, "upstream_first": True}, id="500-and-yet-it-is-done"),
    ],
)
def test_writes_that_are_refused_are_made_good(world: OperatorWorld, proxy: FaultProxy, answer: dict[str, Any]) -> None:
    """Whichever write it is: each node is reset once, and nothing stays behind."""
    with world.operator(proxy):
        for first in range(STRIDE):
            name = f"refused-{first}"
            with proxy.answering(**answer, skip=first, every=STRIDE, **WRITES) as fault:
                ended = ends(world, name).result()
            where = f"from write {first + 1} on each {STRIDE}th was refused, {fault.hits} in all"
            world.assert_reset_once(ended["metadata"]["uid"], ended, where)
            assert fault.hits > 3, where
            world.forget(name)


@pytest.mark.parametrize("answer", [{"code": 429, "retry_after_s": 1}, {"code": 500}], ids=["429", "500"])
def test_reads_that_are_refused_are_repeated(world: OperatorWorld, proxy: FaultProxy, answer: dict[str, Any]) -> None:
    """No decision is made on what could not be read."""
    with world.operator(proxy):
        for first in range(0, READ_STRIDE, 4):
            name = f"unread-{first}"
            with proxy.answering(**answer, skip=first, every=READ_STRIDE, **READS) as fault:
                ended = ends(world, name).result()
            world.assert_reset_once(
                ended["metadata"]["uid"], ended, f"from read {first + 1} on {fault.hits} were refused"
            )
            assert fault.hits > 0
            world.forget(name)


def test_api_server_silent_for_thirty_seconds_is_outlasted(
    world: OperatorWorld, proxy: FaultProxy, endless: None
) -> None:
    """One reset has no DaemonSet yet, one runs, one only has to be marked; the leader starts anew, and all three end."""
    resets = dict(zip(("early", "amid", "late"), NODES, strict=True))
    with ExitStack() as stack:
        first = stack.enter_context(world.operator(proxy))
        before = proxy.silencing(verb="create", resource="daemonsets", name="early-*")
        after = proxy.silencing(verb="patch", resource="gpunoderesets", name="late", skip=1)
        with before, after:
            uids = {name: world.begin(name, nodeName=node) for name, node in resets.items()}
            world.until("amid", is_running)
            world.until("late", is_running)
            world.fakes.set_behaviour(Behaviour(), *only(resets["late"]), operatorworld.resets_never_end())
            before.wait(deadline_s=END_S)
            after.wait(deadline_s=END_S)
            with proxy.silencing():
                silent_since_s = time.monotonic()
                assert first.wait(END_S) == 1
                again = stack.enter_context(world.operator(proxy))
                with pytest.raises(TimeoutError):
                    again.wait(silent_since_s + SILENCE_S - time.monotonic())
        ended = {name: world.ended(name) for name in resets}
        let_end(world)
        for name, node in resets.items():
            world.assert_reset_once(uids[name], ended[name].result(), name, (node,))
            world.forget(name)


def is_running(one: Object) -> bool:
    """Whether the first resets run, and the status tells it."""
    return bool(one.get("status", {}).get("nodes", {}).get("running"))


def only(node: str) -> list[Any]:
    """The rule that ends the resets of one node."""
    return [rule for rule in operatorworld.resets_take(0.2) if rule.node == node]


class Rivals:
    """Two operators with a way to the API server each; the first leads, and the second waits."""

    def __init__(self, world: OperatorWorld, stack: ExitStack) -> None:
        self.proxies = [stack.enter_context(world.proxy()) for _ in range(2)]
        self.first = self._start(world, stack, 0)
        self.proxies[0].wait_for_requests(**LEADING, deadline_s=END_S)
        self.second = self._start(world, stack, 1)
        self.proxies[1].wait_for_requests(verb="get", resource="leases", namespace=SYSTEM, deadline_s=END_S)

    def await_second(self) -> float:
        """Until the second leads; the time by then, in seconds of the epoch."""
        return self.proxies[1].wait_for_requests(**LEADING, deadline_s=END_S)[0].time_s

    def writes_of_first(self, since_s: float) -> list[str]:
        """All that the first has tried to write later than that."""
        return [f"{one.verb} {one.path}" for one in self.proxies[0].requests(since_s=since_s, **ANY_WRITE)]

    def _start(self, world: OperatorWorld, stack: ExitStack, number: int) -> OperatorProcess:
        return stack.enter_context(world.operator(self.proxies[number], *QUICK, identity=f"operator-{number}"))


@pytest.fixture
def rivals(world: OperatorWorld) -> Iterator[Rivals]:
    with ExitStack() as stack:
        yield Rivals(world, stack)


@pytest.mark.parametrize("finished", [False, True], ids=["while-the-other-works", "when-all-is-over"])
def test_stopped_leader_that_goes_on_writes_nothing_and_ends(
    world: OperatorWorld, endless: None, rivals: Rivals, finished: bool
) -> None:
    """Stopped in mid-reset for longer than its Lease; the other finishes the reset as if there had been one leader."""
    ended = ends(world, "stopped")
    world.until("stopped", is_running)
    rivals.first.signal(signal.SIGSTOP)
    lost_s = rivals.await_second()
    if finished:
        let_end(world)
        ended.result()
    rivals.first.signal(signal.SIGCONT)
    assert rivals.first.wait(END_S) == 1
    assert rivals.writes_of_first(since_s=lost_s) == []
    let_end(world)
    one = ended.result()
    world.assert_reset_once(one["metadata"]["uid"], one)
    world.forget("stopped")


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_leader_cut_off_from_the_api_server_ends_and_the_other_goes_on(
    world: OperatorWorld, endless: None, rivals: Rivals, silent: bool
) -> None:
    """It ends before the other may lead, and it does so whether its connections are refused or hang."""
    ended = ends(world, "cut-off")
    world.until("cut-off", is_running)
    proxy = rivals.proxies[0]
    with proxy.silencing() if silent else proxy.down():
        assert rivals.first.wait(END_S) == 1
        ended_s = time.time()
        assert rivals.await_second() > ended_s
        let_end(world)
        one = ended.result()
    world.assert_reset_once(one["metadata"]["uid"], one)
    world.forget("cut-off")


def test_write_that_arrives_after_another_leader_has_finished_is_undone(world: OperatorWorld, rivals: Rivals) -> None:
    """A DaemonSet that was on its way when the leader stopped: it is deleted again, and so are its pods."""
    with rivals.proxies[0].holding(verb="create", resource="daemonsets") as held:
        ended = ends(world, "late")
        held.wait(deadline_s=END_S)
        rivals.first.signal(signal.SIGSTOP)
        one = ended.result()
        world.assert_reset_once(one["metadata"]["uid"], one)
    late = rivals.proxies[0].wait_for_requests(verb="create", resource="daemonsets", deadline_s=END_S)
    assert [write.code for write in late] == [201]
    world.kubectl.within(SPACE).wait("delete", "daemonsets", "--all", timeout_s=END_S)
    assert world.left() == []
    world.forget("late")
