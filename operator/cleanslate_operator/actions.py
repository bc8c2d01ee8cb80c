"""What a decision may ask for: one class a kind of write, and nothing that writes. `execute.py` carries them out in order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cleanslate_operator.noderesult import NodeResult
from cleanslate_operator.views import GpuPod, Lock, NodeView, Started


@dataclass(frozen=True, slots=True, kw_only=True)
class AddFinalizer:
    """From here on there may be something to undo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRecord:
    """Freeze the list of nodes and the time."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordResults:
    """Write down that nodes are done, before anything else that follows from it."""

    results: tuple[NodeResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeLock:
    """Make the node's Lease; that somebody else was faster is no error."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLock:
    """Delete the node's Lease, if it is this reset's."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakLock:
    """Delete a node's Lease that nobody will ever release."""

    lock: Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTaint:
    """Put the reset's taint on a node, on the version that was seen."""

    node: NodeView


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveTaint:
    """Take the reset's own taint off a node, on the version that was seen."""

    node: NodeView


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictPod:
    """Ask for a pod's eviction; a disruption budget may refuse it, which is no error but noted."""

    node: str
    pod: GpuPod


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete a pod, with its own grace period."""

    node: str
    pod: GpuPod


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePlans:
    """Make these ConfigMaps, which hold plans."""

    config_maps: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDaemonSet:
    """Make the DaemonSet cover these nodes, on the version that was seen, or make it if there is none.

    `kept`: plans that are in it no more and are needed yet, each with the nodes that need it.
    """

    nodes: Mapping[str, Started]
    kept: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePlans:
    """Delete ConfigMaps of plans that no node needs any more."""

    plans: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteDaemonSet:
    """Delete the DaemonSet; its pods follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteConfigMaps:
    """Delete all ConfigMaps of the reset that have this role, or all of them (None)."""

    role: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStatus:
    """Write the status."""

    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkEnded:
    """Note on the GPUNodeReset that it is over, so that nothing ever acts on it again."""

    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFinalizer:
    """There is nothing left to undo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteReset:
    """Its time to live is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """An Event on the GPUNodeReset."""

    reason: str
    message: str
    warning: bool = False


Action = (
    AddFinalizer
    | BeginRecord
    | RecordResults
    | TakeLock
    | ReleaseLock
    | BreakLock
    | SetTaint
    | RemoveTaint
    | EvictPod
    | DeletePod
    | CreatePlans
    | SetDaemonSet
    | DeletePlans
    | DeleteDaemonSet
    | DeleteConfigMaps
    | SetStatus
    | MarkEnded
    | RemoveFinalizer
    | DeleteReset
    | Announce
)
