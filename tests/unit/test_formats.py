"""The plan is refused as a whole if any part is wrong; the summary fits a termination message whatever the report holds."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanslate import formats
from cleanslate.formats import PLAN_LIMIT_BYTES, PLAN_SCHEMA, SUMMARY_LIMIT_BYTES, PlanError, parse_plan, summarize
from unit.examples import CONTAINER, NOW_S, OTHER_POD, POD, STATIC_POD

MADE_AT = datetime.fromtimestamp(NOW_S, UTC)


def document(**changes: Any) -> dict[str, Any]:
    """A good plan made at NOW_S, with changes."""
    good = {
        "schema": PLAN_SCHEMA,
        "snapshotTime": MADE_AT.isoformat(),
        "livePods": {POD: [CONTAINER, f"containerd://{'ab' * 32}"], STATIC_POD: []},
        "condemnedPods": [OTHER_POD],
        "marginSeconds": 5,
    }
    return good | changes


def parsed(content: Any, *, now_s: float = NOW_S) -> formats.Plan:
    """The plan in a document."""
    return parse_plan(json.dumps(content).encode(), now_s=now_s)


def test_a_good_plan_says_who_lives() -> None:
    """Container IDs come with or without their engine's prefix; a static pod's UID is its hash."""
    plan = parsed(document())
    assert plan.snapshot_time_s == NOW_S
    assert plan.live_pods == {POD: {CONTAINER, "ab" * 32}, STATIC_POD: frozenset()}
    assert plan.condemned_pods == {OTHER_POD}
    assert plan.margin_s == 5.0


@pytest.mark.parametrize("text", ["2027-01-15T08:00:00Z", "2027-01-15T09:00:00+01:00", "2027-01-15T08:00:00.000Z"])
def test_the_time_may_be_written_in_any_zone(text: str) -> None:
    """What Kubernetes and Python write."""
    assert parsed(document(snapshotTime=text)).snapshot_time_s == NOW_S


@pytest.mark.parametrize(("age_s", "fresh"), [(0, True), (899, True), (901, False), (-599, True), (-601, False)])
def test_a_plan_is_refused_if_it_is_stale_or_from_the_future(age_s: int, fresh: bool) -> None:
    """An old picture says too little about who lives; clocks differ by minutes at worst."""
    made = (MADE_AT - timedelta(seconds=age_s)).isoformat()
    if fresh:
        assert parsed(document(snapshotTime=made)).snapshot_time_s == NOW_S - age_s
        return
    with pytest.raises(PlanError, match=rf"made {abs(age_s)} s (ago|in the future), more than"):
        parsed(document(snapshotTime=made))


WRONG = {
    "another schema": {"schema": "cleanslate.dev/plan/v2"},
    "no schema": {"schema": None},
    "a key too many": {"extra": 1},
    "a time without zone": {"snapshotTime": "2027-01-15T08:00:00"},
    "a day": {"snapshotTime": "2027-01-15"},
    "no time": {"snapshotTime": "yesterday"},
    "a time as a number": {"snapshotTime": NOW_S},
    "a year beyond all": {"snapshotTime": "99999-01-15T08:00:00Z"},
    "the first year, in a zone before it": {"snapshotTime": "0001-01-01T00:00:00+23:59"},
    "a margin as text": {"marginSeconds": "5"},
    "a margin as truth": {"marginSeconds": True},
    "a margin below zero": {"marginSeconds": -1},
    "a margin of hours": {"marginSeconds": 3601},
    "no margin": {"marginSeconds": None},
    "pods as a list": {"livePods": [POD]},
    "a pod's containers as text": {"livePods": {POD: CONTAINER}},
    "a pod's containers as nothing": {"livePods": {POD: None}},
    "a pod by name": {"livePods": {"llama-0": []}},
    "a pod's UID in capitals": {"livePods": {POD.upper(): []}},
    "a pod's UID with a line feed": {"livePods": {f"{POD}\n": []}},
    "a pod's UID as systemd writes it": {"livePods": {POD.replace("-", "_"): []}},
    "a container's ID cut": {"livePods": {POD: [CONTAINER[:12]]}},
    "a container's ID with a line feed": {"livePods": {POD: [f"{CONTAINER}\n"]}},
    "a container as a number": {"livePods": {POD: [1]}},
    "condemned pods as an object": {"condemnedPods": {OTHER_POD: []}},
    "a condemned pod by name": {"condemnedPods": ["llama-0"]},
    "a condemned pod as nothing": {"condemnedPods": [None]},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_a_plan_with_one_wrong_part_is_refused(changes: dict[str, Any]) -> None:
    """No part of it is acted on; the reason is one line and quotes nothing of the plan."""
    with pytest.raises(PlanError) as refused:
        parsed(document(**changes))
    assert "\n" not in str(refused.value)
    assert str(refused.value)


@pytest.mark.parametrize("key", sorted(document()))
def test_a_plan_without_one_of_its_keys_is_refused(key: str) -> None:
    """Nothing has a default: what is not said is not known."""
    content = document()
    del content[key]
    with pytest.raises(PlanError):
        parsed(content)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"{",
        b"\xff\xfe{}",
        b"[" * 100_000,
        json.dumps(document()).encode()[:-1],
        json.dumps(document()).encode() + b"{}",
        json.dumps(document()).replace('"marginSeconds": 5', '"marginSeconds": NaN').encode(),
        json.dumps(document()).replace('"marginSeconds": 5', '"marginSeconds": Infinity').encode(),
        json.dumps(document()).replace('"marginSeconds": 5', '"marginSeconds": 1, "marginSeconds": 5').encode(),
        json.dumps(document()).replace(f'"{STATIC_POD}"', f'"{POD}"').encode(),
        json.dumps(document()).encode() + b" " * PLAN_LIMIT_BYTES,
    ],
    ids=[
        "empty",
        "nothing",
        "a list",
        "no keys",
        "cut",
        "not UTF-8",
        "deeply nested",
        "cut at the end",
        "two",
        "not a number",
        "infinity",
        "a key twice",
        "a pod twice",
        "too large",
    ],
)
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    """Whatever a ConfigMap may come to hold, half written files included."""
    with pytest.raises(PlanError):
        parse_plan(data, now_s=NOW_S)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_arbitrary_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    """The one error that callers handle."""
    with pytest.raises(PlanError):
        parse_plan(data, now_s=NOW_S)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([POD, CONTAINER]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(document())), values)
def test_arbitrary_values_are_understood_or_refused(key: str, value: Any) -> None:
    """No value of any key raises anything but PlanError."""
    try:
        plan = parsed(document(**{key: value}))
    except PlanError:
        return
    assert set(plan.live_pods) <= {POD, STATIC_POD}
    assert 0 <= plan.margin_s <= formats.PLAN_MAX_MARGIN_S


hostile = st.one_of(
    st.text(max_size=30),
    st.text(st.characters(categories=["Cs", "Cc"]), max_size=30),
    st.sampled_from(["𝕏" * 700, "\udc80" * 700, '"\\' * 700, "\x00" * 700, "a" * 9_000, "é" * 5_000]),
)
counts = st.fixed_dictionaries(dict.fromkeys(("removedCount", "keptCount", "bytesFreed"), st.integers(0, 2**63)))
gpus = st.fixed_dictionaries(
    {
        "index": st.integers(-1, 200),
        "uuid": st.none() | hostile,
        "result": st.sampled_from(["Clean", "Busy", "Residual", "Missing"]),
        "usedBytes": st.none() | st.integers(0, 2**63),
        "message": hostile,
    }
)
processes = st.fixed_dictionaries(
    {
        "pid": st.integers(0, 2**31),
        "title": hostile,
        "owner": st.fixed_dictionaries({"kind": st.just("pod"), "name": hostile}),
        "verdict": st.sampled_from(["Keep", "End"]),
        "outcome": st.sampled_from(["Kept", "Ended", "NotEnded"]),
        "reason": hostile,
    }
)
reports = st.fixed_dictionaries(
    {
        "schema": st.just("cleanslate.dev/report/v1"),
        "verb": st.just("reset"),
        "scope": st.sampled_from([None, "orphans", "all"]),
        "dryRun": st.booleans(),
        "gpuBytesFreed": st.integers(0, 2**63),
        "host": hostile,
        "startedAt": st.just("2027-01-15T08:00:00.000Z"),
        "durationSeconds": st.floats(0, 1e9),
        "result": st.sampled_from(["Clean", "NotClean", "CannotTell", "Refused"]),
        "exitCode": st.sampled_from([0, 3, 4, 5]),
        "message": hostile,
        "sharedMemory": counts,
        "caches": counts,
        "logs": counts,
        "gpus": st.lists(gpus, max_size=4),
        "processes": st.lists(processes, max_size=4),
        "warnings": st.lists(hostile, max_size=4),
    }
)


def check_summary(report: dict[str, Any]) -> dict[str, Any]:
    """The summary as JSON, after checking what must hold of every one."""
    data = summarize(report)
    assert len(data) <= SUMMARY_LIMIT_BYTES
    assert data.isascii()
    found: dict[str, Any] = json.loads(data)
    for part in ("gpus", "processes", "warnings"):
        assert len(found[part]) + found["omitted"].get(part, 0) == len(report[part])
    asked = {key: report[key] for key in ("schema", "verb", "scope", "dryRun", "startedAt")}
    head = asked | {key: report[key] for key in ("durationSeconds", "result", "exitCode", "gpuBytesFreed")}
    assert {key: found[key] for key in head} == head
    return found


@settings(max_examples=30, deadline=None)
@given(reports, st.integers(0, 60))
def test_a_summary_is_valid_json_that_fits_whatever_the_report_holds(report: dict[str, Any], times: int) -> None:
    """The kubelet cuts what is longer, and cut JSON is none: what has no room is counted instead."""
    for part in ("gpus", "processes", "warnings"):
        report[part] = report[part] * (times + 1)
    check_summary(report)


def small(**changes: Any) -> dict[str, Any]:
    """A report of nothing."""
    none = {"removedCount": 0, "keptCount": 0, "bytesFreed": 0}
    head = {"schema": "cleanslate.dev/report/v1", "verb": "reset", "host": "gpu-17", "startedAt": "2027"}
    head |= {"scope": "orphans", "dryRun": False, "gpuBytesFreed": 0}
    whole = {"durationSeconds": 1.5, "result": "NotClean", "exitCode": 3, "message": "pid 1: stays"}
    files = {"sharedMemory": none, "caches": none, "logs": none}
    return head | whole | files | {"gpus": [], "processes": [], "warnings": []} | changes


def one_gpu(index: int, result: str) -> dict[str, Any]:
    """One GPU of a report."""
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "result": result,
        "usedBytes": 0,
        "message": f"GPU {index}: {result}",
    }


def one_process(pid: int, outcome: str) -> dict[str, Any]:
    """One process of a report."""
    belongs = {"kind": "pod", "name": POD}
    return {"pid": pid, "title": "t", "owner": belongs, "verdict": "End", "outcome": outcome, "reason": "r" * 100}


def test_a_small_report_is_summarized_whole() -> None:
    """Nothing is omitted that has room."""
    found = check_summary(small(gpus=[one_gpu(0, "Clean")], processes=[one_process(7, "Ended")], warnings=["w"]))
    assert found["omitted"] == {}
    assert found["host"] == "gpu-17"
    assert found["message"] == "pid 1: stays"
    assert found["gpus"] == [one_gpu(0, "Clean")]
    assert found["processes"][0]["owner"] == f"pod {POD}"


def test_what_is_not_clean_comes_first() -> None:
    """Of many GPUs and processes the summary shows the ones to look at."""
    many = [one_gpu(index, "Clean") for index in range(300)] + [one_gpu(300, "Residual")]
    processes = [one_process(pid, "Ended") for pid in range(1, 500)] + [one_process(500, "Unkillable")]
    found = check_summary(small(gpus=many, processes=processes))
    assert found["gpus"][0]["index"] == 300
    assert found["processes"][0]["pid"] == 500
    assert found["omitted"]["gpus"] > 250


def test_one_long_list_does_not_crowd_out_the_others() -> None:
    """Lists are filled in turn."""
    found = check_summary(
        small(gpus=[one_gpu(0, "Busy")], warnings=["w" * 160] * 500, processes=[one_process(1, "Kept")])
    )
    assert [len(found[part]) for part in ("gpus", "processes")] == [1, 1]
    assert len(found["warnings"]) > 5


def test_a_nodes_name_is_summarized_whole() -> None:
    """A node may have a name of 253 characters, and whoever reads the summary compares it with the node's."""
    assert check_summary(small(host="n" * 253))["host"] == "n" * 253


@pytest.mark.parametrize("uid", [POD, STATIC_POD])
def test_what_a_plan_names_pods_by(uid: str) -> None:
    """The same as parse_plan takes."""
    assert formats.is_pod_uid(uid)
    assert not formats.is_pod_uid(uid + "\n")
    assert not formats.is_pod_uid(uid.upper())


def test_what_a_plan_names_containers_by() -> None:
    """With and without the engine's prefix."""
    assert formats.is_container_id(CONTAINER)
    assert formats.is_container_id(f"cri-o://{CONTAINER}")
    assert not formats.is_container_id(CONTAINER[1:])
    assert not formats.is_container_id("containerd://")


def test_megabytes_of_text_are_cut_soon() -> None:
    """Also where every character takes twelve bytes in JSON."""
    found = check_summary(small(message="𝕏" * 1_000_000, host="\udcff" * 1_000_000, warnings=["é" * 1_000_000]))
    assert set(found["message"]) == {"𝕏"}
    assert len(found["warnings"]) == 1
