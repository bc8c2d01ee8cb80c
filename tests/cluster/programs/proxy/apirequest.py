"""What a request asks of the API server: verb, group, resource, namespace, name.

Derived as the API server derives them (k8s.io/apiserver v0.37.2, `pkg/endpoints/request/requestinfo.go`), so that a rule
for `verb="patch", resource="nodes/status"` hits what RBAC would call by the same names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

VERBS = frozenset({"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "proxy"})

_BY_METHOD = {
    "POST": "create",
    "GET": "get",
    "HEAD": "get",
    "PUT": "update",
    "PATCH": "patch",
    "DELETE": "delete",
}
_VERBS_IN_PATHS = frozenset({"proxy", "watch"})
_NAMESPACE_SUBRESOURCES = frozenset({"status", "finalize"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """One request in the API server's words; "" where a part does not apply.

    `resource` is plural and carries its subresource: `pods`, `pods/log`. A request that is not about a resource (/version,
    /apis, discovery) has an empty one, and its method in lower case as its verb.
    """

    verb: str
    group: str = ""
    resource: str = ""
    namespace: str = ""
    name: str = ""
    path: str
    user_agent: str = ""


def parse(method: str, path: str, query: Mapping[str, str], body: bytes = b"", user_agent: str = "") -> ApiRequest:
    """The request in the API server's words; `path` is decoded.

    Unlike the API server's, the name of a `create` is read from a JSON body, since the URL has none: a test wants to
    refuse "the DaemonSet called so". It is "" with generateName or another encoding.
    """
    group, rest = _split_prefix(path.strip("/").split("/"))
    if rest is None:
        return ApiRequest(verb=method.lower(), path=path, user_agent=user_agent)
    verb = _BY_METHOD.get(method, "")
    if rest[0] in _VERBS_IN_PATHS and len(rest) > 1:
        verb, *rest = rest
    namespace, rest = _split_namespace(rest)
    name = rest[1] if len(rest) > 1 else ""
    if not name:
        verb, name = _without_name(verb, query, body)
    # "proxy" in front of a resource takes the rest of the path for itself
    subresource = f"/{rest[2]}" if len(rest) > 2 and verb != "proxy" else ""
    return ApiRequest(
        verb=verb,
        group=group,
        resource=rest[0] + subresource,
        namespace=namespace,
        name=name,
        path=path,
        user_agent=user_agent,
    )


def _split_prefix(parts: list[str]) -> tuple[str, list[str] | None]:
    """The API group, and what follows the version; None for what is not about a resource."""
    if len(parts) >= 3 and parts[0] == "api":
        return "", parts[2:]
    if len(parts) >= 4 and parts[0] == "apis":
        return parts[1], parts[3:]
    return "", None


def _split_namespace(parts: list[str]) -> tuple[str, list[str]]:
    if parts[0] != "namespaces" or len(parts) < 2:
        return "", parts
    if len(parts) > 2 and parts[2] not in _NAMESPACE_SUBRESOURCES:
        return parts[1], parts[2:]
    return parts[1], parts  # the namespace itself: both the name and, to the API server, the namespace


def _without_name(verb: str, query: Mapping[str, str], body: bytes) -> tuple[str, str]:
    """Verb and name of a request whose path names no object."""
    if verb == "get":
        return "watch" if _is_true(query.get("watch")) else "list", _selected_name(query.get("fieldSelector", ""))
    if verb == "delete":
        return "deletecollection", ""
    if verb == "create":
        return verb, _name_in(body)
    return verb, ""


def _is_true(value: str | None) -> bool:
    """As apimachinery reads a bool from a query: anything but 0 and false, an empty value included."""
    return value is not None and value.lower() not in ("0", "false")


def _selected_name(selector: str) -> str:
    for term in selector.split(","):
        field, _, value = term.partition("=")
        if field.strip() == "metadata.name":
            return value.removeprefix("=").strip()
    return ""


def _name_in(body: bytes) -> str:
    if not body.startswith(b"{"):
        return ""
    try:
        name = json.loads(body)["metadata"]["name"]
    except (ValueError, KeyError, TypeError):
        return ""
    return name if isinstance(name, str) else ""
