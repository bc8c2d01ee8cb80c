"""What a request asks is derived as the API server derives it, so that rules and RBAC speak of the same."""

import pytest

from cluster.programs.proxy import apirequest

_CASES = {
    "a list": ("GET", "/api/v1/pods", "list", "", "pods", "", ""),
    "a list in a namespace": ("GET", "/api/v1/namespaces/a/pods", "list", "", "pods", "a", ""),
    "a list of one by field selector": (
        "GET",
        "/api/v1/namespaces/a/pods?fieldSelector=metadata.name%3Dp,spec.nodeName%3Dn",
        "list",
        "",
        "pods",
        "a",
        "p",
    ),
    "a watch": ("GET", "/apis/apps/v1/daemonsets?watch=true", "watch", "apps", "daemonsets", "", ""),
    "a watch with an empty value": ("GET", "/api/v1/nodes?watch", "watch", "", "nodes", "", ""),
    "no watch": ("GET", "/api/v1/nodes?watch=0", "list", "", "nodes", "", ""),
    "a watch of the old form": ("GET", "/api/v1/watch/nodes/n", "watch", "", "nodes", "", "n"),
    "a get": ("GET", "/apis/cleanslate.dev/v1/gpunoderesets/r", "get", "cleanslate.dev", "gpunoderesets", "", "r"),
    "a get that says watch": ("GET", "/api/v1/nodes/n?watch=1", "get", "", "nodes", "", "n"),
    "a log": ("GET", "/api/v1/namespaces/a/pods/p/log", "get", "", "pods/log", "a", "p"),
    "a namespace": ("GET", "/api/v1/namespaces/a", "get", "", "namespaces", "a", "a"),
    "a namespace's status": ("PUT", "/api/v1/namespaces/a/status", "update", "", "namespaces/status", "a", "a"),
    "all namespaces": ("GET", "/api/v1/namespaces", "list", "", "namespaces", "", ""),
    "server-side apply of a status": ("PATCH", "/api/v1/nodes/n/status", "patch", "", "nodes/status", "", "n"),
    "an eviction": ("POST", "/api/v1/namespaces/a/pods/p/eviction", "create", "", "pods/eviction", "a", "p"),
    "a delete": ("DELETE", "/api/v1/nodes/n", "delete", "", "nodes", "", "n"),
    "a delete of all": ("DELETE", "/api/v1/nodes", "deletecollection", "", "nodes", "", ""),
    "a node's proxy": ("GET", "/api/v1/nodes/n/proxy/metrics", "get", "", "nodes/proxy", "", "n"),
    "discovery": ("GET", "/apis/apps/v1", "get", "", "", "", ""),
    "a version": ("GET", "/version", "get", "", "", "", ""),
    "the root": ("GET", "/", "get", "", "", "", ""),
    "no API": ("POST", "/metrics/a/b/c", "post", "", "", "", ""),
}


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_request_is_named_as_the_api_server_names_it(case: tuple[str, ...]) -> None:
    """Verb, group, resource with subresource, namespace and name are those of RequestInfo."""
    method, target, *expected = case
    path, _, query = target.partition("?")
    arguments = dict(_pair(part) for part in query.split("&")) if query else {}
    found = apirequest.parse(method, path, arguments)
    assert [found.verb, found.group, found.resource, found.namespace, found.name] == expected


def _pair(part: str) -> tuple[str, str]:
    name, _, value = part.partition("=")
    return name, value.replace("%3D", "=")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"metadata": {"name": "d"}}', "d"),
        (b'{"metadata": {"generateName": "d-"}}', ""),
        (b'{"metadata": {"name": 1}}', ""),
        (b'{"metadata": ', ""),
        (b"k8s\x00\x0a\x00", ""),
    ],
    ids=["named", "to be named", "not a name", "broken", "protobuf"],
)
def test_created_object_has_the_name_in_its_body(body: bytes, name: str) -> None:
    """A create can be chosen by name, though its path has none."""
    assert apirequest.parse("POST", "/api/v1/namespaces/a/configmaps", {}, body).name == name
