"""Stopping a cluster leaves nothing of it on the machine."""

import pytest

from cluster import cluster, images, taking_down, traces
from cluster.cluster import Cluster
from cluster.places import Place
from cluster.tenants import pod, python

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CYCLES = 20


def occupy(running: Cluster) -> None:
    """A pod runs, with its sandbox, its network and its mounts."""
    main = python("main", images.reference("python"), "import signal; signal.pause()", gpus=1)
    running.kubectl.create(pod("busy", main))
    running.kubectl.until("pod", "busy", is_so=lambda one: one["status"]["phase"] == "Running")


def test_twenty_starts_and_stops_leave_nothing(place: Place) -> None:
    """No process, mount, interface, address, route, firewall rule, cgroup, file or setting is left, pods or not."""
    before = traces.of_machine()
    for cycle in range(CYCLES):
        running = cluster.start(place, node_count=1)
        if cycle % 5 == 0:
            occupy(running)
        cluster.stop(place)
        assert traces.of_cluster(place) == traces.NOTHING, f"after {cycle + 1} starts"
    assert traces.of_machine() == before


def test_traces_are_seen_while_a_cluster_runs(place: Place) -> None:
    """The comparison of the test above can fail: a cluster that runs has all that is looked for."""
    cluster.start(place, node_count=0)
    found = traces.of_cluster(place)
    assert all(found.values())
    assert any("kube-apiserver" in process for process in found["processes"])
    assert any("etcd" in process for process in found["processes"])


def test_taking_down_what_is_not_there_is_no_error(place: Place) -> None:
    """`down` can be said twice."""
    taking_down.take_down(place)
    taking_down.take_down(place)
    assert traces.of_cluster(place) == traces.NOTHING
