"""What a reset pod tells: every way in which it can end or hang has its reason, and no node can break or fool the operator."""

import json
from typing import Any

import pytest

from cleanslate import formats, report
from cleanslate_operator import results
from cleanslate_operator.noderesult import Files, Gpu, GpuResult, NodeResult, Omitted, Process
from cleanslate_operator.results import NodeVerdict, Progress, Stage
from unit.operator.resetpods import (
    DAEMON_SET,
    FINISHED,
    GIB,
    GPU_0,
    NODE,
    UID,
    Object,
    ended,
    gpu,
    pod,
    process,
    summary,
    without_node,
)


def read(made: Object) -> NodeResult | Progress | None:
    """What the pod tells of NODE."""
    return results.read(made, NODE, DAEMON_SET)


def result_of(container: Object, **known: Any) -> NodeResult:
    """The result that the pod with this container status tells."""
    found = read(pod(container, **known))
    assert isinstance(found, NodeResult), found
    return found


def progress_of(made: Object) -> Progress:
    """How far the pod is."""
    found = read(made)
    assert isinstance(found, Progress), found
    return found


def waiting(reason: str, message: str = "") -> Object:
    """The status of a reset container that waits."""
    return {"name": "reset", "state": {"waiting": {"reason": reason, "message": message}}, "lastState": {}}


def test_a_clean_reset_tells_all_of_its_node() -> None:
    """Every part of the summary is in the result."""
    told = summary(
        gpus=[gpu(), gpu(index=1, usedBytes=None, uuid=None)],
        processes=[process()],
        sharedMemory={"removedCount": 3, "keptCount": 1, "bytesFreed": GIB},
        warnings=["pid 7: did not answer"],
        omitted={"warnings": 2},
        gpuBytesFreed=40 * GIB,
    )
    found = result_of(ended(told))
    assert found.result is NodeVerdict.CLEAN
    assert (found.node, found.reason, found.message) == (NODE, "Clean", "1 of 1 GPUs are clean")
    assert (found.finished_at, found.duration_s) == (FINISHED, 0.531)
    assert [one.uuid for one in found.gpus] == [GPU_0, None]
    assert [one.used_bytes for one in found.gpus] == [0, None]
    assert (found.processes[0].pid, found.processes[0].outcome) == (4711, "Ended")
    assert found.shared_memory == Files(removed_count=3, kept_count=1, bytes_freed=GIB)
    assert found.warnings == ("pid 7: did not answer",)
    assert found.omitted == Omitted(warnings=2)
    assert found.gpu_bytes_freed == 40 * GIB
    assert not found.dry_run


@pytest.mark.parametrize(
    ("known", "verdict", "reason"),
    [
        ({"gpus": [gpu("Busy"), gpu()]}, NodeVerdict.BUSY, "Busy"),
        ({"result": "NotClean", "exitCode": 3, "gpus": [gpu("Held")]}, NodeVerdict.NOT_CLEAN, "NotClean"),
        ({"result": "CannotTell", "exitCode": 4, "gpus": []}, NodeVerdict.FAILED, "CannotTell"),
        ({"result": "Refused", "exitCode": 5, "gpus": []}, NodeVerdict.FAILED, "Refused"),
    ],
)
def test_a_result_of_the_program_is_a_verdict_on_the_node(known: Object, verdict: NodeVerdict, reason: str) -> None:
    """As the exit code would say it, and its sentence is the node's."""
    found = result_of(ended(summary(message="what it is", **known)))
    assert (found.result, found.reason, found.message) == (verdict, reason, "what it is")


def test_a_dry_run_is_told_apart() -> None:
    """What would be ended is not clean, and nothing was changed."""
    row = process(outcome="WouldEnd")
    found = result_of(ended(summary(result="NotClean", exitCode=3, dryRun=True, processes=[row])))
    assert found.dry_run
    assert found.result is NodeVerdict.NOT_CLEAN


def test_keys_of_a_newer_program_are_left_out() -> None:
    """Keys may be added within a version."""
    told = summary(novel={"a": 1}, gpus=[gpu(novel=1)], processes=[process(novel=[])])
    assert result_of(ended(told)) == result_of(ended(summary(gpus=[gpu()], processes=[process()])))


WRONG = {
    "nothing": ("", "it left none"),
    "no text": (None, "it left none"),
    "garbage": ("\x00\xff garbage", "not a JSON object"),
    "half of one": (json.dumps(summary())[:200], "not a JSON object"),
    "a list": ("[]", "not a JSON object"),
    "nested deep": ("[" * 4000, "not a JSON object"),
    "a number of thousands of digits": ('{"schema":' + "9" * 4000 + "}", "schema of the summary"),
    "too long": (json.dumps(summary(message="x" * 4100)), "longer than 4096 bytes"),
    "too long in bytes": (json.dumps(summary(message="é" * 2000), ensure_ascii=False), "longer than 4096 bytes"),
    "another schema": (summary(schema="cleanslate.dev/report/v2"), "its schema is cleanslate.dev/report/v2"),
    "no schema": ({}, "schema of the summary"),
    "an inspection's": (summary(verb="inspect"), "it is of inspect, not of a reset"),
    "another node's": (summary(host="gpu-18"), "it is about node gpu-18, not about gpu-17"),
    "an unknown result": (summary(result="Splendid"), "its result Splendid does not go with exit code 0"),
    "a result beside its exit code": (summary(exitCode=3), "its result Clean does not go with exit code 3"),
    "clean without a GPU": (summary(gpus=[]), "its GPUs say something else"),
    "clean with a leak": (summary(gpus=[gpu("Residual")]), "its GPUs say something else"),
    "an unknown GPU result": (summary(gpus=[gpu("Sparkling")]), "result of gpus"),
    "a GPU that is none": (summary(gpus=[7]), "gpus is not an object"),
    "GPUs that are none": (summary(gpus={}), "gpus of the summary"),
    "memory below zero": (summary(gpus=[gpu(usedBytes=-1)]), "usedBytes of gpus"),
    "more memory than there is": (summary(gpus=[gpu(usedBytes=1 << 63)]), "usedBytes of gpus"),
    "memory as a fraction": (summary(gpus=[gpu(usedBytes=1.5)]), "usedBytes of gpus"),
    "memory as a truth": (summary(gpus=[gpu(usedBytes=True)]), "usedBytes of gpus"),
    "no duration": (json.dumps(summary()).replace("0.531", "NaN"), "durationSeconds of the summary"),
    "an endless duration": (json.dumps(summary()).replace("0.531", "1e999"), "durationSeconds of the summary"),
    "a negative count": (summary(logs={"removedCount": -1, "keptCount": 0, "bytesFreed": 0}), "removedCount of logs"),
    "a pid of zero": (summary(processes=[process(pid=0)]), "pid of processes"),
    "an unknown outcome": (summary(processes=[process(outcome="Vanished")]), "outcome of processes"),
    "an unknown verdict": (summary(processes=[process(verdict="Perhaps")]), "verdict of processes"),
    "warnings that are none": (summary(warnings=[{}]), "warnings of the summary"),
    "an omission that is none": (summary(omitted={"gpus": "many"}), "gpus of omitted"),
    "a dry run that is neither": (summary(dryRun="yes"), "dryRun of the summary"),
}


@pytest.mark.parametrize(("message", "cause"), WRONG.values(), ids=WRONG.keys())
def test_a_bad_summary_is_a_failure_that_says_what_is_wrong(message: Any, cause: str) -> None:
    """The whole is refused: nothing of it gets anywhere."""
    found = result_of(ended(message))
    assert (found.result, found.reason) == (NodeVerdict.FAILED, "BadResult")
    assert found.message.startswith("pod resets/pool-a-x7: cannot read its result: ")
    assert cause in found.message
    assert (found.gpus, found.processes, found.warnings) == ((), (), ())
    assert found.finished_at == FINISHED


def test_texts_of_a_node_are_printable_and_bounded() -> None:
    """No escape sequence gets into a status that somebody reads in a terminal, no lone surrogate into JSON."""
    told = summary(message="\x1b[2J\n" + "m" * 900, warnings=["\ud800\u202e"] * 2, gpus=[gpu(message="a\tb")])
    found = result_of(ended(told))
    assert found.message.startswith("\ufffd[2J\ufffdmm")
    assert len(found.message) == 600
    assert found.warnings == ("\ufffd\ufffd",) * 2
    assert found.gpus[0].message == "a\ufffdb"
    assert json.dumps(found.to_json()).encode("utf-8")


def test_rows_beyond_the_limit_are_counted() -> None:
    """A summary with more rows than a status holds loses none without a word."""
    warnings = [str(number) for number in range(30)]
    found = result_of(ended(summary(warnings=warnings, omitted={"warnings": 5})))
    assert len(found.warnings) == 16
    assert found.omitted.warnings == 5 + 14


ENDS = {
    "killed for memory": (
        {"code": 137, "reason": "OOMKilled"},
        "OutOfMemory",
        "cannot finish the reset: it needed more memory than its limit of 512Mi; raise the memory limit of reset pods",
    ),
    "killed": ({"code": 137}, "Crashed", "it ended by SIGKILL with code 137; look at its log"),
    "wrong arguments": ({"code": 2}, "BadArguments", "its image knows other arguments"),
    "crashed": ({"code": 1}, "Crashed", "it ended with code 1; look at its log"),
    "not startable": (
        {"code": 128, "reason": "StartError", "message": "exec: cleanslate: not found"},
        "Crashed",
        "it ended with code 128, exec: cleanslate: not found; look at its log",
    ),
}


@pytest.mark.parametrize(("end", "reason", "message"), ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("run_again", [False, True])
def test_an_end_without_a_result_is_a_failure_with_its_cause(
    end: Object, reason: str, message: str, run_again: bool
) -> None:
    """Also if the kubelet has started the container again since: what was done to the node is not known."""
    container = ended(**end)
    if run_again:
        container |= {"lastState": container["state"], "state": {"running": {"startedAt": FINISHED}}, "restartCount": 1}
    found = result_of(container)
    assert (found.result, found.reason) == (NodeVerdict.FAILED, reason)
    assert message in found.message
    assert found.finished_at == FINISHED


def test_a_result_stays_one_when_the_container_runs_again() -> None:
    """A node that boots again runs its init containers once more; the first result counts."""
    container = ended(summary()) | {"state": {"running": {}}, "restartCount": 1}
    container["lastState"] = ended(summary())["state"]
    assert result_of(container).result is NodeVerdict.CLEAN


def test_a_result_written_before_a_kill_counts() -> None:
    """The summary is the last thing that the program writes."""
    assert result_of(ended(summary(), code=143)).result is NodeVerdict.CLEAN
    assert result_of(ended(summary()), deletionTimestamp=FINISHED).result is NodeVerdict.CLEAN
    evicted = {"phase": "Failed", "reason": "Evicted"}
    assert result_of(ended(summary()), status=evicted).result is NodeVerdict.CLEAN


STAGES: dict[str, tuple[Object, Stage, str, bool]] = {
    "nothing said": (pod(), Stage.PENDING, "has not been taken up by its node's kubelet yet", False),
    "no status": (pod() | {"status": {}}, Stage.PENDING, "has not been taken up", False),
    "unschedulable": (
        without_node(
            pod(status={"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes: no memory"}]})
        ),
        Stage.NOT_SCHEDULED,
        "cannot be scheduled: 0/2 nodes: no memory; see what it requests",
        False,
    ),
    "image missing": (
        pod(waiting("ErrImageNeverPull", "not present")),
        Stage.IMAGE_PULL,
        "cannot get its image: ErrImageNeverPull: not present; load it onto the node",
        False,
    ),
    "pull refused": (pod(waiting("ErrImagePull", "denied")), Stage.IMAGE_PULL, "ErrImagePull: denied; check", False),
    "pull given up": (pod(waiting("ImagePullBackOff")), Stage.IMAGE_PULL, "ImagePullBackOff: no message", False),
    "bad image name": (pod(waiting("InvalidImageName")), Stage.IMAGE_PULL, "correct the image's name", False),
    "no such plan": (
        pod(waiting("CreateContainerConfigError", "no key")),
        Stage.NOT_STARTED,
        "cannot start: CreateContainerConfigError: no key; look at its events",
        False,
    ),
    "starting": (pod(waiting("PodInitializing")), Stage.STARTING, "is being started (PodInitializing)", False),
    "running": (
        pod({"name": "reset", "state": {"running": {"startedAt": FINISHED}}}),
        Stage.RUNNING,
        "resets the node",
        True,
    ),
    "stopped": (pod(ended("", code=143)), Stage.STARTING, "was stopped before it told a result", True),
    "lost": (
        pod(ended("", code=137, reason="ContainerStatusUnknown")),
        Stage.STARTING,
        "was stopped before it told a result",
        True,
    ),
    "stopped and started again": (
        pod({"name": "reset", "state": {"running": {"startedAt": FINISHED}}, "lastState": ended("", 143)["state"]}),
        Stage.RUNNING,
        "resets the node",
        True,
    ),
    "being deleted": (
        pod(ended("", code=137), deletionTimestamp=FINISHED),
        Stage.LEAVING,
        "is being deleted and has told no result",
        True,
    ),
    "evicted": (
        pod(status={"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}),
        Stage.REPLACED,
        "cannot go on: Evicted: The node was low on resource: memory.; its DaemonSet makes another",
        False,
    ),
}


@pytest.mark.parametrize(("made", "stage", "message", "started"), STAGES.values(), ids=STAGES.keys())
def test_a_reset_that_is_not_over_says_how_far_it_is(made: Object, stage: Stage, message: str, started: bool) -> None:
    """And whether it may have touched its node already."""
    found = progress_of(made)
    assert (found.reason, found.started) == (stage, started)
    assert found.message.startswith("pod resets/pool-a-x7: ")
    assert message in found.message


@pytest.mark.parametrize("code", [None, "137", 1.5, 10**5000], ids=["none", "text", "fraction", "huge"])
def test_an_exit_code_that_is_none_is_no_result(code: Any) -> None:
    """Nothing is known of how it ended, so another look has to tell."""
    assert progress_of(pod({"name": "reset", "state": {"terminated": {"exitCode": code}}})).reason is Stage.STARTING


def test_a_pod_of_another_daemon_set_is_nobodys() -> None:
    """A pod with the right labels and a fine result, made by somebody else."""
    assert results.read(pod(ended(summary())), NODE, UID) is None
    owner = {"kind": "DaemonSet", "uid": DAEMON_SET, "controller": False}
    assert read(pod(ended(summary()), ownerReferences=[owner])) is None
    assert read(pod(ended(summary()), ownerReferences=None)) is None


def test_a_pod_speaks_for_the_node_that_it_is_bound_to_alone() -> None:
    """Whatever its summary says."""
    made = pod(ended(summary(host="gpu-18")))
    assert results.read(made, "gpu-18", DAEMON_SET) is None
    assert results.node_of(made) == NODE
    assert results.node_of(without_node(pod(), "gpu-18")) == "gpu-18"
    assert results.node_of({}) is None
    assert results.node_of({"spec": {"affinity": {"nodeAffinity": []}}}) is None


@pytest.mark.parametrize("text", ["2026-13-01T00:00:00Z", "yesterday", "", 7, None])
def test_a_time_that_is_none_is_not_told(text: Any) -> None:
    """A status with it would be refused as a whole."""
    found = result_of(ended(summary(), finishedAt=text))
    assert (found.result, found.finished_at) == (NodeVerdict.CLEAN, None)


def test_rows_of_a_result_are_read_back_as_they_were() -> None:
    """The record loses nothing."""
    told = summary(
        gpus=[gpu("Busy", usedBytes=None)], processes=[process()], warnings=["w"], omitted={"gpus": 1}, dryRun=True
    )
    found = result_of(ended(told))
    assert isinstance(found.gpus[0], Gpu)
    assert found.gpus[0].result is GpuResult.BUSY
    assert isinstance(found.processes[0], Process)
    assert NodeResult.from_json(found.to_json()) == found


def test_the_summarys_schema_is_the_reports() -> None:
    """The operator knows it from the formats alone."""
    assert formats.SUMMARY_SCHEMA == report.REPORT_SCHEMA
