"""Reset pods that real kubelets cannot start, or that are taken away in the middle: each is told, and none twice."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import faults, images, places
from cluster import resets as resets_module
from cluster.cluster import Cluster
from cluster.kubectl import Kubectl
from cluster.nodes import Node
from cluster.operatorprocess import OperatorProcess
from cluster.resets import SPACE, SYSTEM, Resets, conditions, row, summary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ABSENT = "localhost/absent:1"
CRD = places.CHECKOUT / "crds" / "gpunodereset.yaml"
LIMIT = "after 30 s (spec.timeoutSeconds)"


@pytest.fixture(scope="module")
def prepared(running_cluster: Cluster) -> Iterator[Cluster]:
    """The CRD and the namespaces, without an operator."""
    kubectl = running_cluster.kubectl
    kubectl("apply", "--server-side", "-f", str(CRD))
    kubectl.wait("condition=Established", f"crd/{resets_module.KIND}.cleanslate.dev")
    for space in (SYSTEM, SPACE):
        kubectl("create", "namespace", space)
    kubectl.within(SPACE)("create", "serviceaccount", "cleanslate-reset")
    yield running_cluster
    kubectl.delete("namespace", SYSTEM, SPACE)
    kubectl.delete("crd", f"{resets_module.KIND}.cleanslate.dev")


@pytest.fixture
def resets(prepared: Cluster, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Resets]:
    """The GPUNodeResets of one test."""
    with resets_module.resets(prepared.kubectl, request.node.name) as one:
        yield one


@contextmanager
def operator(cluster: Cluster, folder: Path, *flags: str, image: str = "") -> Iterator[None]:
    """The operator as a process of this machine, with these flags. What it has begun is over when the block ends."""
    how = {"namespace": SYSTEM, "flags": ("--image-pull-policy=Never", *flags), "log": folder / "operator.log"}
    with OperatorProcess(kubeconfig=cluster.kubeconfig, image=image or images.reference("node-program"), **how):
        yield


def needing(**resources: dict[str, str]) -> str:
    """The flag for what a reset pod requests, and its limits."""
    return f"--reset-resources={json.dumps(resources)}"


def test_pod_that_fits_nowhere_is_told_and_given_up(
    resets: Resets, cluster: Cluster, node: Node, tmp_path: Path
) -> None:
    """While it waits and at the deadline: with what the scheduler says."""
    with operator(cluster, tmp_path, needing(requests={"cpu": "1000"})):
        resets.apply("large", nodeName=node.name, timeoutSeconds=30)
        waiting = resets.says("large", "Running", "NotScheduled")
        done = resets.ended("large")
        assert "cannot be scheduled: " in waiting
        assert "Insufficient cpu" in waiting
        assert waiting.endswith("; see what it requests and what the node has left")
        assert summary(done)[:2] == ("Failed", "NotScheduled")
        assert "Insufficient cpu" in row(done, node.name)["message"]
        assert row(done, node.name)["message"].startswith("no result ")
        assert conditions(done)["Failed"] == "True"
        assert resets.left() == []


def test_image_that_is_not_there_is_told_and_given_up(
    resets: Resets, cluster: Cluster, node: Node, tmp_path: Path
) -> None:
    """While it waits and at the deadline: with the image's name, and what can be done."""
    with operator(cluster, tmp_path, image=ABSENT):
        resets.apply("imageless", nodeName=node.name, timeoutSeconds=30)
        waiting = resets.says("imageless", "Running", "ImagePull")
        done = resets.ended("imageless")
        assert "cannot get its image: ErrImageNeverPull" in waiting
        assert ABSENT in waiting
        assert summary(done)[:2] == ("Failed", "ImagePull")
        assert row(done, node.name)["message"].endswith("load it onto the node, or let imagePullPolicy pull it")
        assert resets.left() == []


def test_reset_without_memory_says_how_much_it_had(
    resets: Resets, cluster: Cluster, node: Node, tmp_path: Path
) -> None:
    """It is killed for want of memory: told at once, not at the deadline, with the limit to raise."""
    with operator(cluster, tmp_path, needing(limits={"memory": "8Mi"})):
        done = resets.run("starved", nodeName=node.name)
        assert summary(done)[:2] == ("Failed", "OutOfMemory")
        message = (
            "cannot finish the reset: it needed more memory than its limit of 8Mi; raise the memory limit of reset pods"
        )
        assert row(done, node.name)["message"].endswith(message)
        assert resets.left() == []


def delete(kubectl: Kubectl, name: str) -> None:
    """As a user does."""
    kubectl.delete("pod", name)


def forget(kubectl: Kubectl, name: str) -> None:
    """Without waiting for its kubelet."""
    kubectl.delete("pod", name, "--force", "--grace-period=0")


def evict(kubectl: Kubectl, name: str) -> None:
    """As `kubectl drain` does with others' pods."""
    body: dict[str, Any] = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": SPACE},
    }
    kubectl("create", "--raw", f"/api/v1/namespaces/{SPACE}/pods/{name}/eviction", "-f", "-", stdin=json.dumps(body))
    kubectl.wait("delete", f"pod/{name}")


@pytest.mark.parametrize("take_away", [delete, forget, evict])
def test_pod_taken_away_in_mid_reset_is_replaced(
    resets: Resets, cluster: Cluster, node: Node, tmp_path: Path, take_away: Any
) -> None:
    """Another one resets the node, which is counted once."""
    with operator(cluster, tmp_path):
        with faults.gpu(node, 3, residual_bytes=2 << 30):
            resets.apply("again", nodeName=node.name)
            first = resets.covers("again")
            take_away(resets.kubectl.within(SPACE), first["metadata"]["name"])
        done = resets.ended("again")
        assert summary(done)[:2] == ("Complete", "Clean")
        assert {kind: number for kind, number in done["status"]["nodes"].items() if number} == {"total": 1, "clean": 1}
        assert len(done["status"]["results"]) == 1
        assert resets.left() == []
