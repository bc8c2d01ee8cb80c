"""Whatever a node, a kubelet or a person writes: a result or a progress comes of it, and nothing else."""

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cleanslate import formats, report
from cleanslate_operator import results
from cleanslate_operator.noderesult import NodeResult, NodeVerdict
from cleanslate_operator.results import Progress
from unit.operator.resetpods import DAEMON_SET, NODE, Object, ended, gpu, pod, process, result, summary
from unit.reports import outlines


def read(made: Object) -> NodeResult | Progress | None:
    """What the pod tells of NODE."""
    return results.read(made, NODE, DAEMON_SET)


def result_of(container: Object) -> NodeResult:
    """The result that the pod with this container status tells."""
    found = read(pod(container))
    assert isinstance(found, NodeResult), found
    return found


@given(outlines)
@settings(max_examples=60)
def test_every_summary_of_the_node_program_is_understood(outline: report.Outline) -> None:
    """Whatever hostile names its node is full of; only a summary that contradicts itself is not."""
    document = report.build(outline._replace(verb="reset", host=NODE))
    found = result_of(ended(formats.summarize(document).decode()))
    if found.reason == "BadResult":
        assert "say something else" in found.message
        assert document["result"] == "Clean"
    else:
        assert found.message == document["message"][: len(found.message) - 1] + found.message[-1:]
    assert NodeResult.from_json(json.loads(json.dumps(found.to_json()))) == found


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["Clean", NODE]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*summary(), *gpu(), *process()]), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
@example('{"schema":"cleanslate.dev/report/v1"}')
@example("\udc80")
@example('{"a":"\ud800"}')
def test_no_message_breaks_the_operator(message: str) -> None:
    """Any text at all is a failed node with a reason that can be written to the API."""
    found = result_of(ended(message))
    assert (found.result, found.reason) == (NodeVerdict.FAILED, "BadResult")
    assert found.message.encode("utf-8")


@given(st.dictionaries(st.sampled_from([*summary()]), json_values, max_size=4))
def test_no_summary_breaks_the_operator(changed: Object) -> None:
    """Any JSON in any place is a result that can be written to the API and read back."""
    found = result_of(ended(json.dumps(summary() | changed)))
    assert NodeResult.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
    json.dumps(found.to_json(), ensure_ascii=False).encode("utf-8")


@given(json_values, st.sampled_from(["metadata", "spec", "status"]))
def test_no_pod_breaks_the_operator(value: Any, key: str) -> None:
    """What the API never sends, a person may have put there."""
    found = read(pod(ended(summary())) | {key: value})
    assert found is None or isinstance(found, NodeResult | Progress)


@given(json_values, st.sampled_from(["state", "lastState", "name"]))
def test_no_container_status_breaks_the_operator(value: Any, key: str) -> None:
    """A kubelet's status is a node's word, too."""
    found = read(pod(ended(summary()) | {key: value}))
    assert isinstance(found, NodeResult | Progress)


@given(json_values)
@example({"node": NODE, "result": "Clean", "reason": "Clean", "message": ""})
def test_a_record_that_is_none_is_a_value_error(value: Any) -> None:
    """Somebody may have edited the record; nothing else is raised."""
    found, refusal = result(), "understood"
    try:
        found = NodeResult.from_json(value)
    except ValueError as error:
        refusal = str(error)
    assert refusal
    assert NodeResult.from_json(found.to_json()) == found
