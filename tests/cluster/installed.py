"""The chart on the test cluster, with the images that its nodes have."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cluster import images
from cluster.helm import CHART, Helm, HelmError
from cluster.kubectl import Kubectl, KubectlError

RELEASE = "cleanslate"
CRDS = ("gpunoderesets.cleanslate.dev",)
_DEADLINE_S = 120.0
_UNDOING_S = 60.0  # the operator has a DaemonSet, its pods and the locks to take away


def images_of_the_cluster() -> dict[str, Any]:
    """Values that name the images of this checkout, which no node may pull."""
    return {"operator": {"image": _image("operator")}, "resets": {"image": _image("node-program")}}


def install(kubectl: Kubectl, helm: Helm, values: Mapping[str, Any] = {}, *, timeout_s: float = _DEADLINE_S) -> str:
    """Installs or upgrades, and waits until every replica is ready; returns the notes.

    Raises HelmError, with what the pods are and say where they do not get ready.
    """
    arguments = ("upgrade", "--install", RELEASE, os.fspath(CHART), "--wait", f"--timeout={timeout_s:.0f}s")
    try:
        return helm(*arguments, values=merged(images_of_the_cluster(), values), timeout_s=timeout_s + 10)
    except HelmError as error:
        raise HelmError(f"{error}\n{_pods(kubectl)}") from error


def uninstall(kubectl: Kubectl, helm: Helm, *, timeout_s: float = _DEADLINE_S) -> None:
    """Deletes every GPUNodeReset, then the release, then the CRDs that it leaves.

    All of it goes even where the operator does not undo a reset in time, which raises KubectlError at the end. Raises HelmError.
    """
    try:
        _delete_resets(kubectl)
    finally:
        wait = ("--ignore-not-found", "--wait", f"--timeout={timeout_s:.0f}s")
        helm("uninstall", RELEASE, *wait, timeout_s=timeout_s + 10)
        kubectl.delete("crd", *CRDS)


@contextmanager
def installed(kubectl: Kubectl, helm: Helm, values: Mapping[str, Any] = {}) -> Iterator[str]:
    """The chart while the block runs; its notes. Nothing of it is left afterwards, also if it did not get ready."""
    try:
        yield install(kubectl, helm, values)
    finally:
        uninstall(kubectl, helm)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`one` with the values of `other`, which win."""
    result = dict(one)
    for name, value in other.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if both else value
    return result


def _pods(kubectl: Kubectl) -> str:
    """What the operator's pods are and say, wherever they are."""
    selector = "--selector=app.kubernetes.io/name=cleanslate,app.kubernetes.io/component=operator"
    said = []
    try:
        for pod in kubectl.items("pods", "--all-namespaces", selector):
            one, name = kubectl.within(pod["metadata"]["namespace"]), pod["metadata"]["name"]
            said += [one("describe", "pod", name)[-3000:], one("logs", name, "--tail=20", "--ignore-errors")[-3000:]]
    except KubectlError as error:
        said.append(str(error))
    return "\n".join(said)


def _delete_resets(kubectl: Kubectl) -> None:
    if not kubectl("get", "crd", *CRDS, "--ignore-not-found", "-o", "name"):
        return
    try:
        kubectl.delete("gpunoderesets", "--all", timeout_s=_UNDOING_S)
    except KubectlError:
        for stuck in kubectl("get", "gpunoderesets", "-o", "name").split():
            kubectl("patch", stuck, "--type=merge", "--patch", '{"metadata":{"finalizers":null}}')
        raise


def _image(name: str) -> dict[str, str]:
    repository, _, tag = images.reference(name).rpartition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "Never"}
