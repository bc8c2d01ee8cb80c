"""A GPUNodeReset as the operator understands it: read from the API's JSON, checked again, frozen.

The API server has checked it by the CRD's schema; an older CRD, or an object of an older generation, may have let other things through.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cleanslate_operator import names


class Scope(StrEnum):
    """How far a reset goes."""

    ORPHANS = "Orphans"
    ALL = "All"


class Pods(StrEnum):
    """What happens to the pods that use GPUs before a node is reset with scope All."""

    KEEP = "Keep"
    EVICT = "Evict"
    DELETE = "Delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A compile cache by name; `path` None: where its own program would put it."""

    name: str
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytecode:
    """Cached bytecode below a path, by pattern."""

    path: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetSpec:
    """The `spec`. Times in seconds, memory in MiB; None: the node program's own default, or none."""

    node_name: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    scope: Scope = Scope.ORPHANS
    pods: Pods = Pods.KEEP
    devices: tuple[str, ...] = ()
    expected_gpus: int | None = None
    grace_s: int = 20
    protect: tuple[str, ...] = ()
    end_owners: tuple[str, ...] = ()
    shm_roots: tuple[str, ...] = ()
    shm_min_age_s: int = 10
    shm_any_name: bool = False
    compile_caches: tuple[Cache, ...] = ()
    bytecode: tuple[Bytecode, ...] = ()
    allow_roots: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    log_min_age_s: int = 10
    max_used_mib: int | None = None
    stable_reads: int = 3
    verify_timeout_s: int = 120
    max_concurrent: int = 10
    stop_after_failures: int | None = None
    dry_run: bool = False
    suspend: bool = False
    timeout_s: int = 1800
    ttl_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """One GPUNodeReset: who it is, what it asks for, and where it stands in its life."""

    name: str
    uid: str
    generation: int
    spec: ResetSpec
    created_s: float = 0.0  # Unix time
    deleting: bool = False
    has_finalizer: bool = False
    ended: str | None = None  # the annotation names.ENDED
