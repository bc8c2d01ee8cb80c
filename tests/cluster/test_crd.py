"""GPUNodeReset as the API server takes it: what is refused, with which words, what is filled in, and what people see."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import places
from cluster.cluster import Cluster
from cluster.kubectl import Kubectl, KubectlError, Object
from cluster.tenants import Tenant

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

CRD = places.CHECKOUT / "crds" / "gpunodereset.yaml"
NAME = "gpunoderesets.cleanslate.dev"
UUID = "GPU-00000000-5eed-4c1e-a115-1a7e00000000"


@pytest.fixture(scope="module")
def crd(running_cluster: Cluster) -> Iterator[None]:
    """The CRD, on the embedded cluster; gone afterwards if it was not there before."""
    whole = running_cluster.kubectl
    there = whole("get", "crd", NAME, "--ignore-not-found", "-o", "name")
    whole("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    whole.wait("condition=Established", f"crd/{NAME}")
    yield
    if not there:
        whole.delete("crd", NAME)


@pytest.fixture
def kubectl(crd: None, cluster: Cluster, tenant: Tenant) -> Iterator[Kubectl]:
    """kubectl on a cluster that has the CRD; the test's GPUNodeResets are gone afterwards."""
    yield tenant.kubectl
    tenant.kubectl.delete("gnr", f"--selector=test={tenant.name}")


def reset(tenant: Tenant, name: str = "", **spec: Any) -> Object:
    """A GPUNodeReset of the test's own. Suspended, so that no operator that may be here touches anything."""
    metadata = {"name": name or tenant.name, "labels": {"test": tenant.name}}
    return {
        "apiVersion": "cleanslate.dev/v1alpha1",
        "kind": "GPUNodeReset",
        "metadata": metadata,
        "spec": {"suspend": True} | spec,
    }


A = {"nodeName": "node-1"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no node at all": ({}, "name what to reset: spec.nodeName for one node, or spec.nodeSelector"),
    "both ways to name nodes": (A | {"nodeSelector": {"a": "b"}}, "nodeName and nodeSelector exclude each other"),
    "an empty selector": ({"nodeSelector": {}}, "an empty selector would choose every node of the cluster"),
    "an empty node name": ({"nodeName": ""}, "spec.nodeName in body should be at least 1 chars long"),
    "a node name that is none": ({"nodeName": "Node_1"}, "spec.nodeName in body should match"),
    "a node name that is a path": ({"nodeName": "../node-1"}, "spec.nodeName in body should match"),
    "a label key that is none": ({"nodeSelector": {"-a": "b"}}, "a key is not that of a label"),
    "a label value that is none": ({"nodeSelector": {"a": "b c"}}, "spec.nodeSelector.a in body should match"),
    "seventeen labels": ({"nodeSelector": {f"a{n}": "" for n in range(17)}}, "must have at most 16 items"),
    "an unknown scope": (A | {"scope": "Everything"}, 'supported values: "Orphans", "All"'),
    "pods with scope Orphans": (A | {"pods": "Evict"}, "pods goes with scope: All only"),
    "an unknown way with pods": (A | {"scope": "All", "pods": "Kill"}, 'supported values: "Keep", "Evict", "Delete"'),
    "owners to end with scope Orphans": (
        A | {"processes": {"endOwners": ["service:vllm.service"]}},
        "processes.endOwners goes with scope: All only",
    ),
    "an owner of no kind": (
        A | {"scope": "All", "processes": {"endOwners": ["vllm.service"]}},
        "spec.processes.endOwners[0] in body should match",
    ),
    "a UUID for many nodes": (
        {"nodeSelector": {"a": "b"}, "gpus": {"devices": [UUID]}},
        "gpus.devices: a UUID is of one node",
    ),
    "a GPU that is none": (A | {"gpus": {"devices": ["GPU-1"]}}, "spec.gpus.devices[0] in body should match"),
    "a GPU twice": (A | {"gpus": {"devices": ["0", "0"]}}, "Duplicate value"),
    "no GPU expected": (A | {"gpus": {"expected": 0}}, "should be greater than or equal to 1"),
    "a grace period of a day": (
        A | {"processes": {"gracePeriodSeconds": 86400}},
        "should be less than or equal to 600",
    ),
    "a pattern with a newline": (
        A | {"processes": {"protect": ["a\nb"]}},
        "spec.processes.protect[0] in body should match",
    ),
    "a relative path": (
        A | {"sharedMemory": {"roots": ["dev/shm"]}},
        "spec.sharedMemory.roots[0] in body should match",
    ),
    "a path that goes upwards": (A | {"sharedMemory": {"roots": ["/a/../etc"]}}, "a path must not go upwards"),
    "two paths in one": (A | {"caches": {"allowRoots": ["/a,/b"]}}, "spec.caches.allowRoots[0] in body should match"),
    "an unknown cache": (A | {"caches": {"compile": [{"name": "weights"}]}}, "Unsupported value"),
    "a cache without a name": (
        A | {"caches": {"compile": [{"path": "/a"}]}},
        "spec.caches.compile[0].name: Required value",
    ),
    "a cache elsewhere": (
        A | {"caches": {"compile": [{"name": "vllm", "path": "/a/.."}]}},
        "a path must not go upwards",
    ),
    "bytecode without a pattern": (A | {"caches": {"bytecode": [{"path": "/a"}]}}, "pattern: Required value"),
    "a path with a colon": (
        A | {"caches": {"bytecode": [{"path": "/a:b", "pattern": "*"}]}},
        "spec.caches.bytecode[0].path in body should match",
    ),
    "a log pattern that is relative": (
        A | {"logs": {"patterns": ["*.log"]}},
        "spec.logs.patterns[0] in body should match",
    ),
    "thirty-three log patterns": (
        A | {"logs": {"patterns": [f"/{n}" for n in range(33)]}},
        "must have at most 32 items",
    ),
    "a negative age": (A | {"logs": {"minAgeSeconds": -1}}, "should be greater than or equal to 0"),
    "no wave at all": (A | {"rollout": {"maxConcurrent": 0}}, "should be greater than or equal to 1"),
    "a thousand nodes at once": (A | {"rollout": {"maxConcurrent": 1000}}, "should be less than or equal to 500"),
    "a stop before the first failure": (
        A | {"rollout": {"stopAfterFailures": 0}},
        "should be greater than or equal to 1",
    ),
    "a deadline of a second": (A | {"timeoutSeconds": 1}, "should be greater than or equal to 30"),
    "a deadline in words": (A | {"timeoutSeconds": "30m"}, 'must be of type integer: "string"'),
    "a switch in words": (A | {"dryRun": "yes"}, 'must be of type boolean: "string"'),
    "a field that is unknown": (A | {"force": True}, 'unknown field "spec.force"'),
}


def test_what_makes_no_sense_is_refused_with_words_that_help(kubectl: Kubectl, tenant: Tenant) -> None:
    assert len(REFUSED) >= 20
    wrong = {}
    for case, (spec, words) in REFUSED.items():
        with pytest.raises(KubectlError) as refusal:
            kubectl.create(reset(tenant, **spec))
        if words not in str(refusal.value):
            wrong[case] = str(refusal.value)[-400:]
    assert wrong == {}
    assert kubectl.items("gnr", f"--selector=test={tenant.name}") == []


def test_a_name_that_labels_cannot_carry_is_refused(kubectl: Kubectl, tenant: Tenant) -> None:
    with pytest.raises(KubectlError, match=r"metadata.name: at most 63 characters"):
        kubectl.create(reset(tenant, name="a" * 64, **A))


WHOLE: dict[str, Any] = {
    "nodeName": "node-1",
    "scope": "All",
    "pods": "Evict",
    "gpus": {"devices": [UUID, "1"], "expected": 8},
    "processes": {"gracePeriodSeconds": 5, "protect": ["nvitop"], "endOwners": ["service:vllm.service"]},
    "sharedMemory": {"roots": ["/mnt/shm"], "minAgeSeconds": 0, "anyName": True},
    "caches": {
        "compile": [{"name": "vllm"}, {"name": "triton", "path": "/data/triton"}],
        "bytecode": [{"path": "/opt/vllm", "pattern": "*/deepseek_v2*"}],
        "allowRoots": ["/data"],
    },
    "logs": {"patterns": ["/var/log/vllm/*.log"], "minAgeSeconds": 0},
    "verify": {"maxUsedMiB": 0, "stableReads": 5, "timeoutSeconds": 60},
    "rollout": {"maxConcurrent": 1, "stopAfterFailures": 1},
    "dryRun": True,
    "timeoutSeconds": 60,
    "ttlSecondsAfterFinished": 0,
}
OTHER: dict[str, Any] = {
    "nodeName": "node-2",
    "scope": "Orphans",
    "pods": "Delete",
    "gpus": {"expected": 7},
    "processes": {"gracePeriodSeconds": 6, "endOwners": ["service:vllm.service"]},
    "sharedMemory": {"minAgeSeconds": 1},
    "caches": {"allowRoots": ["/other"]},
    "logs": {"minAgeSeconds": 1},
    "verify": {"stableReads": 4},
    "rollout": {"maxConcurrent": 2},
    "dryRun": False,
    "timeoutSeconds": 61,
    "ttlSecondsAfterFinished": 1,
}


def test_every_field_but_suspend_is_immutable(kubectl: Kubectl, tenant: Tenant) -> None:
    """Whether it is changed, added or taken away."""
    kubectl.create(reset(tenant, name=f"{tenant.name}-a", **WHOLE))
    kubectl.create(reset(tenant, name=f"{tenant.name}-b", nodeSelector={"a": "b"}))
    allowed = []
    for field, value in OTHER.items():
        changes = [("a", {field: value}), ("a", {field: None})]
        if field not in {"nodeName", "pods"}:  # each of them is refused there for another reason already
            changes.append(("b", {field: WHOLE[field] if field != "gpus" else {"expected": 8}}))
        allowed += [(field, name) for name, change in changes if not refuses(kubectl, f"{tenant.name}-{name}", change)]
    assert allowed == []
    assert refuses(kubectl, f"{tenant.name}-b", {"nodeSelector": {"a": "c"}})
    kubectl("patch", "gnr", f"{tenant.name}-b", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    assert kubectl.get("gnr", f"{tenant.name}-b")["spec"]["suspend"] is False


def refuses(kubectl: Kubectl, name: str, change: dict[str, Any]) -> bool:
    """Whether the API server refuses a change as one of a field that is immutable."""
    try:
        kubectl("patch", "gnr", name, "--type=merge", "-p", json.dumps({"spec": change}))
    except KubectlError as error:
        return f"spec.{next(iter(change))} is immutable" in str(error)
    return False


def test_defaults_are_filled_in_where_anybody_can_read_them(kubectl: Kubectl, tenant: Tenant) -> None:
    spec = kubectl.create(reset(tenant, nodeName="node-1"))["spec"]
    assert spec == {
        "nodeName": "node-1",
        "scope": "Orphans",
        "processes": {"gracePeriodSeconds": 20},
        "sharedMemory": {"minAgeSeconds": 10, "anyName": False},
        "logs": {"minAgeSeconds": 10},
        "verify": {"stableReads": 3, "timeoutSeconds": 120},
        "rollout": {"maxConcurrent": 10},
        "dryRun": False,
        "suspend": True,
        "timeoutSeconds": 1800,
    }


def row(node: str, result: str) -> Object:
    return {"node": node, "result": result, "reason": result, "message": f"{result} as measured"}


def full_row(node: str) -> Object:
    """A row with as much in it as the schema has room for."""
    files = {"removedCount": 2**53, "keptCount": 2**53, "bytesFreed": 2**53}
    process = {"pid": 4194304, "title": "t" * 256, "owner": "o" * 256, "verdict": "End", "outcome": "Uninterruptible"}
    gpu = {"uuid": "u" * 128, "result": "NotSupported", "usedBytes": 2**53, "message": "m" * 600}
    return row(node, "Failed") | {
        "message": "m" * 600,
        "finishedAt": "2026-12-01T12:00:00Z",
        "durationSeconds": 86400.5,
        "gpus": [gpu | {"index": index} for index in range(64)],
        "processes": [process | {"reason": "r" * 600}] * 64,
        "sharedMemory": files,
        "caches": files,
        "logs": files,
        "warnings": ["w" * 600] * 16,
        "omitted": {"gpus": 1, "processes": 1, "warnings": 1},
    }


def with_status(kubectl: Kubectl, name: str, phase: str, **more: Any) -> None:
    """Writes a status as the operator does."""
    generation = kubectl.get("gnr", name)["metadata"]["generation"]
    one = {"reason": "Clean", "message": "said", "lastTransitionTime": "2026-12-01T12:00:00Z"}
    conditions = [
        {"type": kind, "status": str(phase == kind), "observedGeneration": generation, **one}
        for kind in ("Accepted", "Progressing", "Complete", "Failed", "Suspended")
    ]
    nodes = {"total": 3, "pending": 0, "running": 0, "clean": 2, "busy": 0, "notClean": 1, "failed": 0, "skipped": 0}
    status = {"phase": phase, "reason": "Clean", "message": "3 nodes", "freed": "40.0 GiB", "nodes": nodes}
    document = {"status": status | {"conditions": conditions} | more}
    patch = ("--subresource=status", "--type=merge", "--patch-file=/dev/stdin")
    kubectl("patch", "gnr", name, *patch, stdin=json.dumps(document))


def test_columns_answer_whether_it_worked(kubectl: Kubectl, tenant: Tenant) -> None:
    kubectl.create(reset(tenant, **A))
    with_status(kubectl, tenant.name, "Complete")
    head, line = kubectl("get", "gnr", tenant.name).splitlines()
    assert head.split("  ")[0] == "NAME"
    assert [word.strip() for word in head.split("  ") if word.strip()] == [
        "NAME", "PHASE", "NODES", "CLEAN", "NOT CLEAN", "REASON", "AGE",
    ]  # fmt: skip
    assert line.split()[:6] == [tenant.name, "Complete", "3", "2", "1", "Clean"]
    head, line = kubectl("get", "gnr", tenant.name, "-o", "wide").splitlines()
    assert head.split()[-3:] == ["SCOPE", "FREED", "MESSAGE"]
    assert line.endswith("Orphans   40.0 GiB   3 nodes")
    assert tenant.name in kubectl("get", "gpu")


def test_waiting_for_complete_means_success(kubectl: Kubectl, tenant: Tenant) -> None:
    kubectl.create(reset(tenant, **A))
    with_status(kubectl, tenant.name, "Failed")
    kubectl.wait("condition=Failed", f"gnr/{tenant.name}", timeout_s=10)
    with pytest.raises(KubectlError, match="timed out"):
        kubectl.wait("condition=Complete", f"gnr/{tenant.name}", timeout_s=1)
    with_status(kubectl, tenant.name, "Complete")
    kubectl.wait("condition=Complete", f"gnr/{tenant.name}", timeout_s=10)


def test_a_status_is_bounded_too(kubectl: Kubectl, tenant: Tenant) -> None:
    kubectl.create(reset(tenant, **A))
    with_status(kubectl, tenant.name, "Failed", results=[row(f"node-{n}", "Failed") for n in range(200)])
    for results, words in (
        ([row(f"node-{n}", "Failed") for n in range(201)], "must have at most 200 items"),
        ([row("node-1", "Wonderful")], "Unsupported value"),
        ([row("node-1", "Clean"), row("node-1", "Failed")], "Duplicate value"),
        ([row("node-1", "Clean") | {"message": "x" * 601}], "may not be more than 600"),
    ):
        with pytest.raises(KubectlError, match=words):
            with_status(kubectl, tenant.name, "Failed", results=results)


def test_rows_that_are_full_to_the_brim_are_taken_whole(kubectl: Kubectl, tenant: Tenant) -> None:
    """Twice what the operator ever writes, which is 256 KiB."""
    kubectl.create(reset(tenant, **A))
    full = [full_row(f"node-{n}") for n in range(4)]
    results = full + [row(f"node-{n}", "Failed") for n in range(4, 200)]
    assert len(json.dumps(results)) > 512 << 10
    with_status(kubectl, tenant.name, "Failed", results=results)
    assert kubectl.get("gnr", tenant.name)["status"]["results"] == results


def test_the_spec_cannot_be_changed_by_way_of_the_status_nor_the_other_way(kubectl: Kubectl, tenant: Tenant) -> None:
    made = kubectl.create(reset(tenant, **A) | {"status": {"phase": "Complete"}})
    assert "status" not in made
    with_status(kubectl, tenant.name, "Running")
    patch = json.dumps({"spec": {"suspend": False}})
    kubectl("patch", "gnr", tenant.name, "--subresource=status", "--type=merge", "-p", patch)
    assert kubectl.get("gnr", tenant.name)["spec"]["suspend"] is True


def test_explain_is_the_reference(kubectl: Kubectl) -> None:
    """Every field of spec and status has a description, as a person asks for it."""
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    said = kubectl("explain", "gnr.spec.scope")
    assert "only what is proved to be left over" in " ".join(said.split())
    for path in fields(schema["properties"]["spec"], "gnr.spec"):
        text = kubectl("explain", path)
        assert "<no description>" not in text.lower().replace("\n", " "), path
        assert "<empty>" not in text, path


def fields(schema: dict[str, Any], path: str) -> Iterator[str]:
    """The paths of a schema that have fields of their own."""
    schema = schema.get("items", schema)
    if "properties" in schema:
        yield path
        for name, part in schema["properties"].items():
            yield from fields(part, f"{path}.{name}")


@pytest.mark.parametrize("example", sorted((places.CHECKOUT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_taken(kubectl: Kubectl, example: Path) -> None:
    assert "created (server dry run)" in kubectl("create", "--dry-run=server", "-f", str(example))
