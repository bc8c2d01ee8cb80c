"""`kubectl apply` of a GPUNodeReset, under the operator of the chart: a leftover, beside live work of the same shape."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cluster import images, leftovers, tenants
from cluster import resets as resets_module
from cluster.cluster import Cluster
from cluster.kubectl import Kubectl, Object
from cluster.leftovers import GPU_BYTES, GPUS_EACH, Server
from cluster.nodes import GPUS, Node
from cluster.resets import Resets, conditions, is_let_go, row, summary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@dataclass(frozen=True, kw_only=True)
class Mess:
    """Two servers of the same shape: of one only the engine and its workers are left, with what they hold; the other serves."""

    dead: Server
    live: Server

    def state(self) -> dict[str, Any]:
        """The processes and names of both, and what the node's pods and taints are."""
        kubectl, node = self.dead.tenant.kubectl, self.dead.node.name
        pods = kubectl.items("pods", "--all-namespaces", f"--field-selector=spec.nodeName={node}")
        return {
            "dead": (self.dead.processes(), self.dead.names()),
            "live": (self.live.processes(), self.live.names()),
            "pods": {one["metadata"]["uid"] for one in pods if one["metadata"]["namespace"] != resets_module.SPACE},
            "node": kubectl.get("node", node)["spec"],
        }


@dataclass(frozen=True, kw_only=True)
class Run:
    """A reset that is over, and the state of the mess before and after it."""

    reset: Object
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def row(self) -> Object:
        """What the status says of the node."""
        return row(self.reset, "node-1")


@pytest.fixture(scope="module")
def mess(operator: Kubectl, running_cluster: Cluster) -> Iterator[Mess]:
    """The two servers, once the leftover is old enough to be known as one."""
    node = running_cluster.nodes["node-1"]
    with tenants.tenant(running_cluster.kubectl, images.reference, "mess") as tenant:
        dead = leftovers.start(tenant, node, "dead")
        live = leftovers.start(tenant, node, "live")
        leftovers.kill_container(dead)
        leftovers.await_old_enough(dead)
        yield Mess(dead=dead, live=live)
    live.forget_segment()
    dead.forget_segment()


@pytest.fixture(scope="module")
def module_resets(operator: Kubectl, running_cluster: Cluster) -> Iterator[Resets]:
    """The two resets below."""
    with resets_module.resets(running_cluster.kubectl, "test_resets") as one:
        yield one


@pytest.fixture(scope="module")
def rehearsal(mess: Mess, module_resets: Resets) -> Run:
    """A dry run of the reset below."""
    before = mess.state()
    reset = module_resets.run("rehearsal", nodeName="node-1", sharedMemory={"minAgeSeconds": 0}, dryRun=True)
    return Run(reset=reset, before=before, after=mess.state())


@pytest.fixture(scope="module")
def done(mess: Mess, module_resets: Resets, rehearsal: Run) -> Run:
    """The reset of the node, after its rehearsal."""
    before = mess.state()
    module_resets.apply("headline", nodeName="node-1", sharedMemory={"minAgeSeconds": 0})
    module_resets.kubectl.wait("condition=Complete", "gnr/headline", timeout_s=resets_module.END_S)
    return Run(reset=module_resets.until("headline", is_let_go), before=before, after=mess.state())


def told(process: Object) -> tuple[str, str, str, str]:
    """What a status says of a process."""
    return process["verdict"], process["outcome"], process["reason"], process["owner"]


def test_dead_containers_processes_and_names_go(mess: Mess, done: Run) -> None:
    """The engine and its workers are ended, and their names in the pod's shared memory and in the host's are gone."""
    processes, names = done.before["dead"]
    assert processes.keys() == set(mess.dead.workers)
    assert names == {*mess.dead.told["names"], mess.dead.segment}
    assert done.after["dead"] == ({}, set())


def test_live_server_is_untouched(mess: Mess, done: Run) -> None:
    """The same processes, the same names, the same container, and its pod and the node's spec are as they were."""
    processes, names = done.before["live"]
    assert len(processes) == 3 + GPUS_EACH
    assert names == {*mess.live.told["names"], mess.live.segment}
    assert done.after["live"] == done.before["live"]
    assert done.after["pods"] == done.before["pods"]
    assert done.after["node"] == done.before["node"]
    status = mess.live.tenant.kubectl.get("pod", "live")["status"]
    assert status["containerStatuses"][0]["ready"]
    assert status["containerStatuses"][0]["restartCount"] == 0


def test_status_says_which_was_ended_and_which_was_kept(mess: Mess, done: Run) -> None:
    """Each process with its verdict, its reason and the pod that it belongs to."""
    rows = {one["pid"]: one for one in done.row["processes"]}
    engine, *workers = mess.dead.workers
    for pid, reason in [
        (engine, "orphaned worker"),
        *((pid, f"belongs to orphaned worker {engine}") for pid in workers),
    ]:
        assert told(rows[pid]) == ("End", "Ended", reason, f"pod {mess.dead.uid}")
    for pid in done.before["live"][0]:
        assert told(rows[pid]) == ("Keep", "Kept", "belongs to a live pod", f"pod {mess.live.uid}")
    assert "is kept: belongs to a live pod" in summary(done.reset)[2]
    assert mess.live.uid in summary(done.reset)[2]


def test_status_counts_names_and_measures_gpus(mess: Mess, done: Run) -> None:
    """The dead server's names removed, the live one's kept; its GPUs are Busy, and all others Clean."""
    memory = done.row["sharedMemory"]
    assert memory["removedCount"] == len(mess.dead.told["names"]) + 1
    assert memory["keptCount"] >= len(mess.live.told["names"]) + 1
    assert memory["bytesFreed"] == done.reset["status"]["bytesFreed"]["sharedMemory"] > 0
    results = [one["result"] for one in done.row["gpus"]]
    assert len(results) + done.row.get("omitted", {}).get("gpus", 0) == GPUS
    assert results.count("Busy") == GPUS_EACH
    assert set(results) <= {"Busy", "Clean"}
    assert done.reset["status"]["bytesFreed"]["gpu"] == GPUS_EACH * GPU_BYTES


def test_reset_is_complete(done: Run) -> None:
    """As its conditions say, for this generation of its spec; one node, busy with live work."""
    phase, reason, message = summary(done.reset)
    assert (phase, reason) == ("Complete", "Busy")
    assert message.startswith("node node-1: ")
    status = done.reset["status"]
    truths = {"Accepted": "True", "Progressing": "False", "Complete": "True", "Failed": "False", "Suspended": "False"}
    assert conditions(done.reset) == truths
    assert {one["observedGeneration"] for one in status["conditions"]} == {1}
    assert {name: count for name, count in status["nodes"].items() if count} == {"total": 1, "busy": 1}
    assert status["startTime"] <= done.row["finishedAt"] <= status["completionTime"]


def test_columns_tell_it_at_a_glance(done: Run, operator: Kubectl) -> None:
    """`kubectl get gnr`, and with `-o wide` the scope, what was freed and the sentence."""
    brief = operator("get", "gnr", "headline").splitlines()
    assert re.split(r"\s{2,}", brief[0]) == ["NAME", "PHASE", "NODES", "CLEAN", "NOT CLEAN", "REASON", "AGE"]
    assert brief[1].split()[:6] == ["headline", "Complete", "1", "0", "0", "Busy"]
    head, line = operator("get", "gnr", "headline", "-o", "wide").splitlines()
    assert re.split(r"\s{2,}", head)[-3:] == ["SCOPE", "FREED", "MESSAGE"]
    assert "Orphans" in line
    assert "2.0 GiB" in line
    assert line.rstrip().endswith(summary(done.reset)[2])


def test_describe_shows_the_events(done: Run, operator: Kubectl) -> None:
    """That it began and how it ended, from the operator."""
    uid = done.reset["metadata"]["uid"]
    operator.within("default").first_line(
        "get", "events", "--watch", f"--field-selector=involvedObject.uid={uid},reason=Busy", "--output=name"
    )
    events = operator("describe", "gnr", "headline").partition("\nEvents:")[2]
    lines = [re.split(r"\s{2,}", line.strip()) for line in events.splitlines()]
    shown = {line[1]: line for line in lines if len(line) == 5}
    assert shown["Started"][0] == shown["Busy"][0] == "Normal"
    assert shown["Started"][3] == "cleanslate-operator"
    assert shown["Started"][4] == "resetting 1 node: node-1"
    assert shown["Busy"][4] == summary(done.reset)[2]


def test_dry_run_changes_nothing(rehearsal: Run) -> None:
    """No process, no name, no pod and nothing in the node's spec."""
    assert summary(rehearsal.reset)[:2] == ("Complete", "DryRun")
    assert rehearsal.after == rehearsal.before
    assert rehearsal.reset["status"]["bytesFreed"] == {"gpu": 0, "sharedMemory": 0, "files": 0}


def test_dry_run_lists_what_the_reset_then_does(mess: Mess, rehearsal: Run, done: Run) -> None:
    """The same processes with the same verdicts and reasons, and as many names."""
    becomes = {"WouldEnd": "Ended", "Kept": "Kept"}
    rows = [one | {"outcome": becomes[one["outcome"]]} for one in rehearsal.row["processes"]]
    assert rows == done.row["processes"]
    assert {one["pid"] for one in rows if one["outcome"] == "Ended"} == set(mess.dead.workers)
    planned, real = rehearsal.row["sharedMemory"], done.row["sharedMemory"]
    assert (planned["removedCount"], planned["keptCount"]) == (real["removedCount"], real["keptCount"])


def test_nothing_is_left_of_the_resets(rehearsal: Run, done: Run, module_resets: Resets) -> None:
    """Neither DaemonSet, ConfigMap, Lease, pod nor taint, nor a finalizer; what they said stays."""
    assert module_resets.left() == []
    assert summary(done.reset)[0] == summary(rehearsal.reset)[0] == "Complete"


def test_node_is_clean_afterwards(done: Run, mess: Mess, resets: Resets, node: Node) -> None:
    """Once the live server is deleted too, another reset finds nothing to do."""
    mess.live.tenant.kubectl.delete("pod", "live")
    after = resets.run("afterwards", nodeName=node.name)
    assert summary(after)[:2] == ("Complete", "Clean")
    assert after["status"]["nodes"]["clean"] == 1
    assert {one["result"] for one in row(after, node.name)["gpus"]} == {"Clean"}
    assert after["status"]["bytesFreed"]["gpu"] == 0
