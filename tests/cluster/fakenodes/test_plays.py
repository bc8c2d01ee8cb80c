"""Simulated pods go through the states that real ones do; no cluster is needed for that."""

import math
from typing import Any

import pytest

from cluster.fakenodes import behaviours, plays, pods, statuses
from cluster.fakenodes.behaviours import FOREVER, OUT_OF_MEMORY, Behaviour, Rule, Run, Start

NOW_S = 1_800_000_000.0


def pod(*, init: int = 1, main: int = 1, policy: str = "Always", sidecar: bool = False) -> pods.Pod:
    """A bound pod with so many containers, called i0…, m0…"""
    inits = [{"name": f"i{number}", "image": "image"} for number in range(init)]
    if sidecar:
        inits.append({"name": "side", "image": "image", "restartPolicy": "Always"})
    return pods.parse(
        {
            "metadata": {"uid": "u", "namespace": "n", "name": "p", "labels": {"app": "x"}, "generation": 3},
            "spec": {
                "nodeName": "sim-0001",
                "restartPolicy": policy,
                "initContainers": inits,
                "containers": [{"name": f"m{number}", "image": "image"} for number in range(main)],
            },
        }
    )


def shown(play: plays.Play, *, limit: int = 20) -> list[tuple[float, dict[str, Any]]]:
    """What an observer sees: each state that lasts, with its duration, up to the one that lasts for ever."""
    seen = []
    for stays_s in play.moments():
        if stays_s > 0:
            seen.append((stays_s, statuses.patch(play, host_ip="10.0.0.1", pod_ip="10.1.0.1")["status"]))
        if stays_s == math.inf or len(seen) == limit:
            break
    return seen


def played(behaviour: Behaviour, **fields: Any) -> list[tuple[float, dict[str, Any]]]:
    """The same for a fresh pod."""
    return shown(plays.Play(pod(**fields), behaviour, lambda: NOW_S))


def conditions(status: dict[str, Any]) -> dict[str, str]:
    """Condition type to status."""
    return {one["type"]: one["status"] for one in status["conditions"]}


def test_pod_without_delays_is_one_write() -> None:
    """Init container done, main container running and ready: the first state that anybody sees."""
    [(stays_s, status)] = played(behaviours.init_says("clean"))
    assert stays_s == math.inf
    assert status["phase"] == "Running"
    assert set(conditions(status).values()) == {"True"}
    ended = status["initContainerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["message"], ended["reason"]) == (0, "clean", "Completed")
    assert status["containerStatuses"][0]["ready"]


def test_running_init_container_is_seen_first() -> None:
    """A delay makes a state of its own: Pending, not initialized, and no main container yet."""
    [(first_s, first), (last_s, last)] = played(behaviours.init_says("clean", after_s=2.5))
    assert (first_s, last_s) == (2.5, math.inf)
    assert first["phase"] == "Pending"
    assert "running" in first["initContainerStatuses"][0]["state"]
    assert first["containerStatuses"][0]["state"] == {"waiting": {"reason": "PodInitializing"}}
    assert conditions(first)["Initialized"] == "False"
    assert last["phase"] == "Running"


@pytest.mark.parametrize(("policy", "phase", "restarts"), [("Never", "Failed", 0), ("Always", "Pending", 5)])
def test_failing_init_container_follows_the_restart_policy(policy: str, phase: str, restarts: int) -> None:
    """Never: the pod has failed. Always: again and again, with a growing pause."""
    seen = played(behaviours.init_says("dirty", exit_code=3), policy=policy)
    status = seen[min(10, len(seen) - 1)][1]
    assert status["phase"] == phase
    one = status["initContainerStatuses"][0]
    ended = one["state"].get("terminated") or one["lastState"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (3, "dirty")
    assert one["restartCount"] == restarts


def test_crashing_container_backs_off_as_the_kubelet_does() -> None:
    """At once, then after 10 s, 20 s, 40 s; the reason is the one given; never two containers of one ID."""
    behaviour = Behaviour(main=(OUT_OF_MEMORY,))
    seen = played(behaviour, init=0)
    pauses = [stays for stays, status in seen if "waiting" in status["containerStatuses"][0]["state"]]
    assert pauses[:6] == [10, 20, 40, 80, 160, 300]
    ended = [status for _, status in seen if "terminated" in status["containerStatuses"][0]["state"]]
    assert {one["containerStatuses"][0]["state"]["terminated"]["reason"] for one in ended} == {"OOMKilled"}
    assert {one["phase"] for one in ended} == {"Running"}
    identities = [one["containerStatuses"][0]["containerID"] for one in ended]
    assert len(set(identities)) == len(identities) > 5


def test_successive_runs_are_played_in_order_and_the_last_repeats() -> None:
    """Fails once, then succeeds: one restart."""
    behaviour = Behaviour(init=(Run(exit_code=1), Run(message="clean")))
    status = played(behaviour)[-1][1]
    assert status["phase"] == "Running"
    one = status["initContainerStatuses"][0]
    assert one["restartCount"] == 1
    assert one["lastState"]["terminated"]["exitCode"] == 1
    assert one["state"]["terminated"]["message"] == "clean"


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (7, "Failed")])
def test_pod_that_is_not_restarted_ends(code: int, phase: str) -> None:
    """The exit codes of the main containers decide, when the last has ended."""
    behaviour = Behaviour(main=(Run(after_s=1),), named=(("m1", (Run(exit_code=code, after_s=3),)),))
    seen = played(behaviour, main=2, policy="Never")
    assert [stays for stays, _ in seen] == [1, 2, math.inf]
    assert [status["phase"] for _, status in seen] == ["Running", "Running", phase]
    assert conditions(seen[-1][1])["Ready"] == "False"


def test_image_that_is_missing_never_starts() -> None:
    """ErrImagePull, then ImagePullBackOff for ever, on the container whose turn it is."""
    seen = played(Behaviour(start=Start.IMAGE_MISSING))
    reasons = [status["initContainerStatuses"][0]["state"]["waiting"]["reason"] for _, status in seen]
    assert reasons == ["ErrImagePull", "ImagePullBackOff"]
    assert {status["phase"] for _, status in seen} == {"Pending"}


def test_sidecar_runs_beside_the_main_container() -> None:
    """It does not hold up the start, and counts for readiness."""
    [(_, status)] = played(Behaviour(), sidecar=True)
    assert status["phase"] == "Running"
    assert status["initContainerStatuses"][1]["state"].keys() == {"running"}
    assert conditions(status)["Ready"] == "True"


def test_new_behaviour_goes_on_from_where_the_pod_is() -> None:
    """An init container that hangs is let go: it ends with the new message, and was never restarted."""
    play = plays.Play(pod(), behaviours.init_never_ends(), lambda: NOW_S)
    assert shown(play)[-1][1]["phase"] == "Pending"
    play.behaviour = behaviours.init_says("late")
    status = shown(play)[-1][1]
    assert status["phase"] == "Running"
    assert status["initContainerStatuses"][0]["restartCount"] == 0
    assert status["initContainerStatuses"][0]["state"]["terminated"]["message"] == "late"


def test_server_is_ready_only_when_its_probe_passes() -> None:
    """Running, not ready; then both."""
    seen = played(Behaviour(main=(Run(exit_code=None, ready_after_s=40),)))
    assert [(stays, conditions(status)["Ready"]) for stays, status in seen] == [(40, "False"), (math.inf, "True")]


def test_deleted_pod_has_failed_and_its_containers_have_ended() -> None:
    """As the kubelet leaves it just before it removes it."""
    play = plays.Play(pod(), Behaviour(), lambda: NOW_S)
    shown(play)
    play.end()
    status = statuses.patch(play, host_ip="10.0.0.1", pod_ip="10.1.0.1")["status"]
    assert status["phase"] == "Failed"
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 143


def test_rules_survive_the_way_to_the_process() -> None:
    """What a test says is what is played."""
    rules = (
        Rule(
            node="sim-0*",
            labels=(("app", "x"),),
            behaviour=Behaviour(init=(Run(exit_code=1), FOREVER), named=(("a*", (OUT_OF_MEMORY,)),), deletion_s=None),
        ),
        Rule(pod="q-*", behaviour=Behaviour(start=Start.CREATING)),
    )
    assert behaviours.from_data(behaviours.to_data(rules)) == rules


def test_first_matching_rule_decides() -> None:
    """Node, namespace, pod and labels all have to match."""
    dirty, clean = behaviours.init_says("dirty"), behaviours.init_says("clean")
    rules = (Rule(node="sim-00*", labels=(("app", "x"),), behaviour=dirty), Rule(node="sim-*", behaviour=clean))
    found = [
        behaviours.choose(rules, node=node, namespace="n", pod="p", labels=labels)
        for node, labels in (("sim-0001", {"app": "x"}), ("sim-0001", {}), ("other", {}))
    ]
    assert found == [dirty, clean, Behaviour()]


def test_long_and_garbled_messages_are_what_they_say() -> None:
    """4,096 bytes exactly; and nothing that JSON could be read from."""
    assert len(behaviours.overlong().init[0].message.encode()) == behaviours.MESSAGE_LIMIT_BYTES
    assert "\ufffd" in behaviours.garbage().init[0].message
