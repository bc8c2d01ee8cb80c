"""What can become of a request to the API server, other than an answer: one class for each case that a caller tells apart."""

# ruff: noqa: N818 - each class is named for what the API server says

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT_LIMIT = 2048
_LONGEST_WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause in a Status, such as the disruption budget that forbids an eviction."""

    reason: str
    message: str


class ApiError(Exception):
    """A request that was not done. `status` is the HTTP status, 0 if there was no answer; `retry_after_s` the server's wish."""

    def __init__(
        self,
        *,
        request: str = "API server",
        status: int = 0,
        reason: str = "",
        message: str = "",
        retry_after_s: float | None = None,
        causes: tuple[Cause, ...] = (),
    ) -> None:
        self.request = request
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.causes = causes
        said = " ".join(filter(None, (str(status or ""), reason)))
        super().__init__(": ".join(filter(None, (request, said, message))))


class NotFound(ApiError):
    """404."""


class Conflict(ApiError):
    """409: another version than the one expected, or there already."""

    @property
    def already_exists(self) -> bool:
        """Whether it is that an object of this name exists."""
        return self.reason == "AlreadyExists"


class Gone(ApiError):
    """410: the rest of a list is not to be had any more."""


class Throttled(ApiError):
    """429: too many requests, or an eviction that a disruption budget forbids for now (see `causes`)."""


class Denied(ApiError):
    """401 or 403."""


class Invalid(ApiError):
    """Any other 4xx: the same request will never do."""


class Unavailable(ApiError):
    """5xx, no connection, no answer in time, or an answer that is none."""


class NotLeading(ApiError):
    """Not sent: this process does not lead any more, so it may change nothing."""


_CLASSES: Mapping[int, type[ApiError]] = {
    401: Denied,
    403: Denied,
    404: NotFound,
    409: Conflict,
    410: Gone,
    429: Throttled,
}


def from_answer(request: str, status: int, document: Any, retry_after: str | None) -> ApiError:
    """The error in an answer that is no success. `document`: its JSON, None if it has none; `retry_after`: that header."""
    found = document if isinstance(document, dict) else {}
    details = found.get("details")
    details = details if isinstance(details, dict) else {}
    return _class(status)(
        request=request,
        status=status,
        reason=_text(found.get("reason")),
        message=_text(found.get("message")) or "no Status in the answer",
        retry_after_s=_seconds(retry_after, details.get("retryAfterSeconds")),
        causes=_causes(details.get("causes")),
    )


def _class(status: int) -> type[ApiError]:
    return _CLASSES.get(status) or (Invalid if 400 <= status < 500 else Unavailable)


def _causes(value: Any) -> tuple[Cause, ...]:
    listed = [one for one in value[:16] if isinstance(one, dict)] if isinstance(value, list) else []
    return tuple(Cause(reason=_text(one.get("reason")), message=_text(one.get("message"))) for one in listed)


def _text(value: Any) -> str:
    return value[:_TEXT_LIMIT] if isinstance(value, str) else ""


def _seconds(*candidates: Any) -> float | None:
    for value in candidates:
        if isinstance(value, int | str) and str(value).isascii() and str(value).isdigit() and len(str(value)) < 10:
            return min(float(value), _LONGEST_WAIT_S)
    return None
