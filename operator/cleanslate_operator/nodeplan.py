"""What the cluster knows of a node's pods, as a plan for the node program, and the ConfigMaps that bring plans to their nodes.

A container that the plan does not name is a leftover to the node program. So whatever may run is named, and a pod that can't be
understood makes no plan at all.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from cleanslate import formats
from cleanslate_operator import names
from cleanslate_operator.noderesult import printable
from cleanslate_operator.reset import Reset

PLANS_LIMIT_BYTES = 900_000  # of plans in one ConfigMap, which holds 1 MiB with its keys, and is written with escapes
_SUFFIX = ".json"
_MIRROR, _HASH = "kubernetes.io/config.mirror", "kubernetes.io/config.hash"
_STATUSES = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
_OVER = ("Succeeded", "Failed")
_DIGITS = 12


class PlanError(ValueError):
    """A plan that cannot be made; the text names the pod or the node."""


def document(
    pods: Iterable[Mapping[str, Any]], condemned: Iterable[str], *, snapshot_time_s: float, margin_s: float
) -> bytes:
    """The plan of a node, from its pods as the API lists them, as `cleanslate.formats.parse_plan` reads it.

    `condemned`: UIDs of pods that are to end although they live. `snapshot_time_s`: Unix time before which the pods were listed.
    Raises PlanError.
    """
    live: dict[str, set[str]] = {}
    for pod in pods:
        running = set(_running(pod))
        if running or _part(pod, "status").get("phase") not in _OVER:
            for uid in _uids(pod):
                live.setdefault(uid, set()).update(running)
    plan = {
        "schema": formats.PLAN_SCHEMA,
        "snapshotTime": datetime.fromtimestamp(snapshot_time_s, UTC).isoformat(timespec="milliseconds"),
        "livePods": {uid: sorted(live[uid]) for uid in sorted(live)},
        "condemnedPods": sorted(set(condemned)),
        "marginSeconds": margin_s,
    }
    data = json.dumps(plan, separators=(",", ":")).encode()
    try:
        formats.parse_plan(data, now_s=snapshot_time_s)
    except formats.PlanError as error:
        raise PlanError(f"the plan of {len(live)} pods: cannot make: {error}") from error
    return data


def config_maps(reset: Reset, plans: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """ConfigMaps with the plans of these nodes, as few as hold them; the same plans give the same names.

    They are immutable, so what a pod reads is what was written for it. Their namespace is whichever they are created in.
    Raises PlanError if a plan is larger than PLANS_LIMIT_BYTES.
    """
    return [_config_map(reset, share) for share in _shares(plans)]


def nodes_of(config_map: Mapping[str, Any]) -> list[str]:
    """The nodes whose plans are in a ConfigMap of `config_maps`."""
    return [key.removesuffix(_SUFFIX) for key in config_map["data"]]


def _shares(plans: Mapping[str, bytes]) -> Iterator[dict[str, str]]:
    share: dict[str, str] = {}
    size = 0
    for node in sorted(plans):
        key, plan = names.plan_key(node), plans[node]
        cost = len(key) + len(plan)
        if cost > PLANS_LIMIT_BYTES:
            raise PlanError(
                f"the plan of node {node}: cannot store: {len(plan)} bytes, at most {PLANS_LIMIT_BYTES} fit"
            )
        if size + cost > PLANS_LIMIT_BYTES:
            yield share
            share, size = {}, 0
        share[key] = plan.decode()
        size += cost
    if share:
        yield share


def _config_map(reset: Reset, share: Mapping[str, str]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(share, sort_keys=True).encode()).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": names.plan(reset.name, reset.uid, digest[:_DIGITS]),
            "labels": names.labels(reset.name, reset.uid) | {names.ROLE: names.ROLE_PLAN},
            "ownerReferences": [names.owner(reset.name, reset.uid)],
        },
        "immutable": True,
        "data": dict(share),
    }


def _uids(pod: Mapping[str, Any]) -> list[str]:
    """The UIDs that processes of the pod can have in their cgroup: its own, and a static pod's config hash."""
    metadata = _part(pod, "metadata")
    annotations = _part(metadata, "annotations")
    uid = metadata.get("uid")
    if not isinstance(uid, str) or not formats.is_pod_uid(uid):
        raise PlanError(f"{_label(pod)}: cannot plan for it: its UID is not one")
    if _MIRROR not in annotations:
        return [uid]
    digest = annotations.get(_HASH)
    # A kubelet's is always well-formed; anybody may write another one, which then is no process's.
    return [uid, digest] if isinstance(digest, str) and formats.is_pod_uid(digest) else [uid]


def _running(pod: Mapping[str, Any]) -> Iterator[str]:
    """The IDs of the pod's running containers. A waiting one has none yet, or an ended one's."""
    status = _part(pod, "status")
    for kind in _STATUSES:
        for container in _rows(pod, status.get(kind)):
            if _part(container, "state").get("running") is not None:
                yield _container_id(pod, container)


def _container_id(pod: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    found = container.get("containerID")
    if not isinstance(found, str) or not formats.is_container_id(found):
        name = printable(str(container.get("name"))[:64], 63)
        raise PlanError(f"{_label(pod)}: cannot plan for it: container {name} runs, and its ID is not one")
    return found


def _rows(pod: Mapping[str, Any], value: object) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise PlanError(f"{_label(pod)}: cannot plan for it: its container statuses are no list of objects")
    return value


def _part(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def _label(pod: Mapping[str, Any]) -> str:
    metadata = _part(pod, "metadata")
    return f"pod {printable(str(metadata.get('namespace')), 63)}/{printable(str(metadata.get('name')), 253)}"
