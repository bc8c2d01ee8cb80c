"""The record of a running reset: which nodes it is about, when it began, and what became of each. Kept in ConfigMaps.

The status of a GPUNodeReset is bounded, and anybody who may write it can change it; so it is only ever written, never read
back. The record is the operator's own. A node is done when the record says so, and from then on it is never reset again. It is
kept in shards, since 5,000 nodes with their results are more than a ConfigMap holds; a shard is written whole, on the version
that was read.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cleanslate_operator import names
from cleanslate_operator.noderesult import NodeResult
from cleanslate_operator.reset import Reset

SCHEMA = "cleanslate.dev/record/v1"
NODES_A_SHARD = 100  # with 4,096 bytes of summary and a name of 253 characters each, well below 1 MiB
NODE_LIMIT = 5000
_SHARD_LIMIT = -(-NODE_LIMIT // NODES_A_SHARD)
_KEY = "record.json"


class RecordError(ValueError):
    """A record that is not as it was written; the text says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of a running reset.

    `uid` is the reset's. `results` holds None for a node that is not done. `versions` has a resourceVersion for each shard.
    """

    uid: str
    started_s: float
    results: Mapping[str, NodeResult | None]
    versions: tuple[str, ...] = ()

    @property
    def pending(self) -> tuple[str, ...]:
        """The nodes that are not done, in order."""
        return tuple(node for node, result in self.results.items() if result is None)

    @property
    def done(self) -> tuple[NodeResult, ...]:
        """The results so far."""
        return tuple(result for result in self.results.values() if result is not None)

    def with_results(self, results: Iterable[NodeResult]) -> "Record":
        """The same with more nodes done. The first result of a node is the one that counts."""
        new = {result.node: result for result in results if self.results.get(result.node, result) is None}
        return replace(self, results=dict(self.results) | new)

    def shard_of(self, node: str) -> int:
        """The number of the shard that a node is in."""
        return list(self.results).index(node) // NODES_A_SHARD

    def shards(self) -> int:
        """How many there are."""
        return -(-len(self.results) // NODES_A_SHARD)


def begin(reset: Reset, nodes: Sequence[str], *, now_s: float) -> Record:
    """The record of a reset that begins now."""
    return Record(uid=reset.uid, started_s=now_s, results=dict.fromkeys(sorted(nodes)))


def config_map(record: Record, reset: Reset, shard: int, namespace: str) -> dict[str, Any]:
    """One shard as it is stored; carries the version that it replaces, if there is one."""
    names_of = list(record.results)[shard * NODES_A_SHARD : (shard + 1) * NODES_A_SHARD]
    nodes = {node: result.to_json() if (result := record.results[node]) else None for node in names_of}
    place = {"startedAt": record.started_s, "shard": shard, "shards": record.shards()}
    document = {"schema": SCHEMA, **place, "nodes": nodes}
    metadata: dict[str, Any] = {
        "name": names.record(reset.name, reset.uid, shard),
        "namespace": namespace,
        "labels": names.labels(reset.name, reset.uid) | {names.ROLE: names.ROLE_RECORD},
        "ownerReferences": [names.owner(reset.name, reset.uid)],
    }
    if record.versions:
        metadata["resourceVersion"] = record.versions[shard]
    text = json.dumps(document, separators=(",", ":"))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {_KEY: text}}


def parse(config_maps: Iterable[Mapping[str, Any]], uid: str) -> Record | None:
    """The record of a reset in its ConfigMaps; None if it is not whole, as after a crash while it was made.

    Raises RecordError.
    """
    found = {document["shard"]: (document, version) for document, version in map(_document, config_maps)}
    if 0 not in found:
        return None
    first = found[0][0]
    shards = [found[number] for number in range(first["shards"]) if number in found]
    if [one["startedAt"] for one, _ in shards] != [first["startedAt"]] * first["shards"]:
        return None  # some are missing, or of a beginning before this one
    nodes = {name: result for one, _ in shards for name, result in one["nodes"].items()}
    return Record(
        uid=uid,
        started_s=first["startedAt"],
        results={name: None if result is None else _result(result) for name, result in nodes.items()},
        versions=tuple(version for _, version in shards),
    )


def _document(config_map: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The JSON of a shard, and the version that it was read in."""
    what = f"ConfigMap {config_map['metadata']['name']}"
    try:
        found = json.loads(config_map.get("data", {})[_KEY])
        sound = found["schema"] == SCHEMA and isinstance(found["nodes"], dict) and isinstance(found["startedAt"], float)
        sound = sound and isinstance(found["shard"], int) and found["shards"] in range(1, _SHARD_LIMIT + 1)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{what}: cannot read the record: {type(error).__name__}") from error
    if not sound:
        raise RecordError(f"{what}: cannot read the record: it is not a {SCHEMA}")
    return found, config_map["metadata"]["resourceVersion"]


def _result(value: Any) -> NodeResult:
    try:
        return NodeResult.from_json(value)
    except ValueError as error:
        raise RecordError(f"the record: cannot read a result: {error}") from error
