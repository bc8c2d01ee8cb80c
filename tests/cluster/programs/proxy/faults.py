"""A fault as data: what it does, to which requests. Made by the test's side, carried out by the proxy."""

import dataclasses
import fnmatch
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from cluster.programs.proxy import apirequest
from cluster.programs.proxy.apirequest import ApiRequest

_FIELDS = tuple(one.name for one in dataclasses.fields(ApiRequest))
_HTTP_METHODS = frozenset({"get", "head", "post", "put", "patch", "delete", "options"})


class Kind(StrEnum):
    """What a fault does."""

    ANSWER = "answer"  # a Status instead of the API server's answer
    DELAY = "delay"  # wait, then pass on
    HOLD = "hold"  # wait for the fault's end, then pass on
    SILENCE = "silence"  # wait for the fault's end, then cut the connection; the API server is never asked
    KILL = "kill"  # end the client's process by SIGKILL, and cut the connection
    RESET = "reset"  # cut the connection; the API server is never asked
    LOSE = "lose"  # the API server did it, the connection is cut before its answer
    HEADERS_ONLY = "headers-only"  # the API server did it, the connection is cut after the answer's headers
    TRUNCATE = "truncate"  # the API server did it, the connection ends within the answer's body
    CUT_WATCHES = "cut-watches"
    WATCHES_GONE = "watches-gone"
    STALL_WATCHES = "stall-watches"
    DOWN = "down"  # no connections at all


@dataclass(frozen=True, slots=True)
class Which:
    """Which requests: for each field of ApiRequest the patterns (fnmatch) of which one must match."""

    patterns: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, **selection: str | tuple[str, ...]) -> Self:
        """From keywords, each a pattern or several. Raises ValueError for an unknown field or verb."""
        patterns = {key: (value,) if isinstance(value, str) else tuple(value) for key, value in selection.items()}
        for key in patterns.keys() - set(_FIELDS):
            raise ValueError(f"{key}: cannot select requests by it: no such field; use {', '.join(_FIELDS)}")
        known = apirequest.VERBS | _HTTP_METHODS
        for verb in patterns.get("verb", ()):
            if not any(fnmatch.fnmatchcase(one, verb) for one in known):
                raise ValueError(f"verb {verb!r}: cannot match anything; use one of {', '.join(sorted(known))}")
        return cls(patterns)

    def matches(self, request: ApiRequest) -> bool:
        """Whether every field that has patterns matches one of them."""
        return all(
            any(fnmatch.fnmatchcase(getattr(request, key), pattern) for pattern in patterns)
            for key, patterns in self.patterns.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Which of the settings count depends on its kind."""

    kind: Kind
    which: Which
    times: int | None = None  # None: as often as it matches
    skip: int = 0  # the first so many that match pass
    every: int = 1  # from there on the first of each so many is hit, the others pass
    code: int = 0
    reason: str = ""  # "": the one that the API server gives with this code
    message: str = ""
    retry_after_s: int | None = None
    upstream_first: bool = False  # the API server does what was asked before the client gets the other answer
    seconds: float = 0.0
    pid: int = 0
    after_bytes: int | None = None  # None: half of the body
    after_events: int | None = None
    after_s: float | None = None
    now: bool = True  # watches that run already are hit too
    cleanly: bool = False  # the stream ends as it does at its timeout, not by a reset

    def to_json(self) -> dict[str, Any]:
        """A form that `from_json` takes back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The fault that `to_json` wrote."""
        which = Which.of(**{key: tuple(one) for key, one in values["which"]["patterns"].items()})
        return cls(**{**values, "kind": Kind(values["kind"]), "which": which})

    def can_begin_with(self, request: ApiRequest) -> bool:
        """Whether it can hit this request as it comes in, rather than only a watch that runs already."""
        if self.kind is Kind.DOWN:
            return False
        if self.kind is Kind.CUT_WATCHES:
            return self.after_events is not None or self.after_s is not None
        # A watch's answer has no end after which something could be done
        return request.verb != "watch" or not (self.upstream_first or self.kind in (Kind.LOSE, Kind.TRUNCATE))
