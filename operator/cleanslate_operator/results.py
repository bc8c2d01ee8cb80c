"""A reset pod, read: what became of its node, or how far it is. Pure, and raises nothing whatever a node wrote.

The reset is the pod's init container, and its termination message the node program's summary. A node can lie about itself, and
about nothing else: a pod speaks for the node that it is bound to, and a summary that names another one is refused.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cleanslate.formats import SUMMARY_LIMIT_BYTES, SUMMARY_SCHEMA
from cleanslate_operator import noderesult
from cleanslate_operator.noderesult import Fields, Gpu, GpuResult, NodeResult, NodeVerdict
from cleanslate_operator.times import unix_s

__all__ = ["RESET_CONTAINER", "NodeResult", "NodeVerdict", "Progress", "Stage", "node_of", "read"]

RESET_CONTAINER = "reset"
_LIST_LIMIT = 64  # more conditions, owners or containers than a reset pod can have
_TEXT_LIMIT = 300  # of what a kubelet says
_LOST = "ContainerStatusUnknown"  # the kubelet found no trace of it: the node booted again, or its runtime was wiped
_USAGE, _SIGKILL, _SIGTERM = 2, 137, 143
_CODE_LIMIT = 1 << 31
_STEADY = frozenset({GpuResult.CLEAN, GpuResult.BUSY})


class Stage(StrEnum):
    """How far a reset is that is not over."""

    PENDING = "Pending"  # the kubelet has said nothing of it yet
    NOT_SCHEDULED = "NotScheduled"
    IMAGE_PULL = "ImagePull"
    NOT_STARTED = "NotStarted"  # the kubelet can't make the container
    STARTING = "Starting"
    RUNNING = "Running"
    LEAVING = "Leaving"  # the pod is being deleted, and has told nothing
    REPLACED = "Replaced"  # the kubelet gave the pod up; the DaemonSet makes another


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A reset that is not over. `started`: its container has run, so the node may have been touched."""

    reason: Stage
    message: str
    started: bool = False


class _SummaryError(ValueError):
    """A summary that can't be used; the text says why."""


def read(pod: Mapping[str, Any], node: str, daemonset_uid: str) -> NodeResult | Progress | None:
    """The result of the reset in a pod, or its progress. None: the pod is not this DaemonSet's, or not this node's.

    A container that was run again counts by how it ended the first time, unless it was stopped or lost then.
    """
    if not _is_controlled_by(pod, daemonset_uid) or node_of(pod) != node:
        return None
    container = _container(_items(pod, "status", "initContainerStatuses"))
    for end in _ends(container):
        if (result := _result(pod, node, end)) is not None:
            return result
    return _progress(pod, container)


def node_of(pod: Mapping[str, Any]) -> str | None:
    """The node that a DaemonSet's pod is for: where it is bound, or else where its affinity pins it."""
    if isinstance(bound := _map(pod, "spec").get("nodeName"), str) and bound:
        return bound
    required = _map(pod, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    terms = _items(required, "nodeSelectorTerms")
    values = [field.get("values") for term in terms for field in _items(term, "matchFields")]
    named = values[0] if len(values) == 1 and isinstance(values[0], list) else []
    return named[0] if len(named) == 1 and isinstance(named[0], str) else None


def _is_controlled_by(pod: Mapping[str, Any], uid: str) -> bool:
    owners = _items(pod, "metadata", "ownerReferences")
    return any(one.get("controller") is True and one.get("uid") == uid for one in owners)


def _ends(container: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """How the container ended this time, and the time before."""
    return (end for when in ("state", "lastState") if (end := _map(container, when, "terminated")))


def _result(pod: Mapping[str, Any], node: str, end: Mapping[str, Any]) -> NodeResult | None:
    """What an ended container tells of its node; None if another run has to tell."""
    problem = None
    try:
        return _of_summary(end, node)
    except _SummaryError as error:
        problem = str(error)
    failure = _failure(pod, end, problem)
    if failure is None:
        return None
    reason, message = failure
    return NodeResult(
        node=node,
        result=NodeVerdict.FAILED,
        reason=reason,
        message=noderesult.printable(f"{_label(pod)}: {message}", noderesult.MESSAGE_LIMIT),
        finished_at=_finished_at(end),
    )


def _failure(pod: Mapping[str, Any], end: Mapping[str, Any], problem: str) -> tuple[str, str] | None:
    """Reason and message for a container that ended without a summary."""
    code, reason = end.get("exitCode"), end.get("reason")
    if code == 0:
        return "BadResult", f"cannot read its result: {problem}; look at its log, and check node and image"
    if reason == "OOMKilled":
        what = f"it needed more memory than its limit of {_memory_limit(pod)}"
        return "OutOfMemory", f"cannot finish the reset: {what}; raise the memory limit of reset pods"
    if reason == _LOST or code == _SIGTERM or _is_leaving(pod) or not isinstance(code, int) or abs(code) > _CODE_LIMIT:
        return None
    said = f", {text}" if (text := _text(end, "message")) else ""
    if code == _USAGE:
        return "BadArguments", f"cannot start the reset: its image knows other arguments{said}; use operator's version"
    killed = " by SIGKILL" if code == _SIGKILL else ""
    return (
        "Crashed",
        f"cannot finish the reset: it ended{killed} with code {code}{said}; look at its log, then reset again",
    )


def _of_summary(end: Mapping[str, Any], node: str) -> NodeResult:
    """The result in a termination message. Raises _SummaryError."""
    fields = _parse(end.get("message"))
    try:
        _check_sender(fields, node)
        details = noderesult.details(fields)
        verdict, reason = _verdict(fields, details["gpus"])
        return NodeResult(
            node=node,
            result=verdict,
            reason=reason,
            message=fields.text("message", noderesult.MESSAGE_LIMIT),
            finished_at=_finished_at(end),
            duration_s=fields.seconds("durationSeconds"),
            **details,
        )
    except _SummaryError:
        raise
    except ValueError as error:
        raise _SummaryError(str(error)) from error


def _parse(message: object) -> Fields:
    if not isinstance(message, str) or not message:
        raise _SummaryError("it left none")
    if len(message) > SUMMARY_LIMIT_BYTES or len(message.encode(errors="replace")) > SUMMARY_LIMIT_BYTES:
        raise _SummaryError(f"it is longer than {SUMMARY_LIMIT_BYTES} bytes")
    try:
        return Fields.of(json.loads(message), "the summary")
    except (ValueError, RecursionError) as error:
        raise _SummaryError("it is not a JSON object") from error


def _check_sender(fields: Fields, node: str) -> None:
    """Raise _SummaryError unless it is the summary of a reset of this node."""
    if (schema := fields.text("schema", 64)) != SUMMARY_SCHEMA:
        raise _SummaryError(f"its schema is {schema}, not {SUMMARY_SCHEMA}")
    if (verb := fields.text("verb", 32)) != "reset":
        raise _SummaryError(f"it is of {verb}, not of a reset")
    if (host := fields.text("host", 253)) != node:
        raise _SummaryError(f"it is about node {host}, not about {node}")


def _verdict(fields: Fields, gpus: tuple[Gpu, ...]) -> tuple[NodeVerdict, str]:
    said = (fields.text("result", 32), fields.whole("exitCode", 0, 255))
    if said == ("Clean", 0):
        results = {gpu.result for gpu in gpus}
        if not results or results - _STEADY:
            raise _SummaryError("it says Clean, and its GPUs say something else")
        verdict = NodeVerdict.BUSY if GpuResult.BUSY in results else NodeVerdict.CLEAN
        return verdict, str(verdict)
    if said == ("NotClean", 3):
        return NodeVerdict.NOT_CLEAN, "NotClean"
    if said in {("CannotTell", 4), ("Refused", 5)}:
        return NodeVerdict.FAILED, said[0]
    raise _SummaryError(f"its result {said[0]} does not go with exit code {said[1]}")


def _progress(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Progress:
    stage, message = _stage(pod, container)
    started = bool(_map(container, "state", "running")) or any(True for _ in _ends(container))
    text = noderesult.printable(f"{_label(pod)}: {message}", noderesult.MESSAGE_LIMIT)
    return Progress(reason=stage, message=text, started=started)


def _stage(pod: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[Stage, str]:
    status = _map(pod, "status")
    if _is_leaving(pod):
        return Stage.LEAVING, "is being deleted and has told no result; its DaemonSet makes another"
    if status.get("phase") == "Failed":
        why = _text(status, "message") or "no reason given"
        return Stage.REPLACED, f"cannot go on: {_text(status, 'reason')}: {why}; its DaemonSet makes another"
    if _map(container, "state", "running"):
        return Stage.RUNNING, "resets the node"
    if waiting := _map(container, "state", "waiting"):
        return _waiting(waiting)
    if any(True for _ in _ends(container)):
        return Stage.STARTING, "was stopped before it told a result; the kubelet starts it again"
    return _not_taken(pod)


_CAUSES = {
    "ErrImagePull": (Stage.IMAGE_PULL, "get its image", "check the image's name and pull secrets"),
    "ImagePullBackOff": (Stage.IMAGE_PULL, "get its image", "check the image's name and pull secrets"),
    "ErrImageNeverPull": (Stage.IMAGE_PULL, "get its image", "load it onto the node, or let imagePullPolicy pull it"),
    "InvalidImageName": (Stage.IMAGE_PULL, "get its image", "correct the image's name in the operator's settings"),
    "ImageInspectError": (Stage.IMAGE_PULL, "get its image", "look at the node's container runtime"),
    "RegistryUnavailable": (Stage.IMAGE_PULL, "get its image", "look at the registry"),
    "CreateContainerConfigError": (Stage.NOT_STARTED, "start", "look at its events with kubectl describe pod"),
    "CreateContainerError": (Stage.NOT_STARTED, "start", "look at the node's container runtime"),
    "RunContainerError": (Stage.NOT_STARTED, "start", "look at the node's container runtime"),
}


def _waiting(waiting: Mapping[str, Any]) -> tuple[Stage, str]:
    reason = _text(waiting, "reason")
    if reason not in _CAUSES:
        return Stage.STARTING, f"is being started ({reason or 'no reason given'})"
    stage, verb, step = _CAUSES[reason]
    return stage, f"cannot {verb}: {reason}: {_text(waiting, 'message') or 'no message'}; {step}"


def _not_taken(pod: Mapping[str, Any]) -> tuple[Stage, str]:
    """Of a pod whose container no kubelet has told of."""
    conditions = [one for one in _items(pod, "status", "conditions") if one.get("type") == "PodScheduled"]
    refused = [one for one in conditions if one.get("status") == "False"]
    if refused:
        why = _text(refused[0], "message") or _text(refused[0], "reason") or "no reason given"
        return Stage.NOT_SCHEDULED, f"cannot be scheduled: {why}; see what it requests and what the node has left"
    return Stage.PENDING, "has not been taken up by its node's kubelet yet"


def _container(statuses: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next((one for one in statuses if one.get("name") == RESET_CONTAINER), {})


def _memory_limit(pod: Mapping[str, Any]) -> str:
    limits = _map(_container(_items(pod, "spec", "initContainers")), "resources", "limits")
    return _text(limits, "memory") or "its node"


def _finished_at(end: Mapping[str, Any]) -> str | None:
    found = end.get("finishedAt")
    if not isinstance(found, str) or not noderesult.TIME.fullmatch(found) or unix_s(found) is None:
        return None  # rather none than one that no status takes
    return found


def _is_leaving(pod: Mapping[str, Any]) -> bool:
    return _map(pod, "metadata").get("deletionTimestamp") is not None


def _label(pod: Mapping[str, Any]) -> str:
    metadata = _map(pod, "metadata")
    return f"pod {_text(metadata, 'namespace')}/{_text(metadata, 'name')}"


def _text(values: Mapping[str, Any], key: str) -> str:
    found = values.get(key)
    return noderesult.printable(found, _TEXT_LIMIT).strip() if isinstance(found, str) else ""


def _map(value: object, *keys: str) -> Mapping[str, Any]:
    """The object below these keys; an empty one where something else is on the way."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _items(value: object, *keys: str) -> list[Mapping[str, Any]]:
    """The objects in the list below these keys, as many as there can be."""
    found = _map(value, *keys[:-1]).get(keys[-1])
    return [item for item in found[:_LIST_LIMIT] if isinstance(item, Mapping)] if isinstance(found, list) else []
