"""Simulated nodes outlast an API server that refuses, forgets, breaks off and goes away, so that tests can do that to others."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster import tenants
from cluster.fakenodes.behaviours import init_says
from cluster.fakenodes.handle import FakeNodes
from cluster.faultproxy import FaultProxy
from cluster.tenants import Tenant

pytestmark = pytest.mark.cluster

SOON_S = 40.0


@pytest.fixture
def fakes(proxy: FaultProxy, tenant: Tenant) -> Iterator[FakeNodes]:
    """Two simulated nodes that see the API server through the proxy; the test registers them."""
    behaviour = init_says("clean", after_s=0.2)
    with FakeNodes(
        proxy.kubeconfig(), count=2, prefix=f"sim-{tenant.name[-6:]}", behaviour=behaviour, renew_s=2
    ) as nodes:
        yield nodes


def start(tenant: Tenant, name: str, node: str) -> None:
    """A pod with an init container, for one node."""
    init, main = ({"name": one, "image": f"localhost/{one}:1"} for one in ("reset", "idle"))
    tenant.kubectl.create(tenants.pod(name, main, init=[init], node=node))


def runs(tenant: Tenant, name: str) -> dict[str, Any]:
    """The pod, once it runs and its init container's message is there."""
    pod = tenant.await_phase(name, "Running", timeout_s=SOON_S)
    assert pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] == "clean"
    return pod


@pytest.mark.parametrize("code", [429, 500, 503])
def test_refused_writes_are_repeated(proxy: FaultProxy, fakes: FakeNodes, tenant: Tenant, code: int) -> None:
    """Node, lease and pod status arrive in the end."""
    with proxy.answering(code, verb=("create", "patch", "update"), retry_after_s=1, times=6) as fault:
        fakes.wait_registered(SOON_S)
        start(tenant, "p", fakes.names[0])
        runs(tenant, "p")
        fault.wait(hits=6)
    assert fakes.figures["repeats"][str(code)] == 6


def test_registration_that_was_done_after_all_is_taken_over(
    proxy: FaultProxy, fakes: FakeNodes, tenant: Tenant
) -> None:
    """The server creates the objects and says 500: the repeat finds them there, and they are ours."""
    fault = proxy.answering(500, verb="create", resource=("nodes", "leases"), upstream_first=True, times=4)
    with fault:
        fakes.wait_registered(SOON_S)
        assert fault.hits == 4
    start(tenant, "p", fakes.names[1])
    runs(tenant, "p")


def test_lost_answers_do_no_harm(proxy: FaultProxy, fakes: FakeNodes, tenant: Tenant) -> None:
    """A status that was written, and a pod that was deleted, without our learning of it."""
    fakes.wait_registered(SOON_S)
    with proxy.losing_answers(verb=("patch", "delete"), resource=("pods", "pods/status"), times=4) as fault:
        start(tenant, "p", fakes.names[0])
        runs(tenant, "p")
        tenant.kubectl.delete("pod", "p", timeout_s=SOON_S)
        assert fault.hits


def test_lease_that_somebody_changed_is_written_over(proxy: FaultProxy, fakes: FakeNodes, tenant: Tenant) -> None:
    """409: read again, write again; the renewals go on."""
    fakes.wait_registered(SOON_S)
    kubectl, lease = tenant.kubectl.within("kube-node-lease"), ("lease", fakes.names[0])
    kubectl("annotate", *lease, "somebody=was-here")
    before = kubectl.get(*lease)["spec"]["renewTime"]
    with proxy.answering(409, verb="update", resource="leases", times=3) as fault:
        fault.wait(hits=3)
        assert fault.hits == 3
    kubectl.until(*lease, is_so=lambda one: one["spec"]["renewTime"] > before, timeout_s=SOON_S)


def test_watch_goes_on_after_a_cut(proxy: FaultProxy, fakes: FakeNodes, tenant: Tenant) -> None:
    """By a reset, by a clean end, and by 410: pods are seen all the same."""
    fakes.wait_registered(SOON_S)
    cuts = (proxy.cutting_watches(), proxy.cutting_watches(cleanly=True), proxy.watches_gone(times=1))
    for number, cut in enumerate(cuts):
        with cut as fault:
            fault.wait(hits=1)
            start(tenant, f"p{number}", fakes.names[0])
        runs(tenant, f"p{number}")
    assert fakes.figures["watches"]["lists after 410"] == 1


def test_server_that_was_away_finds_the_nodes_again(proxy: FaultProxy, fakes: FakeNodes, tenant: Tenant) -> None:
    """Nothing can be reached for a while; a pod of that time runs afterwards."""
    fakes.wait_registered(SOON_S)
    with proxy.down():
        start(tenant, "p", fakes.names[0])
        unheard = tenant.kubectl.until("pod", "p", is_so=lambda one: "nodeName" in one["spec"], timeout_s=SOON_S)
        assert unheard["status"]["phase"] == "Pending"
    runs(tenant, "p")
