"""The status of a simulated pod as a kubelet writes it: the body of one strategic merge patch.

Fields, reasons and messages are those of Kubernetes 1.37: pkg/kubelet/status/generate.go and kubelet_pods.go.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from cluster.fakenodes.containers import Container
from cluster.fakenodes.plays import Play
from cluster.fakenodes.timestamps import rfc3339

Condition = tuple[bool, str, str]  # status, reason, message


def patch(play: Play, *, host_ip: str, pod_ip: str) -> dict[str, Any]:
    """What the node has to say of the pod now. The UID makes the API refuse it (409) for another pod of the same name."""
    pod = play.pod
    phase = play.phase
    status: dict[str, Any] = {
        "observedGeneration": pod.generation,
        "phase": phase,
        "conditions": _conditions(play, phase),
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "startTime": rfc3339(play.started_s),
        "containerStatuses": [_container(one) for one in play.main],
    }
    if play.init:
        status["initContainerStatuses"] = [_container(one) for one in play.init]
    if play.has_sandbox or pod.host_network:
        address = host_ip if pod.host_network else pod_ip
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    return {"metadata": {"uid": pod.uid}, "status": status}


def _conditions(play: Play, phase: str) -> list[dict[str, Any]]:
    has_sandbox = play.has_sandbox and phase not in {"Succeeded", "Failed"}
    ready = _containers_ready(play, phase)
    return [
        _condition(play, "PodReadyToStartContainers", (has_sandbox, "", "")),
        _condition(play, "Initialized", _initialized(play, phase)),
        _condition(play, "Ready", ready),
        _condition(play, "ContainersReady", ready),
        # the scheduler's, with the scheduler's transition time
        {"type": "PodScheduled", "status": "True", "observedGeneration": play.pod.generation},
    ]


def _condition(play: Play, kind: str, condition: Condition) -> dict[str, Any]:
    """One condition; null removes a reason that the API still has from before."""
    holds, reason, message = condition
    before, since_s = play.transitions.get(kind, (None, 0.0))
    if before is not holds:
        since_s = play.clock()
        play.transitions[kind] = (holds, since_s)
    return {
        "type": kind,
        "status": "True" if holds else "False",
        "observedGeneration": play.pod.generation,
        "lastProbeTime": None,
        "lastTransitionTime": rfc3339(since_s),
        "reason": reason or None,
        "message": message or None,
    }


def _initialized(play: Play, phase: str) -> Condition:
    if phase == "Succeeded":
        return True, "PodCompleted", ""
    if any(one.ever_started for one in play.main):
        return True, "", ""
    incomplete = _names(play.init, lambda one: not (one.running if one.spec.sidecar else one.succeeded))
    if incomplete:
        return False, "ContainersNotInitialized", f"containers with incomplete status: {incomplete}"
    return True, "", ""


def _containers_ready(play: Play, phase: str) -> Condition:
    if phase in {"Succeeded", "Failed"}:
        return False, "PodCompleted" if phase == "Succeeded" else "PodFailed", ""
    serving = tuple(one for one in play.init if one.spec.sidecar) + play.main
    unready = _names(serving, lambda one: not one.ready)
    if unready:
        return False, "ContainersNotReady", f"containers with unready status: {unready}"
    return True, "", ""


def _names(containers: tuple[Container, ...], meant: Callable[[Container], bool]) -> str:
    """Names as Go prints a slice, empty if there are none."""
    names = [one.spec.name for one in containers if meant(one)]
    return f"[{' '.join(names)}]" if names else ""


def _container(one: Container) -> dict[str, Any]:
    has_run = one.ever_started
    return {
        "name": one.spec.name,
        "image": one.spec.image,
        "imageID": "sha256:" + hashlib.sha256(one.spec.image.encode()).hexdigest() if has_run else "",
        "ready": one.ready,
        "restartCount": one.restarts,
        "started": one.running,
        "state": one.state,
        "lastState": one.last,
        **({"containerID": one.identifier} if has_run else {}),
    }
