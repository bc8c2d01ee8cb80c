"""The DaemonSet of a reset: one short-lived pod on each node in flight. Pure; the same input gives the same bytes.

The privileged part is an init container, which sees the whole node, and has no credentials and no way to the API. Its result is
its termination message. The main container only keeps the pod, so that the result stays to be read; it may do nothing at all.
"""

import json
from collections.abc import Mapping
from typing import Any

from cleanslate_operator import arguments, names
from cleanslate_operator.reset import Reset
from cleanslate_operator.results import RESET_CONTAINER
from cleanslate_operator.settings import Settings
from cleanslate_operator.views import Started

IDLE_CONTAINER = "idle"
GRACE_S = 10  # the program leaves at SIGTERM within a second, unless a driver holds it, and then no time is enough
_NOBODY = 65534
_IDLE_RESOURCES = {
    "requests": {"cpu": "1m", "memory": "16Mi"},
    "limits": {"cpu": "100m", "memory": "64Mi"},
}  # 9 MB measured

Object = dict[str, Any]


def render(reset: Reset, covered: Mapping[str, Started], settings: Settings) -> Object:
    """The DaemonSet that runs the reset on these nodes, each with its plan; on none if there are none."""
    labels = names.labels(reset.name, reset.uid)
    stated = {node: [started.plan, started.planned_s] for node, started in sorted(covered.items())}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {
            "name": names.daemon_set(reset.name, reset.uid),
            "namespace": settings.resets_namespace,
            "labels": labels,
            "annotations": {names.COVERED: json.dumps(stated, separators=(",", ":"))},
            "ownerReferences": [names.owner(reset.name, reset.uid)],
        },
        "spec": {
            "selector": {"matchLabels": {names.RESET_UID: reset.uid}},
            # The affinity changes with every wave: a rolling update would kill resets half-way.
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 0,  # nobody rolls back a reset, and every wave is a revision
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {"kubectl.kubernetes.io/default-container": RESET_CONTAINER},
                },
                "spec": _pod(reset, covered, settings),
            },
        },
    }


def _pod(reset: Reset, covered: Mapping[str, Started], settings: Settings) -> Object:
    return {
        "serviceAccountName": settings.reset_service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "priorityClassName": settings.priority_class,
        "terminationGracePeriodSeconds": GRACE_S,
        "hostPID": True,
        "hostNetwork": True,  # a sick node's pod network must not matter
        "dnsPolicy": "Default",
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _affinity(covered)}},
        "tolerations": [{"operator": "Exists"}],
        "volumes": [
            {"name": "host", "hostPath": {"path": "/", "type": "Directory"}},
            {"name": "plans", "projected": {"sources": _plans(covered), "defaultMode": 0o444}},
        ],
        "initContainers": [_reset_container(reset, settings)],
        "containers": [_idle_container(settings)],
    }


def _reset_container(reset: Reset, settings: Settings) -> Object:
    return _container(RESET_CONTAINER, settings) | {
        "args": list(arguments.command_line(reset.spec, settings)),
        "env": [{"name": arguments.NODE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "resources": {kind: dict(amounts) for kind, amounts in settings.reset_resources.items()},
        "securityContext": {"privileged": True, "readOnlyRootFilesystem": True, "runAsUser": 0},
        "volumeMounts": [
            # No propagation: what is mounted or unmounted later on the host must not be held, nor show here.
            {"name": "host", "mountPath": arguments.HOST_ROOT, "mountPropagation": "None"},
            {
                "name": "plans",
                "mountPath": arguments.PLAN_FILE,
                "subPathExpr": names.plan_key(f"$({arguments.NODE_VARIABLE})"),  # no other node's plan is in reach
                "readOnly": True,
            },
        ],
    }


def _idle_container(settings: Settings) -> Object:
    return _container(IDLE_CONTAINER, settings) | {
        "args": ["idle"],
        "resources": {kind: dict(amounts) for kind, amounts in _IDLE_RESOURCES.items()},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _NOBODY,
            "runAsGroup": _NOBODY,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _container(name: str, settings: Settings) -> Object:
    return {
        "name": name,
        "image": settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["cleanslate"],  # another image's entry point is not to be trusted with the node
        "terminationMessagePath": arguments.MESSAGE_FILE,
        "terminationMessagePolicy": "File",  # a log is no result
    }


def _affinity(covered: Mapping[str, Started]) -> Object:
    """Exactly these nodes, by name: labels can lie. The API allows one name a term, and any of the terms is enough."""
    terms = [{"matchFields": [_requirement("metadata.name", "In", [node])]} for node in sorted(covered)]
    return {"nodeSelectorTerms": terms or [_NO_NODE]}


def _requirement(key: str, operator: str, values: list[str]) -> Object:
    return {"key": key, "operator": operator, "values": values}


# An affinity needs a term: this one contradicts itself.
_NO_NODE: Object = {
    "matchExpressions": [{"key": names.GROUP, "operator": "Exists"}, {"key": names.GROUP, "operator": "DoesNotExist"}]
}


def _plans(covered: Mapping[str, Started]) -> list[Object]:
    """The plans' ConfigMaps, of each only what is in flight: an older one may still hold an outdated plan of the same node.

    A pod whose plan is missing does not start.
    """
    keys: dict[str, list[str]] = {}
    for node in sorted(covered):
        keys.setdefault(covered[node].plan, []).append(names.plan_key(node))
    return [{"configMap": {"name": plan, "items": [_item(key) for key in keys[plan]]}} for plan in sorted(keys)]


def _item(key: str) -> Object:
    return {"key": key, "path": key}
