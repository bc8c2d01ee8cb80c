"""A test's corner is its own, and nothing of it stays, also when the test fails; what tells why it failed does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import evidence, images, own, places, tenants
from cluster.cluster import Cluster
from cluster.kubectl import KubectlError
from cluster.nodes import Node
from cluster.tenants import Tenant, pod, python

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PAUSE = "import signal; signal.pause()"


def test_a_failing_test_leaves_nothing(cluster: Cluster, node: Node) -> None:
    """Pods are gone when it returns, labels too, and the namespace is going."""
    seen = []

    def fail() -> None:
        with tenants.tenant(cluster.kubectl, images.reference, "fails") as one:
            seen.append(one)
            one.label(node.name)
            one.run(pod("stays", python("main", one.images("python"), PAUSE), node=node.name))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (tenant,) = seen
    namespace = cluster.kubectl.items("namespaces", f"--field-selector=metadata.name={tenant.name}")
    assert all(one["metadata"].get("deletionTimestamp") for one in namespace)
    assert tenant.kubectl.items("pods") == []
    assert tenant.name not in str(cluster.kubectl.get("node", node.name)["metadata"]["labels"])


def test_two_tests_of_one_name_do_not_meet(tenant: Tenant, cluster: Cluster, request: pytest.FixtureRequest) -> None:
    """Another namespace, other labels."""
    with tenants.tenant(cluster.kubectl, tenant.images, request.node.name) as other:
        assert other.name != tenant.name
        tenant.run(
            pod(
                "same",
                python("main", tenant.images("python"), ""),
            ),
            phase="Succeeded",
        )
        assert other.kubectl.items("pods") == []


def test_evidence_has_the_logs_of_every_component_and_every_pod(
    cluster: Cluster, tenant: Tenant, tmp_path: Path
) -> None:
    """Of the control plane, of each node, of a test's containers; and the objects as they were."""
    tenant.run(pod("talks", python("main", tenant.images("python"), "print('it was me')")), phase="Succeeded")
    evidence.keep(cluster.place, tmp_path / "kept")
    kept = {str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*.log")}
    assert {"etcd.log", "kube-apiserver.log", "kube-controller-manager.log", "kube-scheduler.log"} <= kept
    for name in cluster.nodes:
        assert {f"{name}/{one}.log" for one in ("containerd", "kubelet", "kube-proxy", "nvidia-device-plugin")} <= kept
    texts = [path.read_text() for path in (tmp_path / "kept").rglob("pods/*talks*/main/0.log")]
    assert ["it was me" in text for text in texts] == [True]
    assert "talks" in (tmp_path / "kept" / "objects.txt").read_text()


def test_a_running_cluster_is_given_the_images_that_it_lacks(cluster: Cluster, node: Node) -> None:
    """As after a change of what one is made from, whose tag is another then: nothing is started anew for it."""
    lacking = images.reference("server")
    node.space.run("ctr", "--namespace", "k8s.io", "images", "rm", "--sync", lacking)
    assert lacking not in node.image_references()
    started = node.component("containerd")
    cluster.load()
    assert lacking in node.image_references()
    assert started.alive


FAILING = """
from cluster.tenants import pod, python

def test_that_fails(tenant):
    print("namespace", tenant.name)
    talks = python("main", tenant.images("python"), "print('last words')")
    tenant.run(pod("talks", talks), phase="Succeeded")
    tenant.label("node-1")
    assert tenant.name == "another"
"""


def test_a_failing_test_tells_where_its_evidence_is(cluster: Cluster, tmp_path: Path) -> None:
    """The report names the folder, which has the objects from before the clean-up; the clean-up came all the same."""
    (tmp_path / "test_failing.py").write_text(FAILING)
    argv = [sys.executable, "-m", "pytest", "-p", "cluster.conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    variables = os.environ | {"PYTHONPATH": str(places.CHECKOUT / "tests")}
    done = subprocess.run(
        [*argv, f"--rootdir={tmp_path}", str(tmp_path)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    namespace = re.search(r"namespace (\S+)", done.stdout)[1]
    folder = Path(re.search(r"logs and objects: (.*)", done.stdout)[1])
    assert folder.parents[1] == places.KEPT_LOGS
    assert "talks" in (folder / "objects.txt").read_text()
    logs = folder.rglob(f"pods/{namespace}_talks*/main/0.log")
    assert ["last words" in path.read_text() for path in logs] == [True]
    assert namespace not in str(cluster.kubectl.get("node", "node-1")["metadata"]["labels"])
    assert cluster.kubectl.within(namespace).items("pods") == []
    shutil.rmtree(folder.parent)


def test_pods_on_two_nodes_reach_each_other(tenant: Tenant, node: Node, other_node: Node) -> None:
    """The pod network spans the nodes."""
    serve = "import socket; s = socket.create_server(('', 8000)); [s.accept()[0].send(b'hello') for _ in range(9)]"
    server = tenant.run(pod("server", python("main", tenant.images("python"), serve), node=node.name))
    ask = f"import socket; print(socket.create_connection(('{server['status']['podIP']}', 8000), 5).recv(9).decode())"
    tenant.run(pod("client", python("main", tenant.images("python"), ask), node=other_node.name), phase="Succeeded")
    assert tenant.logs("client") == "hello\n"


def test_a_pod_that_cannot_become_what_is_awaited_is_told_at_once(tenant: Tenant) -> None:
    """No test waits for a phase that will not come."""
    with pytest.raises(KubectlError, match="is not Succeeded"):
        tenant.run(pod("fails", python("main", tenant.images("python"), "raise SystemExit(3)")), phase="Succeeded")


class TestOwnCluster:
    """A cluster of one's own is used only if somebody allowed that."""

    def test_a_context_that_is_not_allowed_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message says where to allow it."""
        monkeypatch.setenv(own.VARIABLE, "production")
        with pytest.raises(
            own.RefusedError, match=r"production: cannot test there: not on the allow-list.*test-contexts"
        ):
            own.kubectl()

    def test_a_context_on_the_list_is_used(self, monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
        """By its name, with the kubeconfig that the user has."""
        monkeypatch.setenv(own.VARIABLE, "kind-cleanslate-3")
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        monkeypatch.setenv("PATH", str(cluster.kubectl.program.parent))
        found = own.kubectl()
        assert found is not None
        assert "--context=kind-cleanslate-3" in found.command("get", "nodes")

    def test_without_the_variable_nobody_elses_cluster_is_touched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The usual kubeconfig alone is no permission."""
        monkeypatch.delenv(own.VARIABLE, raising=False)
        assert own.kubectl() is None
