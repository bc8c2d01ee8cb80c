"""The answers that the proxy gives in the API server's place: Status objects, and a watch's ERROR event."""

import json
from http import HTTPStatus
from typing import Any

from aiohttp import web

from cluster.programs.proxy.apirequest import ApiRequest
from cluster.programs.proxy.faults import Fault

# metav1.StatusReason by code, as k8s.io/apimachinery v0.37.2 `pkg/api/errors` pairs them
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    406: "NotAcceptable",
    409: "Conflict",
    410: "Expired",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


def status(fault: Fault, request: ApiRequest) -> dict[str, Any]:
    """A Status object about the request. A 409 to a create is AlreadyExists, as it is from the API server."""
    default = "AlreadyExists" if (fault.code, request.verb) == (409, "create") else _REASONS.get(fault.code, "")
    details: dict[str, Any] = {"name": request.name, "group": request.group, "kind": request.resource.split("/")[0]}
    if fault.retry_after_s is not None:
        details["retryAfterSeconds"] = fault.retry_after_s
    phrase = HTTPStatus(fault.code).phrase.lower()
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": fault.message or f"fault proxy: {phrase}: {request.verb} {request.resource} {request.name!r}",
        "reason": fault.reason or default,
        "details": {key: value for key, value in details.items() if value},
        "code": fault.code,
    }


def response(fault: Fault, request: ApiRequest) -> web.Response:
    """The answer with that Status; `retry_after_s` goes into the header too, where client-go and kopf look for it."""
    headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    return web.json_response(status(fault, request), status=fault.code, headers=headers)


def gone_event() -> bytes:
    """The event with which the watch cache ends a stream whose resource version it no longer has."""
    object_ = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "too old resource version: 1 (2)",
        "reason": "Expired",
        "code": 410,
    }
    return json.dumps({"type": "ERROR", "object": object_}).encode() + b"\n"
