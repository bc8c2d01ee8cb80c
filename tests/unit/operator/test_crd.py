"""The CRD read as a document: everything in it is bounded and described, and the operator understands what it lets through."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cleanslate_operator import names, reset, status
from cleanslate_operator.noderesult import NodeResult, NodeVerdict
from cleanslate_operator.record import Record
from cleanslate_operator.views import Snapshot

REPOSITORY = Path(__file__).resolve().parents[3]
CRD = yaml.safe_load((REPOSITORY / "crds" / "gpunodereset.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def parts(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of a schema, with its path."""
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from parts(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from parts(schema[key], f"{path}[]")


PARTS = [*parts(SCHEMA["properties"]["spec"], "spec"), *parts(SCHEMA["properties"]["status"], "status")]


def test_it_is_what_the_operator_asks_for() -> None:
    spec = CRD["spec"]
    assert (spec["group"], VERSION["name"], spec["names"]["plural"]) == (names.GROUP, names.VERSION, names.PLURAL)
    assert (spec["scope"], spec["names"]["shortNames"], spec["names"]["categories"]) == ("Cluster", ["gnr"], ["gpu"])
    assert VERSION["subresources"] == {"status": {}}


def test_everything_is_bounded() -> None:
    unbounded = [path for path, part in PARTS if not is_bounded(part)]
    assert len(PARTS) > 100
    assert unbounded == []


def is_bounded(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind == "string":
        return "enum" in part or "maxLength" in part or part.get("format") == "date-time"
    if kind == "array":
        return "maxItems" in part
    if kind == "object":
        return "properties" in part or "maxProperties" in part
    return kind in {"integer", "number", "boolean"}


def test_every_field_is_described() -> None:
    assert [path for path, part in PARTS if not path.endswith("[]") and not part.get("description")] == []


def test_nothing_unknown_is_preserved() -> None:
    assert "preserve-unknown-fields" not in json.dumps(CRD)


def test_every_field_of_the_spec_but_suspend_has_its_rule_of_immutability() -> None:
    rules = [rule["message"] for rule in SCHEMA["properties"]["spec"]["x-kubernetes-validations"]]
    fields = set(SCHEMA["properties"]["spec"]["properties"]) - {"suspend"}
    assert {f"spec.{field} is immutable; make another GPUNodeReset" for field in fields} <= set(rules)


def test_defaults_are_the_operators_own() -> None:
    """An object that the API server filled in means what an empty one means to the operator."""
    filled = {"nodeName": "node-1", **defaults(SCHEMA["properties"]["spec"])}
    assert reset.read(document(filled)).spec == reset.read(document({"nodeName": "node-1"})).spec


def defaults(schema: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, part in schema["properties"].items():
        if "default" in part:
            found[name] = defaults(part) if part["type"] == "object" else part["default"]
    return found


def document(spec: dict[str, Any], name: str = "one") -> dict[str, Any]:
    uid = "00000000-0000-4000-8000-000000000000"
    metadata = {"name": name, "uid": uid, "generation": 1, "resourceVersion": "1"}
    return {"metadata": metadata | {"creationTimestamp": "2026-12-01T12:00:00Z"}, "spec": spec}


@pytest.mark.parametrize("example", sorted((REPOSITORY / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_operator_understands_every_example(example: Path) -> None:
    found = yaml.safe_load(example.read_text())
    assert (found["apiVersion"], found["kind"]) == (names.API_VERSION, names.KIND)
    assert reset.read(document(found["spec"])).spec != reset.ResetSpec()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (None, "spec: not an object"),
        ({}, "exactly one of nodeName and nodeSelector"),
        ({"nodeName": "a", "nodeSelector": {"a": "b"}}, "exactly one of nodeName and nodeSelector"),
        ({"nodeSelector": {"a,b": "c"}}, "spec.nodeSelector: not at most 16 labels"),
        ({"nodeName": "a", "pods": "Evict"}, "go with scope All only"),
        ({"nodeName": "a", "scope": ["All"]}, "spec.scope: not one of Orphans, All"),
        ({"nodeName": "a", "timeoutSeconds": True}, "spec.timeoutSeconds: not a whole number from 30 to 86400"),
        ({"nodeName": "a", "timeoutSeconds": 1e9}, "spec.timeoutSeconds: not a whole number"),
        ({"nodeName": "a", "rollout": []}, "spec.rollout: not an object"),
        ({"nodeName": "a", "logs": {"patterns": ["/a\nb"]}}, "spec.logs.patterns: not a printable text"),
        ({"nodeName": "a", "caches": {"compile": [7]}}, "spec.caches.compile: not an object"),
        ({"nodeName": "a", "dryRun": "true"}, "spec.dryRun: neither true nor false"),
    ],
)
def test_a_spec_that_no_schema_checked_is_refused_with_the_field(spec: Any, words: str) -> None:
    """An older CRD, or none, may have let it through."""
    with pytest.raises(reset.SpecError, match="^" + words.replace("(", r"\(") if words.startswith("spec.") else words):
        reset.read(document(spec))


def test_a_status_of_five_thousand_nodes_that_are_not_clean_fits() -> None:
    """256 KiB, whatever the nodes told."""
    told = "x" * 600
    results = {
        f"node-{number:04}.pool-a.example.internal": NodeResult(
            node=f"node-{number:04}.pool-a.example.internal",
            result=NodeVerdict.NOT_CLEAN,
            reason="NotClean",
            message=told,
            warnings=(told[:500],) * 16,
        )
        for number in range(5000)
    }
    one = reset.read(document({"nodeSelector": {"pool": "a"}}))
    known = Snapshot(now_s=1.8e9, reset=one, record=Record(uid=one.uid, started_s=1.8e9, results=results))
    final = status.final(known)
    assert len(json.dumps(final, separators=(",", ":"))) <= 256 << 10
    assert final["nodes"]["notClean"] == 5000
    assert final["phase"] == "Failed"
    assert len(final["results"]) + final["omittedResults"] == 5000
    assert len(final["message"]) <= 1024


def test_the_documentation_has_every_field_with_its_default() -> None:
    text = (REPOSITORY / "docs" / "gpunodereset.md").read_text()
    table = text.partition("### Every field of `spec`")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `([A-Za-z.]+)` \| `?([^`|]+?)`? \|", table, re.MULTILINE))
    assert told == dict(settings(SCHEMA["properties"]["spec"], ""))


def settings(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """What an administrator can set, each with its default as the documentation writes it."""
    for name, part in schema["properties"].items():
        if "properties" in part:
            yield from settings(part, f"{prefix}{name}.")
        else:
            default = part.get("default", "-")
            yield f"{prefix}{name}", default if isinstance(default, str) else json.dumps(default)


def test_every_reason_is_in_the_documentation() -> None:
    text = (REPOSITORY / "docs" / "gpunodereset.md").read_text() + (
        REPOSITORY / "crds" / "gpunodereset.yaml"
    ).read_text()
    package = REPOSITORY / "operator" / "cleanslate_operator"
    sources = "".join(path.read_text() for path in package.glob("*.py"))
    reasons = set(re.findall(r'reason="([A-Z][A-Za-z]+)"', sources)) | set(
        re.findall(r'node, "([A-Z][A-Za-z]+)",', sources)
    )
    assert {"NodeNotFound", "EvictionBlocked", "InvalidSpec"} <= reasons
    told = set(re.findall(r"`([A-Z][A-Za-z]+)`", text))
    not_of_a_status = {"Started", "TooLong", "NotFound"}  # of an Event, or of an answer
    assert reasons - told - not_of_a_status == set()
