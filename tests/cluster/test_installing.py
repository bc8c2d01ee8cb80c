"""The chart installed for real: what is there then, what an upgrade changes, and that nothing stays."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import binaries, installed
from cluster.cluster import Cluster
from cluster.helm import Helm
from cluster.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CLUSTER_SCOPED = "namespaces,customresourcedefinitions,clusterroles,clusterrolebindings"
NAMESPACED = (
    "roles,rolebindings,serviceaccounts,resourcequotas,deployments,services,poddisruptionbudgets,configmaps,secrets"
)
OPERATORS = "--selector=app.kubernetes.io/component=operator"
METRICS = "/api/v1/namespaces/cleanslate-system/services/cleanslate-operator:metrics/proxy/metrics"


@pytest.fixture
def helm(cluster: Cluster, tmp_path: Path) -> Iterator[Helm]:
    """Helm for this cluster; whatever a test leaves installed is taken away."""
    one = Helm(program=binaries.helm(), folder=tmp_path, kubeconfig=cluster.kubeconfig)
    yield one
    installed.uninstall(cluster.kubectl, one)


def everything(kubectl: Kubectl) -> set[str]:
    """The names of all objects of the kinds that the chart makes, and of Helm's own."""
    form = "-o=custom-columns=:.kind,:.metadata.namespace,:.metadata.name"
    lines = kubectl("get", CLUSTER_SCOPED, form) + kubectl("get", NAMESPACED, "--all-namespaces", form)
    return {" ".join(line.split()) for line in lines.splitlines() if line.strip()}


def operators(kubectl: Kubectl) -> list[str]:
    """The pods that are ready and stay."""
    pods = kubectl.within("cleanslate-system").items("pods", OPERATORS)
    return [
        pod["metadata"]["name"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"] and pod["status"]["containerStatuses"][0]["ready"]
    ]


def leader(kubectl: Kubectl) -> str:
    """The replica that holds the Lease, once one does: a replica is ready before it leads."""
    held = kubectl.within("cleanslate-system").until(
        "lease", "cleanslate-operator", is_so=lambda lease: bool(lease["spec"].get("holderIdentity"))
    )
    return str(held["spec"]["holderIdentity"])


def test_chart_comes_and_goes_whole(cluster: Cluster, helm: Helm) -> None:
    """Two replicas are ready, one leads, the CRD is served; after the uninstallation all is as it was."""
    before = everything(cluster.kubectl)
    notes = installed.install(cluster.kubectl, helm)
    assert "the operator runs in cleanslate-system, reset pods run in cleanslate-resets" in notes
    assert len(operators(cluster.kubectl)) == 2
    assert leader(cluster.kubectl) in operators(cluster.kubectl)
    assert cluster.kubectl("get", "gnr", "-o", "name") == ""
    assert "ClusterRole <none> cleanslate-operator" in everything(cluster.kubectl) - before

    installed.uninstall(cluster.kubectl, helm)
    assert everything(cluster.kubectl) == before


def test_upgrade_replaces_the_replicas_one_after_the_other(cluster: Cluster, helm: Helm) -> None:
    """A changed value reaches the operator, and a new replica leads."""
    installed.install(cluster.kubectl, helm)
    old = operators(cluster.kubectl)
    installed.install(cluster.kubectl, helm, {"operator": {"logLevel": "debug"}})
    new = operators(cluster.kubectl)
    assert len(new) == 2
    assert set(new).isdisjoint(old)
    container = cluster.kubectl.within("cleanslate-system").get("pod", new[0])["spec"]["containers"][0]
    assert {"name": "CLEANSLATE_OPERATOR_LOG_LEVEL", "value": "debug"} in container["env"]


def test_uninstalled_chart_keeps_the_crd_and_its_objects(cluster: Cluster, helm: Helm) -> None:
    """A mistaken uninstallation loses no GPUNodeReset, and the next installation takes them over."""
    kubectl = cluster.kubectl
    installed.install(kubectl, helm)
    spec = {"nodeName": "no-such-node", "suspend": True}
    kubectl.create(
        {"apiVersion": "cleanslate.dev/v1alpha1", "kind": "GPUNodeReset", "metadata": {"name": "kept"}, "spec": spec}
    )
    helm("uninstall", installed.RELEASE, "--wait")
    assert kubectl("get", "gnr", "-o", "name") == "gpunodereset.cleanslate.dev/kept\n"
    installed.install(kubectl, helm)
    assert kubectl("get", "gnr", "-o", "name") == "gpunodereset.cleanslate.dev/kept\n"


def test_metrics_are_reached_through_the_service(cluster: Cluster, helm: Helm) -> None:
    """The Service's port leads to the operator's."""
    installed.install(cluster.kubectl, helm)
    assert "cleanslate_leader" in cluster.kubectl("get", "--raw", METRICS)
