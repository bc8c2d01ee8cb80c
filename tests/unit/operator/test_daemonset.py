"""The DaemonSet: what is privileged has no credentials, what has time has no rights, and it runs where it is meant to."""

import json
from typing import Any

from cleanslate_operator import daemonset, names
from cleanslate_operator.views import Started
from unit.operator.resetpods import UID, Object, reset, settings

COVERED = {
    "gpu-2": Started(plan="plan-b", planned_s=2.5),
    "gpu-1": Started(plan="plan-a", planned_s=1.0),
    "gpu-3": Started(plan="plan-a", planned_s=1.0),
}


def rendered(covered: dict[str, Started] | None = None, **known: Any) -> Object:
    """The DaemonSet of a reset."""
    return daemonset.render(reset(), COVERED if covered is None else covered, settings(**known))


def pod_of(made: Object) -> Object:
    """The pod's spec."""
    return dict(made["spec"]["template"]["spec"])


def terms_of(made: Object) -> list[Object]:
    """The node selector terms."""
    affinity = pod_of(made)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return list(affinity["nodeSelectorTerms"])


def test_it_is_the_resets_own() -> None:
    """By name, labels and owner: found again after a crash, and taken away with the reset should all else fail."""
    metadata = rendered()["metadata"]
    assert metadata["name"] == "pool-a-5e1c7f3a"
    assert metadata["namespace"] == "cleanslate-resets"
    assert metadata["labels"] == names.labels("pool-a", UID)
    assert metadata["ownerReferences"] == [names.owner("pool-a", UID)]
    template = rendered()["spec"]["template"]
    assert template["metadata"]["labels"] == names.labels("pool-a", UID)
    assert rendered()["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_same_nodes_render_the_same_bytes() -> None:
    """In whatever order they come: a repeated step writes nothing new."""
    again = rendered(dict(reversed(COVERED.items())))
    assert json.dumps(again) == json.dumps(rendered())


def test_what_it_covers_is_written_beside_it() -> None:
    """The next leader knows which node has which plan, and since when."""
    covered = json.loads(rendered()["metadata"]["annotations"][names.COVERED])
    assert covered == {"gpu-1": ["plan-a", 1.0], "gpu-2": ["plan-b", 2.5], "gpu-3": ["plan-a", 1.0]}


def test_it_runs_on_the_named_nodes_by_name() -> None:
    """One term a node, since the API allows one name a term."""
    fields = [term["matchFields"] for term in terms_of(rendered())]
    assert fields == [[{"key": "metadata.name", "operator": "In", "values": [node]}] for node in sorted(COVERED)]


def test_without_nodes_it_runs_nowhere() -> None:
    """Its only term contradicts itself, whatever labels a node has."""
    (term,) = terms_of(rendered({}))
    requirements = term["matchExpressions"]
    assert {one["operator"] for one in requirements} == {"Exists", "DoesNotExist"}
    assert len({one["key"] for one in requirements}) == 1
    assert pod_of(rendered({}))["volumes"][1]["projected"]["sources"] == []


def test_a_change_of_nodes_touches_no_running_pod() -> None:
    """The pods are replaced when they are deleted, never rolled."""
    assert rendered()["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_the_reset_sees_the_node_and_has_no_credentials() -> None:
    """Privileged in the host's PID namespace and network, with no token and no address of anything."""
    pod = pod_of(rendered())
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["serviceAccountName"] == "cleanslate-reset"
    assert pod["hostPID"] is True
    assert pod["hostNetwork"] is True
    assert pod["dnsPolicy"] == "Default"
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["priorityClassName"] == "system-node-critical"
    (program,) = pod["initContainers"]
    assert program["command"] == ["cleanslate"]
    assert program["securityContext"] == {"privileged": True, "readOnlyRootFilesystem": True, "runAsUser": 0}
    assert [variable["name"] for variable in program["env"]] == ["NODE_NAME"]
    assert program["resources"]["limits"]["memory"] == "512Mi"
    assert program["terminationMessagePolicy"] == "File"
    host = program["volumeMounts"][0]
    assert host == {"name": "host", "mountPath": "/host", "mountPropagation": "None"}


def test_a_pod_reads_its_own_nodes_plan_only() -> None:
    """One file, named by its node; of each ConfigMap only the plans that are in flight."""
    pod = pod_of(rendered())
    mount = pod["initContainers"][0]["volumeMounts"][1]
    assert mount["subPathExpr"] == "$(NODE_NAME).json"
    assert mount["mountPath"] == "/plan/plan.json"
    assert mount["readOnly"] is True
    sources = pod["volumes"][1]["projected"]["sources"]
    keys = {one["configMap"]["name"]: [item["path"] for item in one["configMap"]["items"]] for one in sources}
    assert keys == {"plan-a": ["gpu-1.json", "gpu-3.json"], "plan-b": ["gpu-2.json"]}
    assert all(item["key"] == item["path"] for one in sources for item in one["configMap"]["items"])
    assert not any(one["configMap"].get("optional") for one in sources)


def test_the_main_container_may_do_nothing() -> None:
    """It has no part of the host, no capability and no root, and a few megabytes."""
    (idle,) = pod_of(rendered())["containers"]
    assert idle["args"] == ["idle"]
    assert "volumeMounts" not in idle
    assert "env" not in idle
    rights = idle["securityContext"]
    assert rights["runAsNonRoot"] is True
    assert rights["runAsUser"] == 65534
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert idle["resources"]["requests"].keys() == {"cpu", "memory"}
    assert idle["resources"]["limits"].keys() == {"cpu", "memory"}


def test_image_and_how_to_get_it_are_settings() -> None:
    """Both containers use the same."""
    pod = pod_of(rendered(image="own/node:2", image_pull_policy="Never", image_pull_secrets=("one", "two")))
    containers = [*pod["initContainers"], *pod["containers"]]
    assert {one["image"] for one in containers} == {"own/node:2"}
    assert {one["imagePullPolicy"] for one in containers} == {"Never"}
    assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]


def test_five_hundred_nodes_with_the_longest_names_fit_an_object() -> None:
    """The API keeps 1.5 MiB of an object."""
    covered = {f"{number:04}.{'n' * 248}": Started(plan="plan-a", planned_s=1.0) for number in range(500)}
    assert len(json.dumps(rendered(covered))) < 1 << 20
