"""A GPUNodeReset as the operator understands it: read from the API's JSON, checked again, frozen.

The API server has checked it by the CRD's schema; an older CRD, or an object of an older generation, may have let other things
through.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from cleanslate_operator import names

_T = TypeVar("_T")


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
    deleting: bool = False
    version: str = ""  # resourceVersion
    has_finalizer: bool = False
    other_finalizers: tuple[str, ...] = ()
    ended: str | None = None  # the annotation names.ENDED

    @property
    def taints(self) -> bool:
        """Whether its nodes are tainted while it runs."""
        return self.spec.scope is Scope.ALL and not self.spec.dry_run


class SpecError(ValueError):
    """A spec that cannot be acted on; the text names the field and what to write instead."""


def read(document: Mapping[str, Any]) -> Reset:
    """The GPUNodeReset in a JSON object of the API. Raises SpecError; `identify` works on such an object all the same."""
    if len(document["metadata"]["name"]) > _NAME_LIMIT:
        raise SpecError(f"metadata.name: longer than {_NAME_LIMIT} characters, which labels can't carry")
    return replace(identify(document), spec=_Fields(_mapping(document.get("spec"), "spec"), "spec").spec())


def identify(document: Mapping[str, Any]) -> Reset:
    """The same with an empty spec: enough to say of a reset that it can't be understood, and to undo it."""
    metadata = document["metadata"]
    annotations, finalizers = metadata.get("annotations") or {}, metadata.get("finalizers") or ()
    return Reset(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        spec=ResetSpec(),
        deleting="deletionTimestamp" in metadata,
        version=metadata["resourceVersion"],
        has_finalizer=names.FINALIZER in finalizers,
        other_finalizers=tuple(one for one in finalizers if one != names.FINALIZER),
        ended=annotations.get(names.ENDED),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """One object of the spec, its keys taken one by one with their type and bounds checked."""

    values: Mapping[str, Any]
    path: str

    def spec(self) -> ResetSpec:
        part = {name: _Fields(_mapping(self.values.get(name, {}), f"spec.{name}"), f"spec.{name}") for name in _PARTS}
        found = ResetSpec(
            node_name=self.optional("nodeName", self.text),
            node_selector=_selector(self.values.get("nodeSelector", {})),
            scope=Scope(self.choice("scope", Scope, Scope.ORPHANS)),
            pods=Pods(self.choice("pods", Pods, Pods.KEEP)),
            devices=part["gpus"].texts("devices", 64),
            expected_gpus=part["gpus"].optional("expected", lambda name: part["gpus"].number(name, 1, 1000, 1)),
            grace_s=part["processes"].number("gracePeriodSeconds", 0, 600, 20),
            protect=part["processes"].texts("protect", 64),
            end_owners=part["processes"].texts("endOwners", 64),
            shm_roots=part["sharedMemory"].texts("roots", 32),
            shm_min_age_s=part["sharedMemory"].number("minAgeSeconds", 0, 86400, 10),
            shm_any_name=part["sharedMemory"].switch("anyName"),
            compile_caches=tuple(
                Cache(name=one.text("name"), path=one.optional("path", one.text))
                for one in part["caches"].each("compile", 32)
            ),
            bytecode=tuple(
                Bytecode(path=one.text("path"), pattern=one.text("pattern"))
                for one in part["caches"].each("bytecode", 32)
            ),
            allow_roots=part["caches"].texts("allowRoots", 32),
            logs=part["logs"].texts("patterns", 32),
            log_min_age_s=part["logs"].number("minAgeSeconds", 0, 86400, 10),
            max_used_mib=part["verify"].optional("maxUsedMiB", lambda name: part["verify"].number(name, 0, 1 << 20, 0)),
            stable_reads=part["verify"].number("stableReads", 1, 100, 3),
            verify_timeout_s=part["verify"].number("timeoutSeconds", 10, 600, 120),
            max_concurrent=part["rollout"].number("maxConcurrent", 1, 500, 10),
            stop_after_failures=part["rollout"].optional(
                "stopAfterFailures", lambda name: part["rollout"].number(name, 1, 5000, 1)
            ),
            dry_run=self.switch("dryRun"),
            suspend=self.switch("suspend"),
            timeout_s=self.number("timeoutSeconds", 30, 86400, 1800),
            ttl_s=self.optional("ttlSecondsAfterFinished", lambda name: self.number(name, 0, 31536000, 0)),
        )
        _check(found)
        return found

    def optional(self, name: str, take: Callable[[str], _T]) -> _T | None:
        return None if self.values.get(name) is None else take(name)

    def text(self, name: str) -> str:
        return _text(self.values.get(name), f"{self.path}.{name}")

    def texts(self, name: str, limit: int) -> tuple[str, ...]:
        return tuple(_text(item, f"{self.path}.{name}") for item in self._list(name, limit))

    def each(self, name: str, limit: int) -> Iterator["_Fields"]:
        where = f"{self.path}.{name}"
        return (_Fields(_mapping(item, where), where) for item in self._list(name, limit))

    def number(self, name: str, low: int, high: int, default: int) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise SpecError(f"{self.path}.{name}: not a whole number from {low} to {high}")
        return int(value)

    def switch(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise SpecError(f"{self.path}.{name}: neither true nor false")
        return value

    def choice(self, name: str, choices: type[StrEnum], default: str) -> str:
        value = self.values.get(name, default)
        if value not in list(choices):
            raise SpecError(f"{self.path}.{name}: not one of {', '.join(choices)}")
        return str(value)

    def _list(self, name: str, limit: int) -> list[Any]:
        value = self.values.get(name, [])
        if not isinstance(value, list) or len(value) > limit:
            raise SpecError(f"{self.path}.{name}: not a list of at most {limit}")
        return value


_PARTS = ("gpus", "processes", "sharedMemory", "caches", "logs", "verify", "rollout")
_TEXT_LIMIT = 1024
_NAME_LIMIT = 63
_LABEL = re.compile(r"(?:[a-z0-9.-]{1,253}/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def _check(spec: ResetSpec) -> None:
    if bool(spec.node_name) == bool(spec.node_selector):
        raise SpecError("spec: name exactly one of nodeName and nodeSelector")
    if spec.scope is not Scope.ALL and (spec.pods is not Pods.KEEP or spec.end_owners):
        raise SpecError("spec: pods and processes.endOwners go with scope All only")


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise SpecError(f"{path}: not an object")
    return value


def _selector(value: Any) -> dict[str, str]:
    labels = _mapping(value, "spec.nodeSelector")
    if len(labels) > 16 or not all(_is_label(key, item) for key, item in labels.items()):
        raise SpecError("spec.nodeSelector: not at most 16 labels with their values")
    return dict(labels)


def _is_label(key: str, value: Any) -> bool:
    return bool(_LABEL.fullmatch(key)) and isinstance(value, str) and bool(_LABEL_VALUE.fullmatch(value))


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _TEXT_LIMIT or not value.isprintable():
        raise SpecError(f"{path}: not a printable text of at most {_TEXT_LIMIT} characters")
    return value
