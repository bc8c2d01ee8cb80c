"""What the operator may do is what it does: its rights in the chart beside what the API server saw it ask for."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster import binaries, components
from cluster.cluster import Cluster
from cluster.helm import Helm
from cluster.kubectl import Kubectl
from cluster.nodes import Node
from cluster.resets import SYSTEM, Resets, summary
from cluster.tenants import Tenant, container, pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

APP = {"app": "server"}
EVERYWHERE = "*"


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One verb on one resource in one namespace; `*`: in all of them, and on what is in none."""

    namespace: str
    resource: str
    verb: str


def right(namespace: str, group: str, resource: str, verb: str) -> Right:
    """The right to do this, as `kubectl api-resources` names things: `leases.coordination.k8s.io`."""
    kind, _, part = resource.partition("/")
    name = ".".join(filter(None, (kind, group))) + (f"/{part}" if part else "")
    return Right(namespace, name, verb)


# Which these resets do not bring about: the same news told once more, by an operator that was killed after it had told it.
SELDOM = {right("default", "", "events", "patch")}


def granted(folder: Path) -> set[Right]:
    """What the chart's roles allow the operator."""
    helm = Helm(program=binaries.helm(), folder=folder)
    roles = [one for one in helm.render() if one["kind"] in {"Role", "ClusterRole"}]
    return {
        right(role["metadata"].get("namespace", EVERYWHERE), group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def audit_log(cluster: Cluster) -> Path:
    """What the operator has asked of the API server; on a disk that only the control plane sees."""
    return cluster.control.path(components.audit_log(cluster.place.state / "disk"))


@pytest.fixture(scope="module", autouse=True)
def begun(running_cluster: Cluster) -> int:
    """How long the audit log was before the operator was installed: what is in it then is of others."""
    return audit_log(running_cluster).stat().st_size


def asked(cluster: Cluster, begun: int) -> Iterator[dict[str, Any]]:
    """All that the operator has asked of the API server since its installation."""
    with audit_log(cluster).open("rb") as lines:
        lines.seek(begun)
        yield from map(json.loads, lines)


def used(events: Iterable[dict[str, Any]], rights: set[Right]) -> set[Right]:
    """The right that each request needed: that of its namespace if there is one, else the one for everywhere."""
    found = set()
    for event in events:
        if what := event.get("objectRef"):
            resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
            group, verb = what.get("apiGroup", ""), event["verb"]
            here = right(what.get("namespace", EVERYWHERE), group, resource, verb)
            found.add(here if here in rights else right(EVERYWHERE, group, resource, verb))
    return found


@contextmanager
def budget(tenant: Tenant) -> Iterator[None]:
    """No pod of APP may be evicted."""
    spec = {"minAvailable": 1, "selector": {"matchLabels": APP}}
    one = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "budget"}, "spec": spec}
    tenant.kubectl.create(one)
    tenant.kubectl.until("pdb", "budget", is_so=lambda seen: "observedGeneration" in seen.get("status", {}))
    yield
    tenant.kubectl.delete("pdb", "budget")


def run_server(tenant: Tenant, node: Node) -> None:
    """A pod with a GPU."""
    one = pod("server", container("main", tenant.images("pause"), gpus=1), node=node.name)
    one["metadata"]["labels"] = APP
    tenant.run(one)


def replace_leader(operator: Kubectl) -> None:
    """Deletes the replica that leads; the other leads when this returns."""
    leader = str(operator.get("lease", "cleanslate-operator")["spec"]["holderIdentity"])
    operator.delete("pod", leader.partition("_")[0], "--grace-period=1")
    operator.until(
        "lease", "cleanslate-operator", is_so=lambda one: one["spec"].get("holderIdentity") not in {leader, "", None}
    )


def live(resets: Resets, tenant: Tenant, operator: Kubectl, node: Node) -> None:
    """All that an operator is for: every scope, a dry run, a blocked eviction, another leader, a deletion, the end of a life."""
    where = {"nodeName": node.name}
    for name in resets.nodes():
        pool = tenant.label(name)
    waves = {"nodeSelector": pool, "rollout": {"maxConcurrent": 1}}
    assert summary(resets.run("orphans", **waves))[:2] == ("Complete", "Clean")
    assert summary(resets.run("dry", dryRun=True, **where))[:2] == ("Complete", "DryRun")
    run_server(tenant, node)
    with budget(tenant):
        resets.apply("evicts", scope="All", pods="Evict", **where)
        resets.says("evicts", "Running", "Evicting")
        replace_leader(operator)
    assert summary(resets.ended("evicts"))[:2] == ("Complete", "Clean")
    run_server(tenant, node)
    assert summary(resets.run("deletes", scope="All", pods="Delete", **where))[:2] == ("Complete", "Clean")
    run_server(tenant, node)
    with budget(tenant):
        resets.apply("deleted", scope="All", pods="Evict", **where)
        resets.says("deleted", "Running", "Evicting")
        resets.delete("deleted")
    resets.apply("short", ttlSecondsAfterFinished=0, **where)
    resets.kubectl.wait("delete", "gpunoderesets/short")


def test_operator_has_the_rights_that_it_uses_and_no_others(
    resets: Resets, tenant: Tenant, operator: Kubectl, cluster: Cluster, node: Node, begun: int, tmp_path: Path
) -> None:
    """The API server refuses nothing that it asks for, and each right is needed, but for what an interruption leaves to do."""
    live(resets, tenant, operator, node)
    events, rights = list(asked(cluster, begun)), granted(tmp_path)
    refused = [event["requestURI"] for event in events if event.get("responseStatus", {}).get("code") in {401, 403}]
    assert refused == []
    needed = used(events, rights)
    assert sorted(rights - needed - SELDOM) == []
    assert sorted(needed - rights) == []
    assert SYSTEM in {one.namespace for one in needed}
