"""The chart as Helm renders it, and as a real API server takes it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cleanslate_operator import names, settings
from cluster import binaries, places
from cluster.cluster import Cluster
from cluster.helm import Helm, HelmError
from cluster.kubectl import KubectlError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

Object = dict[str, Any]
PSA = "pod-security.kubernetes.io/enforce"
DIGEST = "sha256:" + "0a" * 32
EVERYTHING: dict[str, Any] = {
    "imageRegistry": "registry.example.com/team",
    "imagePullSecrets": ["pull-one", "pull-two"],
    "labels": {"team": "serving", "cost": "0123"},
    "operator": {
        "image": {"digest": DIGEST},
        "replicas": 3,
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
        "podLabels": {"logs": "yes"},
        "podAnnotations": {"example.com/scrape": "true"},
        "logLevel": "debug",
    },
    "resets": {
        "image": {"tag": "v9", "pullPolicy": "Never"},
        "resources": {"limits": {"cpu": 2, "memory": "1Gi"}},
        "nvmlLibrary": "/opt/nvidia/lib64/libnvidia-ml.so.1",
    },
    "metrics": {"serviceMonitor": {"create": True, "labels": {"release": "prometheus"}}},
    "networkPolicy": {"create": True, "scrapers": [{"namespaceSelector": {"matchLabels": {"monitoring": "yes"}}}]},
}
VALUE_SETS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "everything": EVERYTHING,
    "one replica": {"operator": {"replicas": 1}},
    "nothing that can be left out": {
        "namespaces": {"create": False},
        "crds": {"install": False},
        "quota": {"create": False},
        "podDisruptionBudget": {"create": False},
        "metrics": {"service": {"create": False}},
    },
    "names that look like something else": {"namespaces": {"operator": "1e3", "resets": "0123"}},
}
OWN_NAMESPACES = {"namespaces": {"create": True, "operator": "chart-system", "resets": "chart-resets"}}
# Each right that the operator has beyond its two namespaces. To add one, say in rbac.yaml what it is for.
CLUSTER_WIDE = {
    "cleanslate.dev/gpunoderesets: get list watch patch delete",
    "cleanslate.dev/gpunoderesets/status: patch",
    "nodes: get list patch",
    "pods: list delete",
    "pods/eviction: create",
}


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm without a cluster."""
    return Helm(program=binaries.helm(), folder=tmp_path_factory.mktemp("helm"))


@pytest.fixture(params=VALUE_SETS)
def rendered(helm: Helm, request: pytest.FixtureRequest) -> list[Object]:
    """What Helm makes of each set of values."""
    return helm.render(values=VALUE_SETS[request.param])


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def the(objects: list[Object], kind: str, name: str = "cleanslate-operator", namespace: str | None = None) -> Object:
    """The only object of a kind and a name, or of a namespace too."""
    (found,) = [
        one
        for one in of_kind(objects, kind)
        if one["metadata"]["name"] == name and namespace in (None, one["metadata"].get("namespace"))
    ]
    return found


def pod_of(objects: list[Object]) -> Object:
    return the(objects, "Deployment")["spec"]["template"]


def environment(objects: list[Object]) -> dict[str, str]:
    return {one["name"]: one.get("value", "a-pod") for one in pod_of(objects)["spec"]["containers"][0]["env"]}


def rights(role: Object) -> set[str]:
    """Each rule as a line."""
    return {
        f"{group + '/' if group else ''}{resource}: {' '.join(rule['verbs'])}"
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.mark.parametrize("values", VALUE_SETS)
def test_chart_is_without_a_fault_to_lint(helm: Helm, values: str) -> None:
    """`helm lint --strict` warns of nothing."""
    said = helm.lint(VALUE_SETS[values])
    assert "0 chart(s) failed" in said
    assert "[WARNING]" not in said


def test_every_object_is_named_and_labelled_and_in_its_place(rendered: list[Object]) -> None:
    """Nothing lands in the namespace that happens to be the release's, and no two objects are one."""
    keys = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in rendered]
    assert len(keys) == len(set(keys))
    cluster_scoped = {"Namespace", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    for kind, namespace, name in keys:
        assert isinstance(name, str)
        assert (namespace is None) == (kind in cluster_scoped), (kind, name)
        assert isinstance(namespace, str | None)
    for one in rendered:
        if one["kind"] != "CustomResourceDefinition":
            assert one["metadata"]["labels"]["app.kubernetes.io/name"] == "cleanslate"


def test_no_right_is_a_wildcard_or_reaches_a_secret(rendered: list[Object]) -> None:
    """Nor pods/exec, impersonation, escalation, or roles themselves."""
    for role in of_kind(rendered, "Role", "ClusterRole"):
        for rule in role["rules"]:
            words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not [word for word in words if "*" in word]
            assert words.isdisjoint({"secrets", "pods/exec", "nodes/proxy", "serviceaccounts/token"})
            assert words.isdisjoint({"rbac.authorization.k8s.io", "impersonate", "escalate", "bind"})


def test_only_the_operator_has_rights(rendered: list[Object]) -> None:
    """A reset pod is root on its node; with a right in the API it could take the cluster."""
    namespace = environment(rendered)["CLEANSLATE_OPERATOR_OPERATOR_NAMESPACE"]
    operator = {"kind": "ServiceAccount", "name": "cleanslate-operator", "namespace": namespace}
    bindings = of_kind(rendered, "RoleBinding", "ClusterRoleBinding")
    assert len(bindings) == 5
    assert all(binding["subjects"] == [operator] for binding in bindings)
    assert {binding["roleRef"]["name"] for binding in bindings} == {
        role["metadata"]["name"] for role in of_kind(rendered, "Role", "ClusterRole")
    }


def test_cluster_wide_rights_are_these(helm: Helm) -> None:
    """Whoever adds one meets this list."""
    (role,) = of_kind(helm.render(), "ClusterRole")
    assert rights(role) == CLUSTER_WIDE


def test_rights_in_other_namespaces_are_these(helm: Helm) -> None:
    """Beyond its own two namespaces it reads when nodes were heard of, and writes Events."""
    roles = {one["metadata"]["namespace"]: rights(one) for one in of_kind(helm.render(), "Role")}
    assert roles.keys() == {"cleanslate-system", "cleanslate-resets", "kube-node-lease", "default"}
    assert roles["kube-node-lease"] == {"coordination.k8s.io/leases: get"}
    assert roles["default"] == {"events: create patch"}
    own = the(helm.render(), "Role", "cleanslate-leader")["rules"]
    assert [rule.get("resourceNames") for rule in own] == [[names.LEADER_LEASE], None]
    assert own[1]["verbs"] == ["create"]


def test_no_token_is_mounted_unless_asked_for(rendered: list[Object]) -> None:
    """The operator's pods ask; whoever else uses a ServiceAccount of the chart gets none."""
    accounts = of_kind(rendered, "ServiceAccount")
    assert [one["metadata"]["name"] for one in accounts] == ["cleanslate-operator", "cleanslate-reset"]
    assert [one["automountServiceAccountToken"] for one in accounts] == [False, False]
    assert pod_of(rendered)["spec"]["automountServiceAccountToken"] is True


def test_operator_starts_with_what_the_values_say(helm: Helm) -> None:
    """The operator reads the Deployment's environment as it was meant."""
    found = settings.build({}, environment(helm.render(values=EVERYTHING)))
    assert found == settings.Settings(
        identity="a-pod",
        image="registry.example.com/team/cleanslate:v9",
        image_pull_policy="Never",
        image_pull_secrets=("pull-one", "pull-two"),
        reset_resources={"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}},
        nvml_library="/opt/nvidia/lib64/libnvidia-ml.so.1",
        log_level="debug",
    )


def test_operators_own_defaults_are_the_charts(helm: Helm) -> None:
    """Neither table can change alone."""
    found = settings.build({}, environment(helm.render()))
    assert found == settings.Settings(identity="a-pod", image=found.image)


def test_every_variable_is_a_setting(rendered: list[Object]) -> None:
    """A misspelt variable would be ignored."""
    known = {row.variable for row in settings.ROWS} | {"POD_NAME"}
    assert set(environment(rendered)) <= known


def test_images_are_named_as_asked(helm: Helm) -> None:
    """A registry before both, a digest before a tag, the chart's version without either."""

    def images(values: Mapping[str, Any]) -> tuple[str, str]:
        objects = helm.render(values=values)
        return pod_of(objects)["spec"]["containers"][0]["image"], environment(objects)["CLEANSLATE_OPERATOR_IMAGE"]

    version = yaml.safe_load((places.CHECKOUT / "charts/cleanslate/Chart.yaml").read_text())["appVersion"]
    assert images({}) == (f"cleanslate-operator:{version}", f"cleanslate:{version}")
    registry = "registry.example.com/team"
    assert images(EVERYTHING) == (f"{registry}/cleanslate-operator@{DIGEST}", f"{registry}/cleanslate:v9")


def test_two_replicas_prefer_two_nodes_and_are_drained_one_at_a_time(helm: Helm) -> None:
    """One that works, one that stands by."""
    objects = helm.render()
    assert the(objects, "Deployment")["spec"]["replicas"] == 2
    (term,) = pod_of(objects)["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels, selector = pod_of(objects)["metadata"]["labels"], term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    budget = the(objects, "PodDisruptionBudget")["spec"]
    assert selector.items() <= labels.items()
    assert budget["selector"]["matchLabels"] == selector
    assert budget["maxUnavailable"] == 1


def test_one_replica_may_be_drained(helm: Helm) -> None:
    """A budget for one replica would hold up every drain of its node."""
    assert of_kind(helm.render(values={"operator": {"replicas": 1}}), "PodDisruptionBudget") == []


def test_every_selector_finds_the_operator_and_not_the_reset_pods(helm: Helm) -> None:
    """Reset pods have the label `app.kubernetes.io/name` too."""
    objects = helm.render(values=EVERYTHING)
    selectors = [
        the(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        the(objects, "Service")["spec"]["selector"],
        the(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        the(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= pod_of(objects)["metadata"]["labels"].items()
        assert not selector.items() <= names.labels("reset", "0" * 36).items()
    monitored = the(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= the(objects, "Service")["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("release", "made"),
    [
        ("default", {"cleanslate-system": "restricted", "cleanslate-resets": "privileged"}),
        ("cleanslate-system", {"cleanslate-resets": "privileged"}),
    ],
)
def test_namespaces_are_made_but_for_the_releases_own(helm: Helm, release: str, made: dict[str, str]) -> None:
    """Helm has made that one already, and could not uninstall a release with the namespace that holds it."""
    objects = of_kind(helm.render(f"--namespace={release}"), "Namespace")
    assert {one["metadata"]["name"]: one["metadata"]["labels"][PSA] for one in objects} == made


def test_notes_name_the_labels_that_the_chart_did_not_set(helm: Helm) -> None:
    """Whoever makes a namespace makes it with the right pod security level."""
    chart = str(places.CHECKOUT / "charts/cleanslate")
    install = ("install", "cleanslate", chart, "--dry-run=client")
    made, not_made = helm(*install), helm(*install, "--namespace=cleanslate-system")
    command = "kubectl label namespace cleanslate-system pod-security.kubernetes.io/enforce=restricted"
    assert "kubectl label" not in made
    assert command in not_made
    assert "namespace cleanslate-resets" not in not_made


def test_one_namespace_for_both_is_refused(helm: Helm) -> None:
    """The message says why, and what to do."""
    with pytest.raises(HelmError, match=r"cannot both be one: reset pods are privileged.*name two"):
        helm.render(values={"namespaces": {"operator": "one", "resets": "one"}})


def test_wrong_value_is_refused_by_helm_itself(helm: Helm) -> None:
    """Helm reads the schema; what it refuses is tested without Helm."""
    with pytest.raises(HelmError, match="additional properties 'replicas' not allowed"):
        helm.render(values={"replicas": 2})


def test_old_cluster_is_refused(helm: Helm) -> None:
    """Its API server would drop what the CRD says."""
    with pytest.raises(HelmError, match=r"requires kubeVersion: >=1\.31\.0-0"):
        helm.render("--kube-version=1.30.9")


def test_crds_stay_when_the_chart_goes(helm: Helm) -> None:
    """They are those of crds/, with the policy that keeps them and all GPUNodeResets."""
    installed = {one["metadata"]["name"]: one for one in of_kind(helm.render(), "CustomResourceDefinition")}
    sources = [yaml.safe_load(path.read_text()) for path in (places.CHECKOUT / "crds").glob("*.yaml")]
    assert sources
    assert installed.keys() == {source["metadata"]["name"] for source in sources}
    for one in installed.values():
        assert one["metadata"].pop("annotations")["helm.sh/resource-policy"] == "keep"
    for source in sources:
        source["metadata"].pop("annotations", None)
        assert installed[source["metadata"]["name"]] == source


def test_critical_pods_are_allowed_where_quotas_ask_for_it(helm: Helm) -> None:
    """In each namespace whose pods have such a class, and in no other."""

    def quotas(values: Mapping[str, Any]) -> dict[str, str]:
        return {
            one["metadata"]["namespace"]: one["spec"]["scopeSelector"]["matchExpressions"][0]["values"][0]
            for one in of_kind(helm.render(values=values), "ResourceQuota")
        }

    node, cluster = "system-node-critical", "system-cluster-critical"
    assert quotas({}) == {"cleanslate-resets": node}
    assert quotas(EVERYTHING) == {"cleanslate-resets": node, "cleanslate-system": cluster}
    assert quotas({"resets": {"priorityClassName": "my-own"}}) == {}


@pytest.fixture(scope="module")
def namespaces(running_cluster: Cluster, helm: Helm) -> Iterator[None]:
    """Two namespaces as the chart makes them, on the real API server; not those of an installed chart."""
    made = of_kind(helm.render(values=OWN_NAMESPACES), "Namespace")
    running_cluster.kubectl.apply(*made)
    yield
    running_cluster.kubectl.delete("namespace", *(one["metadata"]["name"] for one in made))


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("values", ["the defaults", "everything", "one replica"])
def test_real_api_server_takes_every_object(cluster: Cluster, helm: Helm, values: str) -> None:
    """With no unknown field. A ServiceMonitor needs the CRD of the Prometheus operator, which is not here."""
    objects = helm.render(values=VALUE_SETS[values] | OWN_NAMESPACES)
    places_of = {one["metadata"].get("namespace", "default") for one in objects}
    for namespace in places_of:
        there = [one for one in objects if one["metadata"].get("namespace", "default") == namespace]
        there = [one for one in there if one["kind"] != "ServiceMonitor"]
        flags = ("--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts")
        document = {"apiVersion": "v1", "kind": "List", "items": there}
        said = cluster.kubectl.within(namespace)("apply", *flags, "-f", "-", stdin=json.dumps(document))
        assert said.count("(server dry run)") == len(there)


def dry_run(cluster: Cluster, namespace: str, spec: Mapping[str, Any]) -> None:
    """Lets the API server look at a pod, admission and all. Raises KubectlError with why it would not take it."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
    cluster.kubectl.within(namespace)("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


@pytest.mark.usefixtures("namespaces")
def test_operators_pod_is_within_the_restricted_level(cluster: Cluster, helm: Helm) -> None:
    """The real admission takes it as it is, and refuses it with any privilege."""
    spec = pod_of(helm.render())["spec"] | {"serviceAccountName": "default"}
    dry_run(cluster, "chart-system", spec)
    with pytest.raises(KubectlError, match='violates PodSecurity "restricted:latest": host namespaces'):
        dry_run(cluster, "chart-system", spec | {"hostPID": True})


@pytest.mark.usefixtures("namespaces")
def test_privileged_pods_may_run_in_the_resets_namespace(cluster: Cluster) -> None:
    """And in the operator's they may not."""
    container = {"name": "one", "image": "one", "securityContext": {"privileged": True}}
    spec = {"hostPID": True, "hostNetwork": True, "containers": [container]}
    dry_run(cluster, "chart-resets", spec)
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        dry_run(cluster, "chart-system", spec)


def test_folder_of_helm_is_its_own(helm: Helm) -> None:
    """A test leaves nothing in anybody's home."""
    for line in helm("env").splitlines():
        name, _, value = line.partition("=")
        if name in {"HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"}:
            assert Path(value.strip('"')).is_relative_to(helm.folder)
