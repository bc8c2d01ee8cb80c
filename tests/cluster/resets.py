"""GPUNodeResets as a user makes them with kubectl: applied, followed to their end, read, and deleted."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cleanslate_operator import names
from cluster.kubectl import Kubectl, Object

SYSTEM, SPACE = "cleanslate-system", "cleanslate-resets"
KIND = names.PLURAL
END_S = 120.0
_MADE = "daemonsets,configmaps,leases,pods"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resets:
    """The GPUNodeResets of one test, which are told by a label."""

    kubectl: Kubectl
    test: str

    def apply(self, name: str, **spec: Any) -> Object:
        """Creates one; returns it as the API server has it. Raises KubectlError."""
        metadata = {"name": name, "labels": {"test": self.test}}
        return self.kubectl.create(
            {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec}
        )

    def until(self, name: str, is_so: Callable[[Object], bool], *, timeout_s: float = END_S) -> Object:
        """The reset, once that is so of it. Raises KubectlError with the last status that was seen."""
        return self.kubectl.until(KIND, name, is_so, timeout_s=timeout_s)

    def ended(self, name: str, *, timeout_s: float = END_S) -> Object:
        """The reset, once the operator has let go of it. Raises KubectlError."""
        return self.until(name, is_let_go, timeout_s=timeout_s)

    def run(self, name: str, **spec: Any) -> Object:
        """The end of a reset that is applied now."""
        self.apply(name, **spec)
        return self.ended(name)

    def says(self, name: str, phase: str, reason: str, *, timeout_s: float = END_S) -> str:
        """Its message, once its status has this phase and reason. Raises KubectlError."""
        one = self.until(name, lambda one: summary(one)[:2] == (phase, reason), timeout_s=timeout_s)
        return str(one["status"]["message"])

    def covers(self, name: str) -> Object:
        """The pod of a reset whose container runs. Raises KubectlError if none comes."""
        selector = f"--selector={names.RESET_NAME}={name}"
        within = self.kubectl.within(SPACE)
        within.wait("create", "pods", selector)
        within.wait("jsonpath={.status.initContainerStatuses[0].state.running}", "pods", selector)
        (one,) = within.items("pods", selector)
        return one

    def delete(self, name: str, *flags: str) -> None:
        """Deletes it, and waits until it is gone. Raises KubectlError."""
        self.kubectl.delete(KIND, name, *flags)

    def left(self) -> list[str]:
        """What an operator makes for resets and is there now, once pods that are on their way have gone. Raises KubectlError."""
        space = self.kubectl.within(SPACE)
        space.wait("delete", "pods", f"--selector={names.RESET_UID}")
        made = space("get", _MADE, f"--selector={names.RESET_UID}", "-o", "name").split()
        tainted = [f"node/{node} is tainted" for node in self.nodes() if names.TAINT in self.taints(node)]
        held = [one["metadata"]["name"] for one in self.kubectl.items(KIND) if one["metadata"].get("finalizers")]
        return [*made, *tainted, *held]

    def nodes(self) -> list[str]:
        """The names of the nodes."""
        return [one["metadata"]["name"] for one in self.kubectl.items("nodes")]

    def taints(self, node: str) -> set[str]:
        """The keys of a node's taints."""
        return taints_of(self.kubectl.get("node", node))


@contextmanager
def resets(kubectl: Kubectl, test: str) -> Iterator[Resets]:
    """The resets of one test; those that are there at its end are deleted."""
    label = re.sub(r"[^A-Za-z0-9]+", "-", test)[:60].strip("-")
    try:
        yield Resets(kubectl=kubectl, test=label)
    finally:
        kubectl.delete(KIND, f"--selector=test={label}")


def is_let_go(one: Object) -> bool:
    """Whether the operator will do nothing for it any more."""
    metadata = one["metadata"]
    return names.ENDED in metadata.get("annotations", {}) and not metadata.get("finalizers")


def summary(one: Object) -> tuple[str, str, str]:
    """Phase, reason and message."""
    status = one.get("status", {})
    return status.get("phase", ""), status.get("reason", ""), status.get("message", "")


def conditions(one: Object) -> dict[str, str]:
    """The truth of each condition."""
    return {row["type"]: row["status"] for row in one.get("status", {}).get("conditions", ())}


def row(one: Object, node: str) -> Object:
    """What the status says of a node. Raises LookupError if that is nothing."""
    rows: dict[str, Object] = {found["node"]: found for found in one["status"].get("results", ())}
    return rows[node]


def taints_of(node: Object) -> set[str]:
    """The keys of its taints."""
    return {taint["key"] for taint in node["spec"].get("taints", ())}
