"""The formats other programs write and read: the plan, and the bounded summary of a report. Standard library only.

The operator imports this module and nothing else of the node program. Every input is taken for hostile: bounded in size,
checked key by key, refused as a whole if any part is wrong.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

PLAN_SCHEMA = "cleanslate.dev/plan/v1"
SUMMARY_SCHEMA = "cleanslate.dev/report/v1"  # a summary is a report, cut
SUMMARY_LIMIT_BYTES = 4096  # what the kubelet keeps of a termination message

PLAN_LIMIT_BYTES = 1 << 20  # what a ConfigMap holds
PLAN_MAX_AGE_S = 900.0  # an older picture of the cluster says too little about who lives
PLAN_MAX_AHEAD_S = 600.0  # clocks of nodes and control planes differ, by minutes at worst
PLAN_MAX_MARGIN_S = 3600.0
PLAN_MAX_PODS = 10_000

_POD_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
_CONTAINER_ID = re.compile(r"(?:[a-z0-9.+-]{1,32}://)?([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The cluster's view of one node at one moment.

    `snapshot_time_s`: Unix time at which it was true. `live_pods`: pod UIDs (a static pod's is its config hash) with the IDs of
    their running containers. `condemned_pods` are to end although they live. Processes that started later than
    `snapshot_time_s - margin_s` are nobody's leftovers.
    """

    snapshot_time_s: float
    live_pods: Mapping[str, frozenset[str]]
    condemned_pods: frozenset[str]
    margin_s: float


class PlanError(ValueError):
    """A plan that must not be acted on. The text says why, without the plan's own content."""


def parse_plan(data: bytes, *, now_s: float) -> Plan:
    """The plan in `data`, JSON as docs/report.md shows it. Raises PlanError if it is malformed, stale or of another schema."""
    if len(data) > PLAN_LIMIT_BYTES:
        raise PlanError(f"larger than {PLAN_LIMIT_BYTES} bytes")
    try:
        document = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError("not valid JSON") from error
    if not isinstance(document, dict) or document.get("schema") != PLAN_SCHEMA:
        raise PlanError(f"its schema is not {PLAN_SCHEMA}")
    keys = {"schema", "snapshotTime", "livePods", "condemnedPods", "marginSeconds"}
    if document.keys() != keys:
        raise PlanError(f"its keys are not {', '.join(sorted(keys))}")
    plan = Plan(
        snapshot_time_s=_time(document["snapshotTime"]),
        live_pods=_live_pods(document["livePods"]),
        condemned_pods=frozenset(_pod_uid(uid) for uid in _list(document["condemnedPods"], "condemnedPods")),
        margin_s=_margin(document["marginSeconds"]),
    )
    _check_age(now_s - plan.snapshot_time_s)
    return plan


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _time(value: Any) -> float:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise PlanError("snapshotTime is not a time such as 2026-01-31T12:00:00Z") from error
    if moment.tzinfo is None:
        raise PlanError("snapshotTime has no time zone")
    return moment.timestamp()


def _margin(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= PLAN_MAX_MARGIN_S:
        raise PlanError(f"marginSeconds is not a number from 0 to {PLAN_MAX_MARGIN_S:g}")
    return float(value)


def _live_pods(value: Any) -> dict[str, frozenset[str]]:
    if not isinstance(value, dict) or len(value) > PLAN_MAX_PODS:
        raise PlanError(f"livePods is not an object of at most {PLAN_MAX_PODS} pods")
    return {
        _pod_uid(uid): frozenset(_container_id(item) for item in _list(containers, "a pod's containers"))
        for uid, containers in value.items()
    }


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > PLAN_MAX_PODS:
        raise PlanError(f"{what}: not a list of at most {PLAN_MAX_PODS}")
    return value


def _pod_uid(value: Any) -> str:
    if not isinstance(value, str) or not _POD_UID.fullmatch(value):
        raise PlanError("a pod's UID is not one")
    return value


def _container_id(value: Any) -> str:
    found = _CONTAINER_ID.fullmatch(value) if isinstance(value, str) else None
    if not found:
        raise PlanError("a container's ID is not 64 hexadecimal digits")
    return found[1]


def _check_age(age_s: float) -> None:
    if age_s > PLAN_MAX_AGE_S:
        raise PlanError(f"made {age_s:.0f} s ago, more than {PLAN_MAX_AGE_S:.0f} s")
    if age_s < -PLAN_MAX_AHEAD_S:
        raise PlanError(f"made {-age_s:.0f} s in the future, more than {PLAN_MAX_AHEAD_S:.0f} s")


def is_pod_uid(text: str) -> bool:
    """Whether a plan may name a pod by it: an API object's UID, or a static pod's config hash."""
    return _POD_UID.fullmatch(text) is not None


def is_container_id(text: str) -> bool:
    """Whether a plan may name a container by it: 64 hexadecimal digits, with or without `containerd://` or the like."""
    return _CONTAINER_ID.fullmatch(text) is not None


def summarize(report: Mapping[str, Any]) -> bytes:
    """A report as JSON of at most SUMMARY_LIMIT_BYTES bytes, for a termination message.

    What is not clean comes first; what does not fit is left out, and `omitted` says how much of it there was.
    """
    gpus = sorted(report["gpus"], key=lambda gpu: (gpu["result"] == "Clean", gpu["index"]))
    processes = sorted(report["processes"], key=lambda process: process["outcome"] in {"Kept", "Ended"})
    files = {part: _counts(report[part]) for part in ("sharedMemory", "caches", "logs")}
    head = {key: report[key] for key in _HEAD}
    head |= {"host": _cut(report["host"], 253), "message": _cut(report["message"], 600), **files}
    pools: dict[str, list[Any]] = {
        "gpus": [_gpu(gpu) for gpu in gpus],
        "processes": [_process(process) for process in processes],
        "warnings": [_cut(warning, 160) for warning in report["warnings"]],
    }
    return _fit(head, pools)


_HEAD = ("schema", "verb", "scope", "dryRun", "startedAt", "durationSeconds", "result", "exitCode", "gpuBytesFreed")


def _fit(head: dict[str, Any], pools: Mapping[str, list[Any]]) -> bytes:
    """Take from the pools in turn for as long as the whole stays within the limit."""
    taken: dict[str, list[Any]] = {name: [] for name in pools}
    size = len(_dump({**head, **taken, "omitted": dict.fromkeys(pools, 10**9)}))
    for row in range(max(map(len, pools.values()), default=0)):
        for name, pool in pools.items():
            if row >= len(pool) or len(taken[name]) < row:
                continue
            cost = len(_dump(pool[row])) + 1
            if size + cost <= SUMMARY_LIMIT_BYTES:
                taken[name].append(pool[row])
                size += cost
    omitted = {name: left for name, pool in pools.items() if (left := len(pool) - len(taken[name]))}
    return _dump({**head, **taken, "omitted": omitted})


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _cut(text: str, limit: int) -> str:
    # Escaped as JSON a character can take six bytes (twelve beyond the BMP): cut by bytes, not by characters.
    while len(_dump(text)) > limit + 2:
        text = text[: max(0, len(text) - max(1, (len(_dump(text)) - limit) // 12))]
    return text


def _counts(part: Mapping[str, Any]) -> dict[str, int]:
    return {key: part[key] for key in ("removedCount", "keptCount", "bytesFreed")}


def _gpu(gpu: Mapping[str, Any]) -> dict[str, Any]:
    short = {key: gpu[key] for key in ("index", "uuid", "result", "usedBytes")}
    return {**short, "message": _cut(gpu["message"], 160)}


def _process(process: Mapping[str, Any]) -> dict[str, Any]:
    owner = process["owner"]
    return {
        "pid": process["pid"],
        "title": _cut(process["title"], 40),
        "owner": _cut(f"{owner['kind']} {owner['name']}".strip(), 60),
        "verdict": process["verdict"],
        "outcome": process["outcome"],
        "reason": _cut(process["reason"], 100),
    }
