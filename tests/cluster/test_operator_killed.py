"""The operator is killed at each of its writes to a real API server: before it and after it. Every reset ends all the same."""

import itertools
from collections.abc import Iterator

import pytest

from cluster import conftest, killing
from cluster.killing import Victim
from cluster.operatorworld import OperatorWorld, operator_world

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# Every kind of write that a reset makes with scope Orphans.
KINDS = (
    "patch gpunoderesets",
    "create configmaps",
    "create leases",
    "create daemonsets",
    "patch gpunoderesets/status",
    "update configmaps",
    "update daemonsets",
    "delete configmaps",
    "delete leases",
    "delete daemonsets",
    "deletecollection configmaps",
)
before_and_after = pytest.mark.parametrize("done", [pytest.param(False, id="before"), pytest.param(True, id="after")])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorWorld]:
    with operator_world(f"{conftest.PLACE.name}-killed", tmp_path_factory.mktemp("killed")) as one:
        yield one


@pytest.fixture(autouse=True)
def cleared(world: OperatorWorld) -> Iterator[None]:
    yield
    world.clear()


@pytest.fixture(scope="module")
def victim(world: OperatorWorld) -> Iterator[Victim]:
    with killing.victim(world) as one:
        yield one


def test_the_table_has_every_kind_of_write(world: OperatorWorld, victim: Victim) -> None:
    """So that none is left out below."""
    victim.proxy.forget_requests()
    uid = world.begin("undisturbed")
    world.assert_reset_once(uid, world.ended("undisturbed").result())
    assert victim.writes() == set(KINDS)
    world.forget("undisturbed")


@before_and_after
@pytest.mark.parametrize("kind", KINDS)
def test_operator_killed_at_a_write_goes_on_where_it_was(
    world: OperatorWorld, victim: Victim, kind: str, done: bool
) -> None:
    """Three nodes in waves of two: each is reset once, and nothing stays behind. Each write of the kind has its own reset."""
    for number in itertools.count(1):
        name, uids = f"killed-{number}", []
        ended = world.ended(name)
        killed = victim.killed(
            kind, number, ended, lambda name=name, uids=uids: uids.append(world.begin(name)), done=done
        )
        world.assert_reset_once(uids[0], ended.result(), f"killed at {kind} number {number}")
        world.forget(name)
        if not killed:
            break
    assert number > 1, f"no reset came to {kind}"
