"""Plans of nodes: whatever may run is named, what has ended is not, and what can't be understood makes no plan."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleanslate import formats
from cleanslate_operator import names, nodeplan
from cleanslate_operator.nodeplan import PlanError
from unit.operator.resetpods import Object, reset

POD = "5e1c7f3a-1b2c-4d5e-8f90-a1b2c3d4e5f6"
OTHER = "0d9c8b7a-6f5e-4d3c-9b2a-1f0e9d8c7b6a"
STATIC = "8f14e45fceea167a5a36dedd4bea2543"
ONE, TWO, THREE = "1a" * 32, "2b" * 32, "3c" * 32
NOW_S = 1_800_000_000.25


def container(digits: str, state: str = "running", scheme: str = "containerd://") -> Object:
    """The status of a container."""
    return {"name": "server", "containerID": scheme + digits, "state": {state: {}}}


def pod(uid: str = POD, phase: str = "Running", annotations: Object | None = None, **status: Any) -> Object:
    """A pod as the API lists it."""
    metadata = {"namespace": "ml", "name": "llama-0", "uid": uid, "annotations": annotations or {}}
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def parsed(*pods: Object, condemned: tuple[str, ...] = (), margin_s: float = 5.0) -> formats.Plan:
    """The plan of these pods as the node program reads it."""
    data = nodeplan.document(pods, condemned, snapshot_time_s=NOW_S, margin_s=margin_s)
    return formats.parse_plan(data, now_s=NOW_S)


def test_the_node_program_reads_what_was_meant() -> None:
    """Time, margin, pods, containers and the condemned."""
    plan = parsed(pod(containerStatuses=[container(ONE)]), pod(OTHER), condemned=(OTHER, OTHER), margin_s=7.5)
    assert plan.snapshot_time_s == NOW_S
    assert plan.margin_s == 7.5
    assert plan.live_pods == {POD: frozenset({ONE}), OTHER: frozenset()}
    assert plan.condemned_pods == {OTHER}


def test_running_containers_of_every_kind_are_named() -> None:
    """Sidecars are init containers, and a debugger's is an ephemeral one."""
    plan = parsed(
        pod(
            containerStatuses=[container(ONE), container("4d" * 32, "terminated")],
            initContainerStatuses=[container(TWO)],
            ephemeralContainerStatuses=[container(THREE, scheme="cri-o://")],
        )
    )
    assert plan.live_pods[POD] == {ONE, TWO, THREE}


def test_a_container_that_waits_is_not_named_and_its_pod_lives() -> None:
    """It has no ID yet, or that of its last run."""
    waiting = {"name": "server", "containerID": "", "state": {"waiting": {"reason": "ContainerCreating"}}}
    assert parsed(pod(containerStatuses=[waiting, container(ONE, "waiting")])).live_pods == {POD: frozenset()}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_whose_containers_have_ended_is_not_live(phase: str) -> None:
    """So what it left is left over."""
    assert parsed(pod(phase=phase, containerStatuses=[container(ONE, "terminated")])).live_pods == {}


def test_a_pod_called_failed_is_live_while_a_container_of_it_runs() -> None:
    """An eviction, or a controller, may name the phase before the kubelet has ended the containers."""
    assert parsed(pod(phase="Failed", containerStatuses=[container(ONE)])).live_pods == {POD: {ONE}}


def test_a_pod_being_deleted_is_live() -> None:
    """Its server may be finishing requests."""
    leaving = pod(containerStatuses=[container(ONE)])
    leaving["metadata"]["deletionTimestamp"] = "2026-12-01T12:00:00Z"
    assert parsed(leaving).live_pods == {POD: {ONE}}


def test_a_static_pod_is_known_by_its_config_hash_too() -> None:
    """Its processes' cgroups carry that one, and the API another."""
    mirror = {"kubernetes.io/config.mirror": STATIC, "kubernetes.io/config.hash": STATIC}
    assert parsed(pod(annotations=mirror, containerStatuses=[container(ONE)])).live_pods == {POD: {ONE}, STATIC: {ONE}}


def test_an_annotation_alone_makes_no_static_pod() -> None:
    """Anybody may write one to keep another pod's leftovers alive, and garbage in it stops no reset."""
    assert parsed(pod(annotations={"kubernetes.io/config.hash": STATIC})).live_pods.keys() == {POD}
    garbage = {"kubernetes.io/config.mirror": "x", "kubernetes.io/config.hash": "../x"}
    assert parsed(pod(annotations=garbage)).live_pods.keys() == {POD}


REFUSED: dict[str, tuple[Object, str]] = {
    "a running container without an ID": (
        pod(containerStatuses=[{"name": "server", "state": {"running": {}}}]),
        "pod ml/llama-0: cannot plan for it: container server runs, and its ID is not one",
    ),
    "a running container with a strange ID": (pod(containerStatuses=[container("1a")]), "its ID is not one"),
    "a pod without a UID": (pod(uid=""), "pod ml/llama-0: cannot plan for it: its UID is not one"),
    "a pod with a UID of another kind": (pod(uid="../../etc"), "its UID is not one"),
    "statuses that are none": (pod(containerStatuses="all well"), "its container statuses are no list of objects"),
    "a status that is none": (pod(containerStatuses=[None]), "its container statuses are no list of objects"),
}


@pytest.mark.parametrize(("made", "cause"), REFUSED.values(), ids=REFUSED.keys())
def test_a_pod_that_is_not_understood_makes_no_plan(made: Object, cause: str) -> None:
    """Rather no reset than a live container taken for a leftover."""
    with pytest.raises(PlanError) as refused:
        parsed(pod(OTHER), made)
    assert cause in str(refused.value)


@pytest.mark.parametrize("margin_s", [-1.0, 3601.0, float("nan"), float("inf")])
def test_a_margin_out_of_range_makes_no_plan(margin_s: float) -> None:
    """The node program would refuse it, a minute later."""
    with pytest.raises(PlanError, match=r"marginSeconds|not valid JSON"):
        parsed(margin_s=margin_s)


def test_too_many_pods_make_no_plan() -> None:
    """More than the node program reads."""
    many = [pod(f"{number:08x}-0000-4000-8000-000000000000") for number in range(formats.PLAN_MAX_PODS + 1)]
    with pytest.raises(PlanError, match="at most 10000 pods"):
        parsed(*many)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just(POD),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["state", "running", "uid", "phase", "containerID"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(["containerStatuses", "initContainerStatuses", "phase"]), json_values)
def test_any_status_makes_a_plan_or_a_plan_error(key: str, value: Any) -> None:
    """Never another error, and the pod is live unless it says that it is over."""
    live, refusal = {POD}, "pod ml/llama-0: "
    try:
        live = parsed(pod(**{key: value}) if key != "phase" else pod(phase=value)).live_pods.keys()
    except PlanError as error:
        refusal = str(error)
    assert refusal.startswith("pod ml/llama-0: ")
    assert POD in live


def test_the_same_plans_make_the_same_config_maps() -> None:
    """In whatever order they come: what was made before a crash is found again."""
    plans = {"gpu-2": b"{}", "gpu-1": b"[]"}
    (made,) = nodeplan.config_maps(reset(), plans)
    assert nodeplan.config_maps(reset(), dict(reversed(plans.items()))) == [made]
    assert made["data"] == {"gpu-1.json": "[]", "gpu-2.json": "{}"}
    assert nodeplan.nodes_of(made) == ["gpu-1", "gpu-2"]
    (other,) = nodeplan.config_maps(reset(), plans | {"gpu-1": b"{}"})
    assert other["metadata"]["name"] != made["metadata"]["name"]


def test_a_config_map_of_plans_is_the_resets_own_and_never_changes() -> None:
    """What a pod mounts is what was written for it, and it goes when the reset goes."""
    (made,) = nodeplan.config_maps(reset(), {"gpu-1": b"{}"})
    assert made["immutable"] is True
    assert made["metadata"]["ownerReferences"] == [names.owner("pool-a", reset().uid)]
    assert made["metadata"]["labels"][names.RESET_UID] == reset().uid
    assert made["metadata"]["labels"][names.ROLE] == names.ROLE_PLAN
    assert made["metadata"]["name"].startswith("pool-a-5e1c7f3a-plan-")


def test_many_plans_are_packed_and_none_is_split() -> None:
    """Each ConfigMap stays below what the API holds, also as JSON within JSON; together they hold every plan once."""
    live = pod(containerStatuses=[container(f"{number:064x}") for number in range(110)])
    plan = nodeplan.document([live], [], snapshot_time_s=NOW_S, margin_s=5)
    plans = {f"{number:04}.{'n' * 240}": plan for number in range(500)}
    made = nodeplan.config_maps(reset(), plans)
    assert 1 < len(made) < 10
    assert len({one["metadata"]["name"] for one in made}) == len(made)
    assert [node for one in made for node in nodeplan.nodes_of(one)] == sorted(plans)
    assert all(sum(map(len, (*one["data"], *one["data"].values()))) <= 900_000 for one in made)
    assert all(len(json.dumps(one)) < 1 << 20 for one in made)


def test_no_plan_makes_no_config_map() -> None:
    """An empty one would say nothing."""
    assert nodeplan.config_maps(reset(), {}) == []


def test_a_plan_that_fits_nowhere_is_refused() -> None:
    """With the node's name and the numbers."""
    with pytest.raises(PlanError, match=r"^the plan of node gpu-1: cannot store: 900000 bytes, at most 900000 fit"):
        nodeplan.config_maps(reset(), {"gpu-0": b"{}", "gpu-1": b"x" * 900_000})
