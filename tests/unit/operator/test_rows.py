"""Status rows: what is not clean comes first, a few nodes keep everything, thousands stay within what the API holds."""

import json
import pathlib
import time
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cleanslate_operator import rows
from cleanslate_operator.noderesult import Files, GpuResult, NodeResult, NodeVerdict, Omitted, Outcome, Verdict
from unit.operator.resetpods import gpu_of, process_of, result

CRD = pathlib.Path(__file__).parents[3] / "crds" / "gpunodereset.yaml"
HOSTILE = '<&>"\\é𝕏'


def largest(node: str, letter: str = "<") -> NodeResult:
    """As much as a result can hold."""
    files = Files(removed_count=10**9, kept_count=10**9, bytes_freed=1 << 62)
    return result(
        node=node,
        message=letter * 600,
        gpus=tuple(gpu_of(index, GpuResult.RESIDUAL, letter * 512) for index in range(64)),
        processes=tuple(process_of(pid, Verdict.END, Outcome.UNKILLABLE, letter * 128) for pid in range(1, 65)),
        shared_memory=files,
        caches=files,
        logs=files,
        warnings=(letter * 512,) * 16,
        omitted=Omitted(gpus=10**9, processes=10**9, warnings=10**9),
    )


def stored_bytes(value: Any) -> int:
    """What the API server writes: UTF-8, with HTML's characters escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode()) + sum(5 * text.count(letter) for letter in "<>&")


@pytest.mark.parametrize("letter", ["a", "<", "é", "𝕏", "\\", '"'])
def test_five_thousand_nodes_that_are_not_clean_stay_within_the_limit(letter: str) -> None:
    """Whatever their messages are made of, in a moment; each row keeps its result and the beginning of its message."""
    results = [largest(f"{number:04}.{'n' * 248}", letter) for number in range(300)]
    results += [result(node=f"z-{number}") for number in range(4700)]
    start = time.process_time()
    shown, omitted = rows.fit(results)
    assert time.process_time() - start < 10
    assert (len(shown), omitted) == (200, 4800)
    assert stored_bytes(shown) <= 200 * 1024
    assert all(row["result"] == "NotClean" for row in shown)
    assert all(row["message"].startswith(letter * 10) for row in shown)
    assert all(row["omitted"]["gpus"] == 10**9 + 64 - len(row.get("gpus", ())) for row in shown)


def test_one_node_keeps_everything() -> None:
    """Its row is its result."""
    one = largest("gpu-1", "a")
    (row,), omitted = rows.fit([one])
    full = one.to_json()
    assert omitted == 0
    assert row == {key: value for key, value in full.items() if key not in {"gpuBytesFreed", "dryRun"}}


def test_what_is_not_clean_comes_first_and_then_by_name() -> None:
    """So that a cut list has what somebody has to look at."""
    verdicts = (NodeVerdict.CLEAN, NodeVerdict.BUSY, NodeVerdict.SKIPPED, NodeVerdict.NOT_CLEAN, NodeVerdict.FAILED)
    shown, _ = rows.fit([result(verdict, node) for verdict in verdicts for node in ("b", "a")])
    order = [(row["result"], row["node"]) for row in shown]
    worst_first = ("Failed", "NotClean", "Skipped", "Busy", "Clean")
    assert order == [(verdict, node) for verdict in worst_first for node in ("a", "b")]


def test_clean_nodes_give_way_to_one_that_is_not() -> None:
    """However many there are."""
    shown, omitted = rows.fit([*(result(NodeVerdict.CLEAN, f"n{number}") for number in range(300)), result(node="z")])
    assert shown[0]["node"] == "z"
    assert omitted == 101


def test_a_long_row_loses_first_what_matters_least() -> None:
    """Warnings, then what was kept, then clean GPUs; what is wrong stays, and what is left out is counted."""
    one = result(
        gpus=(gpu_of(0, GpuResult.HELD), *(gpu_of(index) for index in range(1, 8))),
        processes=(process_of(1, Verdict.END, Outcome.UNKILLABLE), *(process_of(pid) for pid in range(2, 20))),
        warnings=("w" * 100,) * 10,
    )
    (without_warnings,), _ = rows.fit([one], limit_bytes=rows.size_bytes(one.to_json()) - 960)
    assert "warnings" not in without_warnings
    assert without_warnings["omitted"] == {"warnings": 10}
    assert len(without_warnings["processes"]) == 19
    (short,), _ = rows.fit([one], limit_bytes=600)
    assert [gpu["result"] for gpu in short["gpus"]] == ["Held"]
    assert [process["outcome"] for process in short["processes"]] == ["Unkillable"]
    assert short["omitted"] == {"gpus": 7, "processes": 18, "warnings": 10}
    assert short["message"] == one.message


def test_a_row_says_only_what_it_knows() -> None:
    """No empty list, no null: the API's schema takes neither for granted."""
    (row,), _ = rows.fit([result(finished_at=None, duration_s=None)])
    assert row == {"node": "gpu-17", "result": "NotClean", "reason": "NotClean", "message": "gpu-17 is NotClean"}


@pytest.mark.parametrize("count", [1, 40, 200])
def test_rows_are_as_the_crd_wants_them(count: int) -> None:
    """With every field that there can be, and cut."""
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    row_schema = schema["properties"]["status"]["properties"]["results"]["items"]
    shown, _ = rows.fit([largest(f"gpu-{number}", "é") for number in range(count)] + [result(node="z")])
    for row in shown:
        jsonschema.Draft202012Validator(row_schema).validate(row)
        assert row.keys() <= row_schema["properties"].keys()


def test_no_results_are_no_rows() -> None:
    """At the beginning."""
    assert rows.fit([]) == ([], 0)


@given(st.integers(1, 60), st.integers(400, 9000), st.text(HOSTILE + "a", max_size=200))
def test_no_row_is_longer_than_its_share(count: int, share: int, text: str) -> None:
    """Whatever it is made of."""
    one = result(
        message=text,
        gpus=tuple(gpu_of(index, message=text) for index in range(3)),
        processes=(process_of(7, text=text),) * 3,
        warnings=(text,) * 3,
    )
    shown, _ = rows.fit([one] * count, limit_bytes=share * count)
    assert all(stored_bytes(row) <= share for row in shown)
    assert stored_bytes(shown) <= share * count
