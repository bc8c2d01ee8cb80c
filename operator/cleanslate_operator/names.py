"""Every name that the operator writes into a cluster, made in one place."""

import re
from collections.abc import Mapping

GROUP = "cleanslate.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "GPUNodeReset"
PLURAL = "gpunoderesets"

FIELD_MANAGER = "cleanslate-operator"
COMPONENT = "cleanslate-operator"
FINALIZER = f"{GROUP}/reset"
ENDED = f"{GROUP}/ended"  # annotation of a GPUNodeReset: all is undone, never act on it again
RESET_UID = f"{GROUP}/reset-uid"  # label of whatever was made for a reset
RESET_NAME = f"{GROUP}/reset-name"  # label beside it: the work queue's key
ROLE = f"{GROUP}/role"  # label of ConfigMaps and Leases: one of the three below
ROLE_PLAN = "plan"
ROLE_RECORD = "record"
ROLE_LOCK = "lock"
NODE = f"{GROUP}/node"  # annotation of a Lease: the node that it locks
COVERED = (
    f"{GROUP}/covered"  # annotation of a DaemonSet: the nodes it covers, each with its plan and when that was made
)
TAINT = f"{GROUP}/resetting"
LEADER_LEASE = "cleanslate-operator"
KEPT = (
    f"{GROUP}/kept-plans"  # another one: plans of nodes that left it, each with the nodes whose pods may yet mount it
)

_NAME_LIMIT = 40
_NOT_LABEL = re.compile(r"[^a-z0-9-]+")


def base(reset_name: str, uid: str) -> str:
    """What the names of a reset's objects begin with: readable, a DNS label, one reset's only."""
    return f"{_NOT_LABEL.sub('-', reset_name.lower())[:_NAME_LIMIT].strip('-')}-{uid[:8]}"


def daemon_set(reset_name: str, uid: str) -> str:
    """The DaemonSet of a reset."""
    return base(reset_name, uid)


def plan(reset_name: str, uid: str, key: str) -> str:
    """A ConfigMap of plans; `key` tells those of one reset apart."""
    return f"{base(reset_name, uid)}-plan-{key}"


def record(reset_name: str, uid: str, shard: int) -> str:
    """A ConfigMap of the record of a reset."""
    return f"{base(reset_name, uid)}-record-{shard}"


def node_lease(node: str) -> str:
    """The Lease that is the lock of a node. A node's name has at most 253 characters, and so has a Lease's."""
    return f"node-{node}"[:253]


def node_of_lease(name: str, annotations: Mapping[str, str]) -> str | None:
    """The node that a Lease of this name locks; None if it is no lock. An annotation has a long node's name whole."""
    node = annotations.get(NODE, name.removeprefix("node-"))
    return node if name == node_lease(node) else None


def plan_key(node: str) -> str:
    """The key of a node's plan in its ConfigMap."""
    return f"{node}.json"


def labels(reset_name: str, uid: str) -> dict[str, str]:
    """The labels of whatever is made for a reset."""
    return {
        RESET_UID: uid,
        RESET_NAME: reset_name,
        "app.kubernetes.io/name": "cleanslate",
        "app.kubernetes.io/component": "reset",
        "app.kubernetes.io/managed-by": COMPONENT,
    }


def owner(reset_name: str, uid: str) -> dict[str, str | bool]:
    """The owner reference of whatever is made for a reset: the garbage collector's word, should all else fail."""
    return {"apiVersion": API_VERSION, "kind": KIND, "name": reset_name, "uid": uid, "controller": True}


def taint(uid: str) -> tuple[str, str]:
    """Key and value of the taint that a reset puts on a node: its own, so that it removes nobody else's."""
    return TAINT, uid[:8]
