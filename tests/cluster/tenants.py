"""A test's corner of a cluster: a namespace and node labels of its own, taken away at its end, and the pods it makes there."""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.kubectl import Kubectl, KubectlError, Object

GPU = "nvidia.com/gpu"
LABEL = "test.cleanslate.dev"
GONE_DEADLINE_S = 60.0
_HOPELESS = {"ErrImageNeverPull", "CreateContainerConfigError", "InvalidImageName"}


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """The corner. `images`: from a name of images.NAMES to the reference that a pod uses."""

    name: str
    kubectl: Kubectl
    images: Callable[[str], str]

    def label(self, node: str) -> dict[str, str]:
        """Labels a node for this test alone; returns the node selector that finds it. Raises KubectlError."""
        self.kubectl("label", "node", node, f"{self._label}=yes")
        return {self._label: "yes"}

    def run(self, pod: Mapping[str, Any], *, phase: str = "Running", timeout_s: float = 60.0) -> Object:
        """Creates a pod and returns it once it is in that phase. Raises KubectlError with its status if it never is."""
        name = self.kubectl.create(pod)["metadata"]["name"]
        return self.await_phase(name, phase, timeout_s=timeout_s)

    def await_phase(self, pod: str, phase: str, *, timeout_s: float = 60.0) -> Object:
        """The pod, once it is in that phase. Raises KubectlError with its status if it never is, or can no more be."""
        found = self.kubectl.until("pod", pod, is_so=lambda one: _settled(one, phase), timeout_s=timeout_s)
        if found["status"]["phase"] != phase:
            raise KubectlError(f"pod {pod}: is not {phase}: {json.dumps(found['status'])[:3000]}")
        return found

    def logs(self, pod: str, container: str = "") -> str:
        """What a container has printed."""
        return self.kubectl("logs", pod, *(("-c", container) if container else ()))

    def first_line(self, pod: str, *, timeout_s: float = 30.0) -> str:
        """The first line that a pod prints, as soon as it does. Raises KubectlError if none comes in time."""
        return self.kubectl.first_line("logs", pod, "--follow", timeout_s=timeout_s)

    @property
    def _label(self) -> str:
        return f"{LABEL}/{self.name}"

    def _leave(self) -> None:
        """Takes away whatever the test made here; pods end at once, and have ended when this returns."""
        self.kubectl("label", "nodes", "--all", f"{self._label}-")
        self.kubectl.delete("pods", "--all", "--grace-period=1", timeout_s=GONE_DEADLINE_S)
        # Empty by now; its controller takes 5 s from here (NamespaceDeletionGracePeriod), which no test need wait for.
        self.kubectl.delete("namespace", self.name, "--wait=false")


@contextmanager
def tenant(kubectl: Kubectl, images: Callable[[str], str], test: str) -> Iterator[Tenant]:
    """A tenant for the test of this name."""
    words = re.sub(r"[^a-z0-9]+", "-", test.lower()).strip("-")[:40].strip("-")
    name = f"{words}-{secrets.token_hex(3)}"
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    kubectl.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    one = Tenant(name=name, kubectl=kubectl.within(name), images=images)
    try:
        one.kubectl.wait("create", "serviceaccount/default")
        yield one
    finally:
        one._leave()


def _settled(one: Object, phase: str) -> bool:
    """Whether a pod is in this phase, or in one that it never leaves, or cannot be started at all."""
    status = one["status"]
    states = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    reasons = {state["state"].get("waiting", {}).get("reason") for state in states}
    return status["phase"] in {phase, "Succeeded", "Failed"} or bool(reasons & _HOPELESS)


def container(name: str, image: str, *arguments: str, gpus: int = 0, **fields: Any) -> Object:
    """A container; `gpus` is its limit."""
    limits = {"resources": {"limits": {GPU: str(gpus)}}} if gpus else {}
    own = {"name": name, "image": image, "imagePullPolicy": "Never", "args": list(arguments)}
    return own | limits | fields


def python(name: str, image: str, code: str, **fields: Any) -> Object:
    """A container that runs a line of Python; for the image "python"."""
    return container(name, image, command=["python3", "-c", code], **fields)


def pod(name: str, *containers: Object, init: Sequence[Object] = (), node: str = "", **fields: Any) -> Object:
    """A pod that is not restarted, ends at once when it is deleted, and goes to `node` if one is named.

    By node affinity, not by `nodeName`: so the scheduler sees it, as it does a DaemonSet's.
    """
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "dnsPolicy": "Default",  # the cluster has no DNS, and each pod that wants it brings a warning event
        "automountServiceAccountToken": False,
        "initContainers": list(init),
        "containers": list(containers),
    }
    if node:
        spec["affinity"] = on_node(node)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec | fields}


def on_node(name: str) -> Object:
    """The affinity to one node by its name, as the DaemonSet controller writes it."""
    field = {"key": "metadata.name", "operator": "In", "values": [name]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def as_reset_pod(manifest: Object) -> Object:
    """The pod as a reset pod is: privileged, hostPID, host network, the host's root at /host."""
    spec = manifest["spec"]
    spec |= {"hostPID": True, "hostNetwork": True, "tolerations": [{"operator": "Exists"}]}
    spec["volumes"] = [{"name": "host", "hostPath": {"path": "/"}}]
    for one in spec["containers"]:
        one |= {"securityContext": {"privileged": True}, "volumeMounts": [{"name": "host", "mountPath": "/host"}]}
    return manifest


def messages(one: Mapping[str, Any]) -> dict[str, Any]:
    """The termination message of each container that has ended, as JSON where it is."""
    status = one["status"]
    found = {}
    for state in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        text = state["state"].get("terminated", {}).get("message")
        if text is not None:
            found[state["name"]] = json.loads(text)
    return found
