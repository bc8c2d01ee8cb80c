"""The report: every one fits its schema and strict JSON, tells no arguments, and puts first what is left."""

import json
from datetime import UTC, datetime
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanslate import formats, nodereport, report
from cleanslate.ending import Fate
from cleanslate.gpus import EXIT_CODES, GpuResult, GpuVerdict, Result
from cleanslate.model import Judgement, Manner, Outcome, OwnerKind, Verdict
from cleanslate.people import Person
from cleanslate.report import Outline, safe_title, timestamp
from cleanslate.reset import Findings, Record
from cleanslate.settings import Settings
from unit.examples import GPU_0, NOW_S, POD, case, gpu, judgement, pod, process, titled
from unit.reports import SCHEMA, VALIDATOR, check, outlines


def outline(**known: Any) -> Outline:
    """A clean reset of nothing."""
    ordinary = {"verb": "reset", "host": "gpu-17", "started_at_s": NOW_S, "duration_s": 0.5}
    return Outline(**{**ordinary, "result": Result.CLEAN, "message": "1 of 1 GPUs are clean", **known})


def verdict(result: GpuResult, index: int = 0) -> GpuVerdict:
    """A GPU with a result and a message of its own."""
    return GpuVerdict(reading=gpu(index), tolerance_bytes=0, result=result, message=f"GPU {index} is {result}")


def test_the_schema_is_a_schema_that_allows_nothing_else() -> None:
    """Every object in it is closed and names all its keys; there is no address in it."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$id"] == report.REPORT_SCHEMA

    def objects(node: Any) -> list[dict[str, Any]]:
        if isinstance(node, list):
            return [found for item in node for found in objects(item)]
        if not isinstance(node, dict):
            return []
        here = [node] if node.get("type") == "object" else []
        return here + [found for item in node.values() for found in objects(item)]

    assert len(objects(SCHEMA)) >= 9
    for one in objects(SCHEMA):
        assert one["additionalProperties"] is False
        assert sorted(one["required"]) == sorted(one["properties"])


def test_the_schemas_words_are_the_programs() -> None:
    """A word that one of them does not know makes reports invalid, or values that never come."""
    words = SCHEMA["properties"]
    defined = {name: one.get("properties", {}) for name, one in SCHEMA["$defs"].items()}
    assert set(words["result"]["enum"]) == set(map(str, Result))
    assert set(words["exitCode"]["enum"]) == set(EXIT_CODES.values())
    assert set(defined["gpu"]["result"]["enum"]) == set(map(str, GpuResult))
    assert set(defined["process"]["outcome"]["enum"]) == set(map(str, Outcome))
    assert set(defined["process"]["verdict"]["enum"]) == {str(Verdict.KEEP), str(Verdict.END)}
    assert set(defined["file"]["verdict"]["enum"]) == {str(Verdict.KEEP), str(Verdict.REMOVE)}
    assert set(defined["process"]["owner"]["properties"]["kind"]["enum"]) == set(map(str, OwnerKind))


def test_the_keys_are_those_of_the_issue() -> None:
    """What other programs rely on is there, by name."""
    document = report.build(outline(gpus=[verdict(GpuResult.CLEAN)]))
    check(document)
    assert document.keys() >= {
        *("schema", "verb", "host", "startedAt", "durationSeconds", "result", "exitCode", "gpus", "processes"),
        *("sharedMemory", "caches", "logs", "timings", "warnings"),
    }
    assert document["sharedMemory"].keys() >= {"roots", "removed", "kept", "bytesFreed"}
    assert document["timings"].keys() == {"survey", "end", "purge", "verify"}
    assert document["gpus"][0].keys() >= {
        *("index", "uuid", "name", "usedBytes", "reservedBytes", "totalBytes", "toleranceBytes", "result", "holders"),
    }


@pytest.mark.parametrize("result", list(Result))
def test_the_exit_code_follows_from_the_result(result: Result) -> None:
    """And a document in which it does not is no report."""
    document = report.build(outline(result=result))
    check(document)
    wrong = document | {"exitCode": 0 if document["exitCode"] else 3}
    assert not VALIDATOR.is_valid(wrong)


@pytest.mark.parametrize(
    "changes",
    [{"schema": "cleanslate.dev/report/v2"}, {"extra": 1}, {"gpus": [{}]}, {"startedAt": "yesterday"}, {"host": None}],
    ids=str,
)
def test_the_schema_refuses_what_is_no_report(changes: dict[str, Any]) -> None:
    """A check that can't fail is none."""
    assert not VALIDATOR.is_valid(report.build(outline()) | changes)


@settings(max_examples=30, deadline=None)
@given(outlines)
def test_a_report_of_anything_fits_its_schema_and_its_summary_fits_too(random: Outline) -> None:
    """Lone surrogates, control characters and megabytes come out as bounded, printable text."""
    document = report.build(random)
    check(document)
    for title in [one["title"] for one in document["processes"]] + [document["host"], document["message"]]:
        assert title.isprintable()
    summary = formats.summarize(document)
    assert len(summary) <= formats.SUMMARY_LIMIT_BYTES
    assert json.loads(summary)["result"] == document["result"]


def test_lists_are_bounded_and_say_so() -> None:
    """Thousands of processes and warnings make no report of hundreds of megabytes."""
    row = built([record(process(1), judgement(), Outcome.KEPT)])["processes"][0]
    document = report.build(outline(processes=[row] * 5_000, warnings=[f"w{number}" for number in range(150)] * 2))
    check(document)
    assert len(document["processes"]) == 2_000
    assert document["warnings"][-2:] == ["w99", "… and 50 more"]


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        ("VLLM::Worker_TP0", "VLLM::Worker_TP0"),
        ("python3 --api-key hunter2", "python3"),
        ("python3 -k hunter2", "python3"),
        ("python3\t--api-key hunter2", "python3"),
        ("python3\n--api-key hunter2", "python3"),
        ("python3\x0b--api-key hunter2", "python3"),
        ("my-server 1-2", "my-server 1-2"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\udcff", "\\xff"),
        ("t" * 500, "t" * 128),
        ("", ""),
    ],
)
def test_a_title_is_shown_without_what_looks_like_options(title: str, shown: str) -> None:
    """Some programs copy their whole command line into their title, secrets included."""
    assert safe_title(title) == shown


def test_arguments_never_reach_the_report() -> None:
    """Only the executable and the title are told of a process."""
    secret = process(argv=("/usr/bin/python3", "serve.py", "--api-key", "hunter2"), executable="/usr/bin/python3.11")
    document = built([record(secret, judgement(), Outcome.KEPT)])
    assert "hunter2" not in json.dumps(document)
    assert "serve.py" not in json.dumps(document)
    assert document["processes"][0]["executable"] == "/usr/bin/python3.11"
    assert document["processes"][0]["title"] == "python3"


@given(st.floats(0, 4e9))
def test_times_are_rfc_3339_in_utc(unix_s: float) -> None:
    """To the millisecond, as every parser reads them."""
    shown = timestamp(unix_s)
    assert abs(datetime.fromisoformat(shown).timestamp() - unix_s) < 0.0015
    assert datetime.fromisoformat(shown).tzinfo == UTC
    assert len(shown) == len("2027-01-15T08:00:00.000Z")


@pytest.mark.parametrize(
    ("result", "gpus", "failure", "unended", "said"),
    [
        (Result.CLEAN, [GpuResult.CLEAN] * 2, None, [], "2 of 2 GPUs are clean"),
        (Result.CLEAN, [GpuResult.CLEAN, GpuResult.BUSY], None, [], "1 of 2 GPUs are clean; GPU 1 is Busy"),
        (Result.NOT_CLEAN, [GpuResult.CLEAN, GpuResult.RESIDUAL], None, [], "GPU 1 is Residual"),
        (Result.NOT_CLEAN, [GpuResult.HELD] * 3, None, [], "GPU 0 is Held (and 2 more GPUs)"),
        (Result.NOT_CLEAN, [GpuResult.HELD], None, ["pid 1: stays"], "pid 1: stays"),
        (Result.NOT_CLEAN, [], None, ["pid 1: stays", "b", "c"], "pid 1: stays (and 2 more processes)"),
        (Result.NOT_CLEAN, [GpuResult.BUSY], None, [], "GPU 0 is Busy"),
        (Result.CANNOT_TELL, [], "NVML: silent", [], "NVML: silent"),
        (Result.CANNOT_TELL, [GpuResult.MISSING], None, [], "GPU 0 is Missing"),
        (Result.CANNOT_TELL, [], None, [], "NVML shows 0 GPUs; check the driver"),
    ],
)
def test_the_message_is_the_first_thing_to_look_at(
    result: Result, gpus: list[GpuResult], failure: str | None, unended: list[str], said: str
) -> None:
    """One sentence: a process that stays, else a GPU that is not clean, else why there is no reading."""
    found = report.message(result, [verdict(one, at) for at, one in enumerate(gpus)], failure, unended)
    assert found.startswith(said)


def record(of: Any, found: Judgement, outcome: Outcome, message: str = "") -> Record:
    """What a run knows of one process."""
    fate = Fate(outcome=outcome, message=message)
    return Record(case=case(of, pod()), judgement=found, fate=fate, person=Person(user="alice", memory_bytes=4096))


def built(records: list[Record], result: Result = Result.NOT_CLEAN) -> dict[str, Any]:
    """The report of a run that found these."""
    findings = Findings(records={one.case.process.identity: one for one in records}, result=result)
    parts = nodereport.parts_of(findings, Settings(verb="reset"))
    document = report.build(Outline(verb="reset", host="gpu-17", started_at_s=NOW_S, duration_s=1.0, **parts))
    check(document)
    return document


END = judgement(Verdict.END)


def test_what_is_left_comes_first_and_helpers_after_those_they_help() -> None:
    """Then what was ended, then what was kept."""
    document = built(
        [
            record(process(1), judgement(), Outcome.KEPT),
            record(process(2), judgement(Verdict.END, manner=Manner.SPARED), Outcome.ENDED),
            record(process(3), END, Outcome.ENDED),
            record(process(4), END, Outcome.UNKILLABLE, "pid 4: cannot kill: reboot the node"),
        ]
    )
    assert [one["pid"] for one in document["processes"]] == [4, 3, 2, 1]
    assert document["message"] == "pid 4: cannot kill: reboot the node"


def test_a_process_that_stays_without_a_message_is_named_with_its_reason() -> None:
    """As in a dry run, where nothing was tried."""
    document = built([record(titled("VLLM::EngineCore"), END, Outcome.WOULD_END)])
    assert document["message"].startswith(f"pid 100 (VLLM::EngineCore, pod {POD}")
    assert document["message"].endswith(f": {END.reason}: {END.evidence}")


def test_a_clean_run_is_not_spoiled_by_what_was_ended() -> None:
    """Only a run that is not clean names a process in its message."""
    document = built([record(process(3), END, Outcome.ENDED)], Result.CLEAN)
    assert "pid 3" not in document["message"]


def test_a_row_tells_what_is_known() -> None:
    """Identity, owner with evidence, GPUs, verdict with evidence, outcome; the unknown is null."""
    (row,) = built([record(titled("VLLM::EngineCore"), END, Outcome.ENDED)])["processes"]
    assert (row["pid"], row["user"], row["memoryBytes"], row["gpus"]) == (100, "alice", 4096, [GPU_0])
    assert (row["verdict"], row["outcome"], row["evidence"]) == ("End", "Ended", END.evidence)
    assert row["owner"] == {
        "kind": "pod",
        "name": POD,
        "container": pod().container,
        "evidence": pod().evidence,
    }
    unknown = process(executable=None)
    nobody = Record(
        case=case(unknown), judgement=judgement(), fate=Fate(outcome=Outcome.KEPT), person=Person(user=None)
    )
    (row,) = built([nobody])["processes"]
    assert (row["executable"], row["user"], row["memoryBytes"], row["owner"]["container"]) == (None, None, None, None)
