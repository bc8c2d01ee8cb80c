"""Where the API server keeps what the operator reads and writes. Every path is made here, each name in it quoted."""

import urllib.parse

from cleanslate_operator import names

_RESETS = f"/apis/{names.GROUP}/{names.VERSION}/{names.PLURAL}"
EVENTS_NAMESPACE = "default"  # where Events about cluster-scoped objects live


def resets() -> str:
    """All GPUNodeResets."""
    return _RESETS


def reset(name: str) -> str:
    """One GPUNodeReset."""
    return f"{_RESETS}/{_quoted(name)}"


def reset_status(name: str) -> str:
    """Its status."""
    return f"{reset(name)}/status"


def nodes() -> str:
    """All nodes."""
    return "/api/v1/nodes"


def node(name: str) -> str:
    """One node."""
    return f"{nodes()}/{_quoted(name)}"


def node_heartbeat(name: str) -> str:
    """The Lease that a node's kubelet renews."""
    return lease("kube-node-lease", name)


def pods(namespace: str | None = None) -> str:
    """All pods of a namespace, or of every one."""
    return _core("pods", namespace)


def pod(namespace: str, name: str) -> str:
    """One pod."""
    return f"{pods(namespace)}/{_quoted(name)}"


def eviction(namespace: str, name: str) -> str:
    """Where a pod's eviction is asked for."""
    return f"{pod(namespace, name)}/eviction"


def config_maps(namespace: str) -> str:
    """All ConfigMaps of a namespace."""
    return _core("configmaps", namespace)


def config_map(namespace: str, name: str) -> str:
    """One ConfigMap."""
    return f"{config_maps(namespace)}/{_quoted(name)}"


def events(namespace: str = EVENTS_NAMESPACE) -> str:
    """The Events of a namespace."""
    return _core("events", namespace)


def event(name: str, namespace: str = EVENTS_NAMESPACE) -> str:
    """One Event."""
    return f"{events(namespace)}/{_quoted(name)}"


def daemon_sets(namespace: str) -> str:
    """All DaemonSets of a namespace."""
    return f"/apis/apps/v1/namespaces/{_quoted(namespace)}/daemonsets"


def daemon_set(namespace: str, name: str) -> str:
    """One DaemonSet."""
    return f"{daemon_sets(namespace)}/{_quoted(name)}"


def leases(namespace: str) -> str:
    """All Leases of a namespace."""
    return f"/apis/coordination.k8s.io/v1/namespaces/{_quoted(namespace)}/leases"


def lease(namespace: str, name: str) -> str:
    """One Lease."""
    return f"{leases(namespace)}/{_quoted(name)}"


def _core(plural: str, namespace: str | None) -> str:
    return f"/api/v1/{plural}" if namespace is None else f"/api/v1/namespaces/{_quoted(namespace)}/{plural}"


def _quoted(name: str) -> str:
    """A name as one part of a path; a name that would change the path (`..`) is no name of the API's."""
    return "-" if name in {"", ".", ".."} else urllib.parse.quote(name, safe="")
