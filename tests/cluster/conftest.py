"""The cluster of the tests: started once a session, or the one that `make cluster` has started, or one of one's own (own.py)."""

import json
import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from cluster import (
    binaries,
    cluster,
    components,
    evidence,
    images,
    installed,
    littleworld,
    own,
    places,
    resets,
    taking_down,
    tenants,
)
from cluster.cluster import Cluster
from cluster.faultproxy import FaultProxy
from cluster.helm import Helm
from cluster.kubectl import Kubectl
from cluster.littleworld import World
from cluster.nodes import Node
from cluster.pki import Authority
from cluster.places import Place
from cluster.resets import Resets
from cluster.tenants import Tenant

# pytest-xdist's workers have a cluster each, so that no test's faults are another's.
PLACE = Place(name=os.environ.get("PYTEST_XDIST_WORKER", "main"))
_STARTED_HERE = "started-by-tests"


@pytest.fixture(scope="session")
def running_cluster() -> Cluster:
    """The cluster of this checkout, taken down at the end of the session if a test has started it."""
    if os.geteuid() != 0:
        pytest.fail("the test cluster needs root: it makes namespaces, mounts and cgroups of its own")
    theirs = cluster.find(PLACE) is not None
    started = cluster.start(PLACE)
    if not theirs:
        (PLACE.state / _STARTED_HERE).write_text(str(os.getpid()))
    return started


@pytest.fixture
def sound_cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whole; a component that has ended by the test's end fails it, and a new cluster is for the next one."""
    yield running_cluster
    if ended := running_cluster.ended():
        pytest.fail(f"components ended under the test: {ended}; logs are in {places.KEPT_LOGS}")


@pytest.fixture(name="cluster")
def embedded(request: pytest.FixtureRequest) -> Cluster:
    """The embedded cluster with its nodes, spaces and faults."""
    if own.kubectl():
        pytest.skip(f"{own.VARIABLE} is set: this test needs the embedded cluster")
    return request.getfixturevalue("sound_cluster")


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> Iterator[Tenant]:
    """The test's own namespace and node labels, on the embedded cluster or on one's own."""
    kubectl, references = _tenancy(request)
    with tenants.tenant(kubectl, references, request.node.name) as one:
        yield one


def _tenancy(request: pytest.FixtureRequest) -> tuple[Kubectl, Callable[[str], str]]:
    if external := own.kubectl():
        return external, images.reference
    return request.getfixturevalue("sound_cluster").kubectl, images.reference


@pytest.fixture
def node(cluster: Cluster) -> Node:
    """The first real node."""
    return cluster.nodes["node-1"]


@pytest.fixture
def other_node(cluster: Cluster) -> Node:
    """The second real node."""
    return cluster.nodes["node-2"]


@pytest.fixture(scope="module")
def operator(running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """The chart, installed with its two replicas for the tests of one file; kubectl in the operator's namespace.

    Other files install and uninstall it themselves.
    """
    if own.kubectl():
        pytest.skip(f"{own.VARIABLE} is set: this test needs the embedded cluster")
    kubectl = running_cluster.kubectl
    helm = Helm(program=binaries.helm(), folder=tmp_path_factory.mktemp("helm"), kubeconfig=running_cluster.kubeconfig)
    with installed.installed(kubectl, helm):
        yield kubectl.within(resets.SYSTEM)


@pytest.fixture(name="resets")
def resets_of_a_test(operator: Kubectl, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Resets]:
    """The GPUNodeResets of one test, under the operator of the chart."""
    with resets.resets(cluster.kubectl, request.node.name) as one:
        yield one


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The place of a cluster that a test starts itself; empty afterwards."""
    one = Place(name=request.node.name)
    yield one
    cluster.stop(one)


@pytest.fixture
def proxy(cluster: Cluster, tmp_path: Path) -> Iterator[FaultProxy]:
    """A fault-injecting proxy between the machine and the API server; whoever brings no token is the administrator."""
    upstream = json.loads(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    with FaultProxy(upstream=upstream, identity=cluster.kubeconfig, folder=tmp_path, **_keys(cluster)) as one:
        yield one


@pytest.fixture
def inner_proxy(cluster: Cluster, tmp_path: Path) -> Iterator[FaultProxy]:
    """The same for pods, at an address that they reach."""
    inside = cluster.control.pid
    where = {"address": components.CONTROL_IP, "listen_in": inside, "connect_in": inside}
    with FaultProxy(upstream=components.SERVER, folder=tmp_path, **where, **_keys(cluster)) as one:
        yield one


def _keys(cluster: Cluster) -> dict[str, Path]:
    folder = cluster.authority.folder
    files = {"certificate": folder / "apiserver.crt", "key": folder / "apiserver.key"}
    return {"ca": cluster.authority.certificate} | files


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A certificate authority without a cluster, with the keys of a little API server and of the proxy before it."""
    return littleworld.make_authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def one_world(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A little API server, the proxy, and a client."""
    with littleworld.world(authority, tmp_path_factory.mktemp("world")) as one:
        yield one


@pytest.fixture
def world(one_world: World) -> World:
    """The same, as if nothing had been asked of it before."""
    return one_world.afresh()


@pytest.fixture
def mortal_world(authority: Authority, tmp_path: Path) -> Iterator[World]:
    """One whose API server a test may end."""
    with littleworld.world(authority, tmp_path) as one:
        yield one


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds what is missing before the first test's time begins to count: on a fresh machine that takes minutes."""
    if session.config.option.collectonly or os.geteuid() != 0 or own.kubectl():
        return
    if any(item.get_closest_marker("cluster") for item in session.items):
        cluster.build()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps what tells why a test failed, before its corner is taken away."""
    report = yield
    for place in _places(item) if report.failed else ():
        folder = places.KEPT_LOGS / re.sub(r"[^\w.-]+", "-", f"{item.name}-{report.when}") / place.name
        evidence.keep(place, folder)
        report.sections.append(("cluster", f"logs and objects: {folder}"))
    return report


def _places(item: pytest.Item) -> list[Place]:
    """Of the clusters that a test has used, and that are there still."""
    used = [one for one in getattr(item, "funcargs", {}).values() if isinstance(one, Place)]
    if {"cluster", "tenant"}.intersection(getattr(item, "fixturenames", ())):
        used.append(PLACE)
    return [one for one in used if taking_down.exists(one)]


def pytest_sessionfinish() -> None:
    """The session's end is the end of a cluster that a test has started."""
    mark = PLACE.state / _STARTED_HERE
    if mark.exists() and mark.read_text() == str(os.getpid()):
        cluster.stop(PLACE)
