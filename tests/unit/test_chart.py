"""What can be said of the chart without Helm: versions, the copy of the CRDs, the comments and the schema of its values."""

import copy
import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import cleanslate

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts" / "cleanslate"
VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
KEY = re.compile(r"^( *)([A-Za-z]+):(.*)$")

# What is wrong with a value, and what the refusal must say.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a value that does not exist": ({"replicas": 2}, "'replicas' was unexpected"),
    "a value that does not exist, further in": ({"operator": {"image": {"name": "x"}}}, "'name' was unexpected"),
    "no replica": ({"operator": {"replicas": 0}}, "0 is less than the minimum of 1"),
    "replicas as text": ({"operator": {"replicas": "2"}}, "'2' is not of type 'integer'"),
    "an image without a name": ({"resets": {"image": {"repository": ""}}}, "''"),
    "a tag in the repository's place": ({"resets": {"image": {"repository": "a b"}}}, "'a b' does not match"),
    "half a digest": ({"resets": {"image": {"digest": "sha256:12"}}}, "'sha256:12' does not match"),
    "an unknown pull policy": ({"operator": {"image": {"pullPolicy": "Sometimes"}}}, "'Sometimes' is not one of"),
    "an unknown log level": ({"operator": {"logLevel": "loud"}}, "'loud' is not one of"),
    "privileged pods in kube-system": ({"namespaces": {"resets": "kube-system"}}, "'kube-system'"),
    "a namespace with a dot": ({"namespaces": {"operator": "a.b"}}, "'a.b' does not match"),
    "GPUs for the reset pods": ({"resets": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "was unexpected"),
    "memory as a number": ({"resets": {"resources": {"limits": {"memory": 536870912}}}}, "greater than the maximum"),
    "memory in words": ({"resets": {"resources": {"limits": {"memory": "512 MB"}}}}, "'512 MB' does not match"),
    "no priority class": ({"resets": {"priorityClassName": ""}}, "''"),
    "a relative path": ({"resets": {"nvmlLibrary": "lib/libnvidia-ml.so.1"}}, "does not match"),
    "a path with a comma": ({"resets": {"nvmlLibrary": "/a,/b"}}, "does not match"),
    "a label of the chart's own": ({"labels": {"app.kubernetes.io/name": "mine"}}, "should not be valid under"),
    "a label with a space": ({"operator": {"podLabels": {"team": "a b"}}}, "'a b' does not match"),
    "a port of another world": ({"networkPolicy": {"apiServerPorts": [70000]}}, "70000 is greater than"),
    "an interval without a unit": ({"metrics": {"serviceMonitor": {"interval": "30"}}}, "'30' does not match"),
    "secrets as objects": ({"imagePullSecrets": [{"name": "x"}]}, "is not of type 'string'"),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "a processor as a number": {"resets": {"resources": {"limits": {"cpu": 1.5}}}, "operator": {"resources": {}}},
    "what Helm gives to a dependency": {"global": {"imageRegistry": "elsewhere"}},
    "a registry with a port": {"imageRegistry": "registry.example.com:5000/team"},
    "a pinned image": {"resets": {"image": {"digest": "sha256:" + "0a" * 32}}},
}


def defaults() -> dict[str, Any]:
    return yaml.safe_load(VALUES)


def with_values(changes: dict[str, Any]) -> dict[str, Any]:
    """The defaults with these changes, as Helm merges them."""

    def merge(one: dict[str, Any], other: dict[str, Any]) -> None:
        for name, value in other.items():
            if isinstance(value, dict) and isinstance(one.get(name), dict):
                merge(one[name], value)
            else:
                one[name] = copy.deepcopy(value)

    values = defaults()
    merge(values, changes)
    return values


def refusals(values: dict[str, Any]) -> str:
    return "; ".join(error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(values))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for inner in schema.values():
            yield from objects(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from objects(inner)


def test_chart_has_the_version_of_what_it_installs() -> None:
    """One version: the distribution's."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (cleanslate.__version__, cleanslate.__version__)


def test_chart_has_the_crds_of_the_source() -> None:
    """crds/ is the source; what the chart installs is the same to the byte."""
    crds = runpy.run_path(str(REPOSITORY / "charts" / "crds.py"))
    contents: Callable[[Path], dict[str, bytes]] = crds["contents"]
    assert contents(crds["COPY"]) == contents(crds["SOURCE"]), "they differ; run: python charts/crds.py"
    assert contents(crds["SOURCE"]), "crds/ is empty"


def test_every_value_is_explained() -> None:
    """A comment stands above each value, or above the group that it is one of."""
    explained: dict[tuple[str, ...], bool] = {}
    path: list[tuple[int, str]] = []
    before = ""
    for line in VALUES.splitlines():
        if found := KEY.match(line):
            indent = len(found[1])
            path = [*((depth, name) for depth, name in path if depth < indent), (indent, found[2])]
            explained[tuple(name for _, name in path)] = before.startswith("#")
        before = line.strip()
    bare = [leaf for leaf in leaves(defaults()) if not any(explained.get(leaf[:n]) for n in range(2, len(leaf) + 1))]
    assert [leaf for leaf in bare if not explained.get(leaf)] == []


def test_every_value_is_in_the_schema_and_the_reverse() -> None:
    """A default that the schema does not know, or a property without a default, is a mistake of one of them."""
    assert refusals(defaults()) == ""
    assert set(SCHEMA["properties"]) - {"global"} == set(defaults())
    assert set(SCHEMA["required"]) == set(defaults())


def test_schema_is_closed_everywhere() -> None:
    """A mistyped value is refused at any depth."""
    open_ones = [found for found in objects(SCHEMA) if found.get("additionalProperties") is not False]
    assert open_ones == []


@pytest.mark.parametrize("mistake", REFUSED)
def test_wrong_value_is_refused(mistake: str) -> None:
    """With the value or its bound in the refusal."""
    changes, said = REFUSED[mistake]
    assert said in refusals(with_values(changes))


@pytest.mark.parametrize("case", ACCEPTED)
def test_right_value_is_accepted(case: str) -> None:
    """A schema that refuses what works is as wrong."""
    assert refusals(with_values(ACCEPTED[case])) == ""


def test_value_taken_away_is_refused() -> None:
    """`--set operator.replicas=null` would render a Deployment of one."""
    values = defaults()
    del values["operator"]["replicas"]
    assert "'replicas' is a required property" in refusals(values)
