"""What the operator knows of the cluster at one moment: plain, frozen, and all that a decision may rest on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cleanslate_operator import names
from cleanslate_operator.noderesult import NodeResult
from cleanslate_operator.record import Record
from cleanslate_operator.reset import Reset
from cleanslate_operator.results import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPod:
    """A pod that asks for GPUs and that a reset with scope All has to send away first.

    `leaving_until_s`: Unix time at which it should be gone, once it was told to go.
    """

    namespace: str
    name: str
    uid: str
    leaving_until_s: float | None = None

    def __str__(self) -> str:
        return f"pod {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node that is about to be reset, or that has been.

    `ready`: the condition's status, `Unknown` if its kubelet is silent, and `ready_since_s` when it became that. `taints` as the
    API has them. `seen_s` is when `pods` were listed, `heard_s` when its kubelet last renewed its lease, by the node's own clock.
    """

    name: str
    ready: str = "True"
    ready_since_s: float = 0.0
    version: str = ""
    taints: tuple[Mapping[str, Any], ...] = ()
    seen_s: float = 0.0
    heard_s: float | None = None
    gpu_pods: tuple[GpuPod, ...] = ()
    pods: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The Lease that is a node's lock: who holds it, and since when (as the API has it).

    `void`: its holder is over or gone, so that nobody will ever release it.
    """

    node: str
    holder_uid: str
    holder_name: str
    since: str
    uid: str = ""
    void: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A node that the DaemonSet covers: its plan's ConfigMap, and when that was made (Unix time)."""

    plan: str
    planned_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSetView:
    """The reset's DaemonSet: the nodes it covers, and the plans of others that pods of theirs may still be waiting to mount."""

    uid: str
    version: str
    nodes: Mapping[str, Started] = field(default_factory=dict)
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """The reset's pod on a node: the result, or how far it is.

    `over`: the reset in it has ended, so it can't touch the node any more. `leaving_since_s`: when it was to be gone (Unix time).
    """

    name: str
    reading: NodeResult | Progress
    over: bool = False
    leaving_since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a reset can't begin."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is known when the next step is decided.

    `targets`: the nodes that the spec names, where they were looked up. `nodes`: those looked at, None where there is no such
    node. `blocked`: what the API server said when it last refused an eviction, by node. `asked`: when pods were last told to
    leave (Unix time), by UID. `checked`: when nodes were last
    looked at without their pods. `uncovered`: the nodes that the DaemonSet covered when the pods
    were listed, and does not any more. `swept`: all that have the taint are among `nodes`. `strays`: there are ConfigMaps of the
    reset, where that was asked.
    """

    now_s: float
    reset: Reset
    status: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    record: Record | None = None
    targets: tuple[str, ...] | Refusal | None = None
    daemon_set: DaemonSetView | None = None
    pods: Mapping[str, PodView] = field(default_factory=dict)
    locks: Mapping[str, Lock] = field(default_factory=dict)
    nodes: Mapping[str, NodeView | None] = field(default_factory=dict)
    blocked: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, float] = field(default_factory=dict)
    checked: Mapping[str, float] = field(default_factory=dict)
    uncovered: frozenset[str] = frozenset()
    swept: bool = False
    strays: bool = False

    @property
    def mine(self) -> tuple[str, ...]:
        """The nodes whose lock this reset holds."""
        return tuple(node for node, lock in self.locks.items() if lock.holder_uid == self.reset.uid)

    @property
    def in_hand(self) -> tuple[str, ...]:
        """The nodes that are being reset: locked, and not done."""
        pending = set(self.record.pending) if self.record else set()
        return tuple(node for node in self.mine if node in pending)

    @property
    def covered(self) -> Mapping[str, Started]:
        """The nodes that the DaemonSet covers."""
        return self.daemon_set.nodes if self.daemon_set else {}

    def reading(self, node: str) -> NodeResult | Progress | None:
        """What the reset pod on a node tells; None if there is none."""
        pod = self.pods.get(node)
        return pod.reading if pod else None

    def is_tainted(self, view: NodeView) -> bool:
        """Whether a node has this reset's taint."""
        return names.taint(self.reset.uid) in [(taint.get("key"), taint.get("value")) for taint in view.taints]
