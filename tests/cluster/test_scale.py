"""Five thousand simulated nodes on a control plane of their own: the floor for the figures of whatever works on it."""

import json
import os
from collections.abc import Iterator

import pytest

from cluster import cluster, places
from cluster.cluster import Cluster
from cluster.fakenodes import measure
from cluster.fakenodes.handle import FakeNodes
from cluster.fakenodes.plainapi import PlainApi
from cluster.places import Place

pytestmark = [pytest.mark.scale, pytest.mark.timeout(600)]

NODES = 5000
CHOSEN = 1000
SILENCE_S = 200  # with a renewal every two minutes the leases of 5,000 nodes take 42 writes a second
RENEW_S = 120.0


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    """A control plane without real nodes."""
    place = Place(name="scale")
    yield cluster.start(place, node_count=0, silence_s=SILENCE_S)
    cluster.stop(place)


def test_five_thousand_nodes_register_and_a_daemonset_reaches_a_thousand(plane: Cluster) -> None:
    """Registered within 120 s, and a DaemonSet over 1,000 of them within 60 s, on two cores that the control plane shares."""
    api = PlainApi(plane.kubeconfig)
    pool = {"sim-*[05]": {measure.POOL: "chosen"}}
    how = {"subsets": pool, "renew_s": RENEW_S, "within": plane.control, "keep": True}
    with FakeNodes(plane.inner_kubeconfig, count=NODES, **how) as fakes:
        registration_s = fakes.wait_registered(300)
        daemonset_s = measure.daemonset_ready(api, wanted=CHOSEN, timeout_s=300)
        figures = {"registration_s": registration_s, "daemonset_s": daemonset_s, "load": os.getloadavg()[0]}
        print(json.dumps(figures))
        record(figures | {"fakenodes": fakes.figures})
    assert registration_s <= measure.REGISTRATION_LIMIT_S
    assert daemonset_s <= measure.DAEMONSET_LIMIT_S


def record(figures: dict) -> None:
    """Keeps the figures beside the logs of failed tests."""
    folder = places.CHECKOUT / "build"
    folder.mkdir(exist_ok=True)
    (folder / "scale.json").write_text(json.dumps(figures, indent=1))
