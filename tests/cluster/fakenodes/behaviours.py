"""What a simulated pod does: data that a test chooses and that the process of the simulated nodes plays."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MESSAGE_LIMIT_BYTES = 4096  # what the kubelet keeps of a termination message


class Start(StrEnum):
    """How far the node gets before the first container."""

    RUNS = "Runs"
    IGNORED = "Ignored"  # the node says nothing of the pod at all
    CREATING = "Creating"  # ContainerCreating for ever
    IMAGE_MISSING = "ImageMissing"  # ErrImagePull, then ImagePullBackOff for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one container: `after_s` seconds after its start it ends with `exit_code` (None: it never ends).

    `message` is its termination message. `reason` is Completed or Error, by the exit code, unless it is given (OOMKilled).
    `ready_after_s` is for containers that serve: their readiness probe passes that long after the start.
    """

    exit_code: int | None = 0
    after_s: float = 0.0
    message: str = ""
    reason: str = ""
    ready_after_s: float = 0.0


FOREVER = Run(exit_code=None)
OUT_OF_MEMORY = Run(exit_code=137, reason="OOMKilled")
SEGMENTATION_FAULT = Run(exit_code=139)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """One pod's life. What has no delay is one write: a pod without any goes to Running in a single PATCH.

    `init` and `main` are the successive runs of each init and each main container; the last one repeats. `named` has other
    runs for containers whose name matches a pattern. Whether a container is restarted is the pod's restart policy; a first
    restart comes at once, later ones after `backoff_s`, doubled each time up to 300 s, as the kubelet's do.
    `start_after_s` passes before the first container. A deletion takes `deletion_s` (None: it never ends) whatever the grace
    period says, and ends the containers with `deletion_exit_code`.
    """

    start: Start = Start.RUNS
    start_after_s: float = 0.0
    init: tuple[Run, ...] = (Run(),)
    main: tuple[Run, ...] = (FOREVER,)
    named: tuple[tuple[str, tuple[Run, ...]], ...] = ()
    backoff_s: float = 10.0
    deletion_s: float | None = 0.0
    deletion_exit_code: int = 143

    def runs(self, container: str, *, init: bool) -> tuple[Run, ...]:
        """The successive runs of one container."""
        for pattern, runs in self.named:
            if fnmatch.fnmatchcase(container, pattern):
                return runs
        return self.init if init else self.main


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`behaviour` for the pods that match everything: shell patterns of node, namespace and pod, and all of `labels`."""

    behaviour: Behaviour
    node: str = "*"
    namespace: str = "*"
    pod: str = "*"
    labels: tuple[tuple[str, str], ...] = ()

    def matches(self, *, node: str, namespace: str, pod: str, labels: Mapping[str, str]) -> bool:
        """Whether the pod is one of those meant."""
        return (
            fnmatch.fnmatchcase(node, self.node)
            and fnmatch.fnmatchcase(namespace, self.namespace)
            and fnmatch.fnmatchcase(pod, self.pod)
            and all(labels.get(key) == value for key, value in self.labels)
        )


def choose(rules: Iterable[Rule], *, node: str, namespace: str, pod: str, labels: Mapping[str, str]) -> Behaviour:
    """The first rule that matches decides; none does: `Behaviour()`, which succeeds at once and runs for ever."""
    for rule in rules:
        if rule.matches(node=node, namespace=namespace, pod=pod, labels=labels):
            return rule.behaviour
    return Behaviour()


def init_says(message: str, *, exit_code: int = 0, after_s: float = 0.0) -> Behaviour:
    """Each init container ends after `after_s` with this termination message; on success the pod runs."""
    return Behaviour(init=(Run(exit_code=exit_code, after_s=after_s, message=message),))


def init_never_ends() -> Behaviour:
    """The first init container runs for ever."""
    return Behaviour(init=(FOREVER,))


def garbage(*, exit_code: int = 0) -> Behaviour:
    """An init container that leaves neither text nor JSON: a cut document with control and replacement characters.

    The kubelet gives bytes that are no UTF-8 as U+FFFD.
    """
    return init_says('{"schema":"\ufffd\ufffd\x00\x1b[31m\u202e', exit_code=exit_code)


def overlong(*, exit_code: int = 0) -> Behaviour:
    """An init container that fills all 4,096 bytes of its message, so that JSON in it is cut off."""
    start = '{"message":"'
    return init_says(start + "x" * (MESSAGE_LIMIT_BYTES - len(start)), exit_code=exit_code)


def to_data(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    """Rules as JSON can hold them."""
    return [dataclasses.asdict(rule) for rule in rules]


def from_data(data: Iterable[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Rules from what `to_data` made, or from a file with any part of it. Raises TypeError or ValueError on unknown fields."""
    return tuple(_rule(item) for item in data)


def _rule(data: Mapping[str, Any]) -> Rule:
    given = dict(data)
    labels = dict(given.pop("labels", ()))
    return Rule(behaviour=_behaviour(given.pop("behaviour", {})), labels=tuple(labels.items()), **given)


def _behaviour(data: Mapping[str, Any]) -> Behaviour:
    given = dict(data)
    for field in ("init", "main"):
        if field in given:
            given[field] = _runs(given[field])
    if "start" in given:
        given["start"] = Start(given["start"])
    named = dict(given.pop("named", ()))
    return Behaviour(named=tuple((pattern, _runs(runs)) for pattern, runs in named.items()), **given)


def _runs(data: Iterable[Mapping[str, Any]]) -> tuple[Run, ...]:
    runs = tuple(Run(**item) for item in data)
    if not runs:
        raise ValueError("behaviour: cannot play: a container has no runs; give at least one")
    return runs
