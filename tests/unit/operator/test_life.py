"""The life of a reset, driven through the operator's own decisions and writes against a cluster in memory."""

import asyncio
import json
from typing import Any

import pytest

from unit.operator.world import LEASES, NODES, PODS, RESETS, Cluster, Operator, summary


def live(cluster: Cluster, name: str = "one", operator: Operator | None = None, **options: Any) -> Operator:
    operator = operator or Operator(cluster)
    asyncio.run(operator.run(name, **options))
    return operator


def test_one_node_is_reset_once_and_nothing_stays() -> None:
    cluster = Cluster("node-1", "node-2")
    cluster.add_reset("one", nodeName="node-1")
    operator = live(cluster)
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Complete", "Clean")
    assert status["message"] == "node node-1: clean as measured"
    assert status["nodes"] == {
        "total": 1, "pending": 0, "running": 0, "clean": 1, "busy": 0, "notClean": 0, "failed": 0, "skipped": 0
    }  # fmt: skip
    assert cluster.runs == ["node-1"]
    assert cluster.left() == []
    assert [told[0] for told in operator.recorder.told] == ["Started", "Clean"]


def test_a_node_that_is_not_there_fails_before_anything_is_made() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-9")
    live(cluster)
    assert cluster.status("one")["reason"] == "NodeNotFound"
    assert "there is no node node-9" in cluster.status("one")["message"]
    assert cluster.left() == []


def conditions(cluster: Cluster, name: str = "one") -> dict[str, str]:
    return {one["type"]: one["status"] for one in cluster.status(name)["conditions"]}


def test_waves_never_exceed_max_concurrent() -> None:
    cluster = Cluster()
    for number in range(7):
        cluster.add_node(f"node-{number}", pool="a")
    cluster.add_reset("one", nodeSelector={"pool": "a"}, rollout={"maxConcurrent": 2})
    most = 0

    def watch() -> bool:
        nonlocal most
        most = max(most, sum(path.startswith(LEASES) for path in cluster.objects))
        return False

    live(cluster, until=watch)
    assert 1 <= most <= 2
    assert sorted(cluster.runs) == [f"node-{number}" for number in range(7)]
    assert cluster.status("one")["nodes"]["clean"] == 7
    assert cluster.left() == []


def test_it_stops_after_failures() -> None:
    cluster = Cluster()
    for number in range(6):
        cluster.add_node(f"node-{number}", pool="a")
        cluster.answers[f"node-{number}"] = lambda n=number: summary(f"node-{n}", result="NotClean", code=3)
    cluster.add_reset("one", nodeSelector={"pool": "a"}, rollout={"maxConcurrent": 2, "stopAfterFailures": 1})
    live(cluster)
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Failed", "StoppedAfterFailures")
    assert (status["nodes"]["notClean"], status["nodes"]["skipped"]) == (2, 4)
    assert cluster.runs == ["node-0", "node-1"]
    assert cluster.left() == []


def test_suspend_holds_it_and_clearing_it_lets_it_go() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1", suspend=True)
    operator = Operator(cluster)
    assert asyncio.run(operator.look("one")) is None
    assert cluster.status("one")["phase"] == "Suspended"
    assert cluster.left() == []
    cluster.reset("one")["spec"]["suspend"] = False
    live(cluster, operator=operator)
    assert cluster.status("one")["phase"] == "Complete"


def test_the_second_reset_of_a_node_waits_and_says_for_whom() -> None:
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1")
    cluster.add_reset("two", nodeName="node-1")
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))
    asyncio.run(operator.look("two"))
    status = cluster.status("two")
    assert (status["phase"], status["reason"]) == ("Waiting", "WaitingForLock")
    assert "node node-1 is held by GPUNodeReset one since" in status["message"]
    del cluster.answers["node-1"]
    live(cluster, "one", operator)
    live(cluster, "two", operator)
    assert cluster.status("two")["phase"] == "Complete"
    assert cluster.runs == ["node-1", "node-1"]
    assert cluster.left() == []


def test_eviction_waits_for_the_budget_and_fails_with_its_name() -> None:
    cluster = Cluster("node-1")
    cluster.add_pod("llama-0", "node-1")
    cluster.budgets["llama-0"] = "llama"
    cluster.add_reset("one", nodeName="node-1", scope="All", pods="Evict", timeoutSeconds=60)
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Running", "Evicting")
    assert "pod default/llama-0: The disruption budget llama needs 1 healthy pods" in status["message"]
    assert cluster.objects[f"{NODES}/node-1"]["spec"]["taints"][0]["key"] == "cleanslate.dev/resetting"
    live(cluster, operator=operator)
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Failed", "EvictionBlocked")
    assert "The disruption budget llama" in status["message"]
    assert cluster.runs == []
    assert cluster.left() == []


def test_scope_all_evicts_resets_and_takes_its_taint_away_but_no_other() -> None:
    cluster = Cluster("node-1")
    cluster.add_pod("llama-0", "node-1")
    cluster.objects[f"{NODES}/node-1"]["spec"] = {
        "unschedulable": True,
        "taints": [{"key": "a", "effect": "NoSchedule"}],
    }
    cluster.add_reset("one", nodeName="node-1", scope="All", pods="Evict")
    live(cluster)
    assert cluster.status("one")["phase"] == "Complete"
    assert cluster.objects[f"{NODES}/node-1"]["spec"] == {
        "unschedulable": True,
        "taints": [{"key": "a", "effect": "NoSchedule"}],
    }
    assert "/api/v1/namespaces/default/pods/llama-0" not in cluster.objects


def test_deleting_a_running_reset_undoes_everything() -> None:
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1", scope="All")
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))
    cluster.settle()
    assert len(cluster.left()) == 7  # pod, DaemonSet, record, plan, lock; taint and finalizer
    cluster.reset("one")["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    live(cluster, operator=operator)
    assert cluster.reset("one") is None
    assert cluster.left() == []
    assert cluster.runs == []


def test_a_status_that_a_human_edited_is_written_anew() -> None:
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1")
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))
    cluster.reset("one")["status"] = {"phase": "Complete", "conditions": "nonsense", "results": [7]}
    asyncio.run(operator.look("one"))
    assert cluster.status("one")["phase"] == "Running"
    del cluster.answers["node-1"]
    live(cluster, operator=operator)
    assert cluster.status("one")["phase"] == "Complete"
    assert cluster.runs == ["node-1"]


def test_an_ended_reset_is_never_run_again_whatever_its_status_says() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1")
    live(cluster)
    del cluster.reset("one")["status"]
    assert asyncio.run(Operator(cluster).look("one")) is None
    assert cluster.runs == ["node-1"]
    assert cluster.left() == []


def test_a_spec_that_makes_no_sense_fails_with_the_reason() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1", scope="Everything")
    live(cluster)
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Failed", "InvalidSpec")
    assert "spec.scope: not one of Orphans, All" in status["message"]
    assert conditions(cluster)["Accepted"] == "False"


@pytest.mark.parametrize(
    "answer", ["", "{}", "nonsense", summary("node-2")], ids=["empty", "none", "garbage", "another's"]
)
def test_a_result_that_cannot_be_trusted_fails_its_own_node_only(answer: str) -> None:
    cluster = Cluster()
    for number in (1, 2):
        cluster.add_node(f"node-{number}", pool="a")
    cluster.answers["node-1"] = lambda: answer
    cluster.add_reset("one", nodeSelector={"pool": "a"})
    live(cluster)
    results = {row["node"]: (row["result"], row["reason"]) for row in cluster.status("one")["results"]}
    assert results == {"node-1": ("Failed", "BadResult"), "node-2": ("Clean", "Clean")}
    assert cluster.runs.count("node-1") == 1


def test_the_deadline_ends_a_reset_that_tells_nothing() -> None:
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1", timeoutSeconds=60)
    live(cluster)
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Failed", "NoResult")
    assert cluster.left() == []


def test_a_node_that_vanishes_fails_and_the_others_go_on() -> None:
    cluster = Cluster()
    for number in (1, 2):
        cluster.add_node(f"node-{number}", pool="a")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeSelector={"pool": "a"})
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))
    cluster.settle()
    del cluster.objects[f"{NODES}/node-1"]
    for path in [path for path in cluster.objects if path.startswith(PODS)]:
        if cluster.objects[path]["spec"]["nodeName"] == "node-1":
            del cluster.objects[path]
    cluster.pass_s(20)
    live(cluster, operator=operator)
    results = {row["node"]: row["reason"] for row in cluster.status("one")["results"]}
    assert results == {"node-1": "NodeGone", "node-2": "Clean"}


def test_a_dry_run_that_found_leftovers_is_complete() -> None:
    cluster = Cluster("node-1")
    cluster.add_pod("llama-0", "node-1")
    cluster.answers["node-1"] = lambda: summary("node-1", result="NotClean", code=3, dryRun=True)
    cluster.add_reset("one", nodeName="node-1", dryRun=True, scope="All", pods="Delete")
    live(cluster)
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Complete", "DryRun")
    assert status["nodes"]["notClean"] == 1
    assert "/api/v1/namespaces/default/pods/llama-0" in cluster.objects


def test_the_time_to_live_deletes_it() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1", ttlSecondsAfterFinished=60)
    operator = live(cluster)
    left_s = asyncio.run(operator.look("one"))
    assert left_s == pytest.approx(60, abs=2)
    cluster.pass_s(61)
    asyncio.run(operator.look("one"))
    assert f"{RESETS}/one" not in cluster.objects


def test_the_plan_names_the_live_containers_and_its_margin_covers_a_silent_kubelet() -> None:
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1")
    cluster.pass_s(7)  # the kubelet's last word is 9 s old by now
    asyncio.run(Operator(cluster).look("one"))
    plans = [one["data"]["node-1.json"] for path, one in cluster.objects.items() if "-plan-" in path]
    assert len(plans) == 1
    assert json.loads(plans[0])["marginSeconds"] == pytest.approx(5 + 9, abs=0.1)


def test_a_plan_stays_for_as_long_as_a_pod_of_its_wave_may_yet_mount_it() -> None:
    """A pod waits for every ConfigMap that its DaemonSet named when it was made, other nodes' too."""
    cluster = Cluster()
    for number in range(4):
        cluster.add_node(f"node-{number}", pool="a")
    slow, slower = iter([None] * 4), iter([None] * 12)
    cluster.answers["node-1"] = lambda: next(slow, summary("node-1"))
    cluster.answers["node-2"] = lambda: next(slower, summary("node-2"))  # its pod is made while node-1's plan is there
    cluster.add_reset("one", nodeSelector={"pool": "a"}, rollout={"maxConcurrent": 2})
    live(cluster)
    assert cluster.status("one")["nodes"]["clean"] == 4
    assert cluster.runs == ["node-0", "node-1", "node-3", "node-2"]
    assert cluster.left() == []


def test_a_reset_that_is_over_is_of_every_later_generation_too() -> None:
    """So that `kubectl wait` still finds it complete after somebody has touched `suspend`."""
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1")
    operator = live(cluster)
    before = cluster.status("one")
    cluster.reset("one")["metadata"]["generation"] = 2
    cluster.reset("one")["spec"]["suspend"] = True
    asyncio.run(operator.look("one"))
    status = cluster.status("one")
    assert {one["observedGeneration"] for one in status["conditions"]} == {status["observedGeneration"]} == {2}
    assert conditions(cluster)["Complete"] == "True"
    assert (status["phase"], status["completionTime"]) == ("Complete", before["completionTime"])
    assert cluster.runs == ["node-1"]
    writes = cluster.writes
    asyncio.run(operator.look("one"))
    assert cluster.writes == writes
