"""What goes wrong around a reset: silent nodes, stuck pods, locks of the dead, things that others have changed."""

import asyncio
import json
from typing import Any

import pytest

from cleanslate_operator.apierrors import Denied, Unavailable
from unit.operator.test_life import conditions, live
from unit.operator.world import DAEMON_SETS, LEASES, MAPS, NODES, RESETS, Cluster, Operator, summary


def not_ready(cluster: Cluster, node: str, status: str = "Unknown", since: str = "2027-01-15T07:50:00Z") -> None:
    ready = {"type": "Ready", "status": status, "lastTransitionTime": since}
    cluster.objects[f"{NODES}/{node}"]["status"]["conditions"] = [ready]


def plans(cluster: Cluster) -> list[Any]:
    return [
        json.loads(text) for path, one in cluster.objects.items() if "-plan-" in path for text in one["data"].values()
    ]


def test_a_silent_node_fails_at_once_with_since_when() -> None:
    cluster = Cluster("node-1")
    not_ready(cluster, "node-1")
    cluster.add_reset("one", nodeName="node-1")
    live(cluster)
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Failed", "NodeUnreachable")
    assert "silent since 2027-01-15T07:50:00Z" in status["message"]
    assert cluster.runs == []
    assert cluster.left() == []


def test_a_node_that_is_not_ready_but_speaks_is_reset() -> None:
    """Its pod network may be broken; a reset does not need it."""
    cluster = Cluster("node-1")
    not_ready(cluster, "node-1", status="False")
    cluster.add_reset("one", nodeName="node-1")
    live(cluster)
    assert cluster.status("one")["phase"] == "Complete"


def test_a_node_that_falls_silent_in_the_middle_fails_after_a_minute() -> None:
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1")
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))
    not_ready(cluster, "node-1", since="2027-01-15T08:00:20Z")
    cluster.pass_s(30)
    asyncio.run(operator.look("one"))
    assert cluster.status("one")["phase"] == "Running"
    cluster.pass_s(60)
    live(cluster, operator=operator)
    assert cluster.status("one")["reason"] == "NodeUnreachable"


def test_a_lock_of_a_reset_that_is_gone_is_broken() -> None:
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("gone", nodeName="node-1")
    operator = Operator(cluster)
    asyncio.run(operator.look("gone"))
    lease = next(one for path, one in cluster.objects.items() if path.startswith(LEASES))
    lease["metadata"]["ownerReferences"] = []  # so that the garbage collector is no help
    del cluster.objects[f"{RESETS}/gone"]
    cluster.settle()
    del cluster.answers["node-1"]
    cluster.add_reset("one", nodeName="node-1")
    live(cluster, operator=operator)
    assert cluster.status("one")["phase"] == "Complete"
    assert [path for path in cluster.objects if path.startswith(LEASES)] == []


def test_a_lease_that_somebody_made_by_hand_is_respected() -> None:
    cluster = Cluster("node-1")
    cluster._put(f"{LEASES}/node-node-1", {"metadata": {"name": "node-node-1"}, "spec": {"holderIdentity": "anna"}})
    cluster.add_reset("one", nodeName="node-1", timeoutSeconds=30)
    live(cluster)
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Failed", "WaitingForLock")
    assert "anna" in status["message"]
    assert cluster.runs == []
    assert f"{LEASES}/node-node-1" in cluster.objects


def test_a_pod_that_does_not_leave_is_condemned_after_its_grace_period() -> None:
    cluster = Cluster("node-1")
    cluster.add_pod("llama-0", "node-1")
    pod = cluster.objects["/api/v1/namespaces/default/pods/llama-0"]
    pod["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:30Z"  # 30 s from now
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1", scope="All", pods="Delete")
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))
    assert cluster.status("one")["message"] == "node node-1: waiting for pod default/llama-0 to leave"
    cluster.pass_s(55)
    asyncio.run(operator.look("one"))
    assert plans(cluster) == []
    cluster.pass_s(10)
    cluster.beat()
    asyncio.run(operator.look("one"))
    assert [plan["condemnedPods"] for plan in plans(cluster)] == [[pod["metadata"]["uid"]]]


def test_pods_of_daemon_sets_and_those_without_gpus_stay() -> None:
    cluster = Cluster("node-1")
    for name, gpus in (("exporter", 1), ("web", 0)):
        cluster.add_pod(name, "node-1", gpus=gpus)
    exporter = cluster.objects["/api/v1/namespaces/default/pods/exporter"]
    exporter["metadata"]["ownerReferences"] = [
        {"kind": "DaemonSet", "uid": exporter["metadata"]["uid"], "controller": True}
    ]
    cluster.add_reset("one", nodeName="node-1", scope="All", pods="Delete")
    live(cluster)
    assert cluster.status("one")["phase"] == "Complete"
    assert {"/api/v1/namespaces/default/pods/exporter", "/api/v1/namespaces/default/pods/web"} <= cluster.objects.keys()


def test_other_finalizers_and_annotations_are_left_alone() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1")
    metadata = cluster.reset("one")["metadata"]
    metadata |= {"finalizers": ["example.org/audit"], "annotations": {"who": "anna"}}
    asyncio.run(Operator(cluster).run("one", until=lambda: "cleanslate.dev/ended" in annotations(cluster)))
    asyncio.run(Operator(cluster).look("one"))
    assert cluster.reset("one")["metadata"]["finalizers"] == ["example.org/audit"]
    assert annotations(cluster)["who"] == "anna"


def annotations(cluster: Cluster) -> dict[str, str]:
    return dict(cluster.reset("one")["metadata"].get("annotations", {}))


def test_suspending_a_running_reset_holds_its_next_nodes() -> None:
    cluster = Cluster()
    for number in range(3):
        cluster.add_node(f"node-{number}", pool="a")
    cluster.add_reset("one", nodeSelector={"pool": "a"}, rollout={"maxConcurrent": 1})
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))
    cluster.settle()
    cluster.reset("one")["spec"]["suspend"] = True
    for _ in range(5):
        asyncio.run(operator.look("one"))
        cluster.settle()
        cluster.pass_s(2)
    assert cluster.runs == ["node-0"]
    assert cluster.status("one")["phase"] == "Suspended"
    assert conditions(cluster)["Suspended"] == "True"
    cluster.reset("one")["spec"]["suspend"] = False
    live(cluster, operator=operator)
    assert cluster.runs == ["node-0", "node-1", "node-2"]


@pytest.mark.parametrize("text", ["", "[]", '{"node-1": 7}', '{"node-1": ["a"]}'])
def test_a_daemon_set_that_somebody_edited_is_made_right(text: str) -> None:
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1")
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))
    daemon_set = next(one for path, one in cluster.objects.items() if path.startswith(DAEMON_SETS))
    daemon_set["metadata"]["annotations"]["cleanslate.dev/covered"] = text
    del cluster.answers["node-1"]
    live(cluster, operator=operator)
    assert cluster.status("one")["phase"] == "Complete"
    assert cluster.left() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "cleanslate.dev/record/v1"}'])
def test_a_record_that_somebody_spoiled_ends_the_reset_and_undoes_it(text: str) -> None:
    """It is not known which nodes are done, so none is reset again."""
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1")
    asyncio.run(Operator(cluster).look("one"))
    spoiled = next(one for path, one in cluster.objects.items() if path.startswith(MAPS) and "-record-" in path)
    spoiled["data"] = {"record.json": text}
    live(cluster, operator=Operator(cluster))
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Failed", "InvalidSpec")
    assert "cannot read the record" in status["message"]
    assert cluster.left() == []


def test_a_reset_made_anew_under_the_same_name_is_another_one() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1")
    operator = live(cluster)
    del cluster.objects[f"{RESETS}/one"]
    cluster.add_reset("one", nodeName="node-1")
    live(cluster, operator=operator)
    assert cluster.runs == ["node-1", "node-1"]
    assert cluster.status("one")["phase"] == "Complete"


def test_a_reset_that_cannot_be_understood_leaves_others_alone() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("bad")
    cluster.add_reset("one", nodeName="node-1")
    operator = live(cluster, "bad")
    live(cluster, "one", operator)
    assert cluster.status("bad")["reason"] == "InvalidSpec"
    assert cluster.status("one")["phase"] == "Complete"


def test_an_error_of_the_api_server_is_the_queues_to_retry() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1")

    def fail(verb: str, path: str) -> None:
        raise Unavailable(request=path, message="no answer")

    cluster.fail = fail
    with pytest.raises(Unavailable):
        asyncio.run(Operator(cluster).look("one"))


def test_two_resets_of_overlapping_pools_never_meet_on_a_node() -> None:
    cluster = Cluster()
    for number in range(4):
        cluster.add_node(f"node-{number}", pool="a", all="yes")
    cluster.answers["node-2"] = lambda: summary("node-2")
    cluster.add_reset("one", nodeSelector={"pool": "a"}, rollout={"maxConcurrent": 2})
    cluster.add_reset("two", nodeSelector={"all": "yes"}, rollout={"maxConcurrent": 3})
    operator = Operator(cluster)
    for _ in range(30):
        for name in ("one", "two"):
            asyncio.run(operator.look(name))
            locks = [one for path, one in cluster.objects.items() if path.startswith(LEASES)]
            holders = [one["metadata"]["annotations"]["cleanslate.dev/node"] for one in locks]
            assert len(holders) == len(set(holders))
            cluster.settle()
        cluster.pass_s(2)
    assert [cluster.status(name)["phase"] for name in ("one", "two")] == ["Complete", "Complete"]
    assert sorted(cluster.runs) == sorted([f"node-{number}" for number in range(4)] * 2)
    assert cluster.left() == []


def test_a_right_that_is_missing_is_said_on_the_reset() -> None:
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1")

    def fail(verb: str, path: str) -> None:
        if verb == "create":
            raise Denied(request=path, status=403, reason="Forbidden", message="cannot create resource configmaps")

    cluster.fail = fail
    operator = Operator(cluster)
    with pytest.raises(Denied):
        asyncio.run(operator.look("one"))
    reason, message, warning = operator.recorder.told[-1]
    assert (reason, warning) == ("CannotGoOn", True)
    assert "cannot create resource configmaps" in message
    assert message.endswith("are the chart, its CRD and the operator of one release?")


def test_a_node_that_live_work_uses_makes_the_reason_busy() -> None:
    cluster = Cluster("node-1")
    busy = [{"index": 0, "uuid": "GPU-0", "result": "Busy", "usedBytes": 1 << 30, "message": "in use"}]
    cluster.answers["node-1"] = lambda: summary("node-1", gpus=busy)
    cluster.add_reset("one", nodeName="node-1")
    live(cluster)
    status = cluster.status("one")
    assert (status["phase"], status["reason"]) == ("Complete", "Busy")
    assert (status["nodes"]["busy"], status["nodes"]["clean"]) == (1, 0)


def test_slow_nodes_are_looked_at_now_and_then_only() -> None:
    """However often something happens meanwhile."""
    cluster = Cluster()
    for number in range(20):
        cluster.add_node(f"node-{number:02}", pool="a")
        cluster.answers[f"node-{number:02}"] = lambda: None
    cluster.add_reset("one", nodeSelector={"pool": "a"}, rollout={"maxConcurrent": 20})
    operator, looked = Operator(cluster), 0

    def count(verb: str, path: str) -> None:
        nonlocal looked
        looked += verb == "get" and path.startswith(NODES)

    asyncio.run(operator.look("one"))
    cluster.fail = count
    for _ in range(60):
        cluster.pass_s(2)
        asyncio.run(operator.look("one"))
    assert 20 * 3 <= looked <= 20 * 5  # at 10, 40, 70 and 100 s of 120


def test_a_lock_is_kept_while_a_pod_may_have_been_made_unseen() -> None:
    """At the deadline there is no pod yet; the DaemonSet controller makes one in the very moment."""
    cluster = Cluster("node-1")
    cluster.add_reset("one", nodeName="node-1", timeoutSeconds=30)
    operator = Operator(cluster)
    asyncio.run(operator.look("one"))  # and the cluster has not done anything since
    cluster.pass_s(31)
    asyncio.run(operator.look("one"))
    assert [path for path in cluster.objects if path.startswith(DAEMON_SETS)] == []
    assert [path for path in cluster.objects if path.startswith(LEASES)] != []
    asyncio.run(operator.look("one"))
    assert cluster.status("one")["reason"] == "NoResult"
    assert cluster.left() == []


def test_a_taint_is_taken_away_also_if_the_spec_cannot_be_understood_any_more() -> None:
    cluster = Cluster("node-1")
    cluster.answers["node-1"] = lambda: None
    cluster.add_reset("one", nodeName="node-1", scope="All")
    asyncio.run(Operator(cluster).look("one"))
    assert cluster.objects[f"{NODES}/node-1"]["spec"]["taints"]
    cluster.reset("one")["spec"]["scope"] = "Everything"
    live(cluster, operator=Operator(cluster))
    assert cluster.status("one")["reason"] == "InvalidSpec"
    assert cluster.left() == []
