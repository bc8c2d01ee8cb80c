"""One simulated container: its state as the API shows it, and the runs it goes through."""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from cluster.fakenodes.behaviours import Behaviour, Run
from cluster.fakenodes.pods import ContainerSpec, Pod
from cluster.fakenodes.timestamps import rfc3339

Clock = Callable[[], float]  # Unix time in seconds as the pod's node has it

NOTICE_S = 1.0  # until the kubelet sees that a container ended and acts: it asks the runtime once a second (PLEG)
BACKOFF_LIMIT_S = 300.0  # the kubelet's MaxContainerBackOff


class Container:
    """The state of one container. `runs` gives its course; it can be asked again, after a change of behaviour, and goes on."""

    def __init__(self, pod: Pod, spec: ContainerSpec, clock: Clock, *, init: bool) -> None:
        self.pod = pod
        self.spec = spec
        self.init = init
        self.restarts = 0
        self.ready = False
        self.state: dict[str, Any] = {"waiting": {"reason": "PodInitializing" if pod.init else "ContainerCreating"}}
        self.last: dict[str, Any] = {}
        self._clock = clock

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return "running" in self.state

    @property
    def ever_started(self) -> bool:
        """Whether it has run or runs."""
        return "waiting" not in self.state or bool(self.last)

    @property
    def exit_code(self) -> int | None:
        """Of the run that ended last; None before the first end and while it runs."""
        if self.running:
            return None
        ended = self.state.get("terminated") or self.last.get("terminated")
        return ended["exitCode"] if ended else None

    @property
    def succeeded(self) -> bool:
        """Whether it ended and well."""
        return self.exit_code == 0

    @property
    def restartable(self) -> bool:
        """Whether its end, with the code it has, is followed by another run."""
        if self.spec.sidecar or (self.pod.restart_policy == "Always" and not self.init):
            return True
        return self.pod.restart_policy != "Never" and self.exit_code != 0

    @property
    def identifier(self) -> str:
        """The runtime's name for the present or last run: another one after each restart."""
        name = f"{self.pod.uid}/{self.spec.name}/{self.restarts}"
        return "containerd://" + hashlib.sha256(name.encode()).hexdigest()

    def wait(self, reason: str, message: str = "") -> None:
        """It is not running yet, and why."""
        self.state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}

    def start(self) -> None:
        """A run begins; the one before becomes the last state."""
        if "terminated" in self.state:
            self.last = self.state
        if self.last:
            self.restarts += 1
        self.state = {"running": {"startedAt": rfc3339(self._clock())}}

    def end(self, run: Run) -> None:
        """The present run ends with the run's code, reason and message."""
        reason = run.reason or ("Error" if run.exit_code else "Completed")
        ended = {
            "exitCode": run.exit_code,
            "reason": reason,
            "startedAt": self.state["running"]["startedAt"],
            "finishedAt": rfc3339(self._clock()),
            "containerID": self.identifier,
        }
        self.state = {"terminated": ended | ({"message": run.message} if run.message else {})}
        self.ready = self.init and not self.spec.sidecar and run.exit_code == 0

    def runs(self, behaviour: Behaviour) -> Iterator[float]:
        """Goes through the runs. Yields how many seconds the state that it now has stays; ends when no run follows."""
        runs = behaviour.runs(self.spec.name, init=self.init and not self.spec.sidecar)
        while self.exit_code is None or self.restartable:
            if not self.running:
                self.start()
            run = runs[min(self.restarts, len(runs) - 1)]
            yield from self._serve(run)
            self.end(run)
            if self.restartable:
                yield from self._pause(behaviour)

    def _serve(self, run: Run) -> Iterator[float]:
        serves = not self.init or self.spec.sidecar
        left_s = math.inf if run.exit_code is None else run.after_s
        if serves and run.ready_after_s < left_s:
            if run.ready_after_s and not self.ready:
                yield run.ready_after_s
                left_s -= run.ready_after_s
            self.ready = True
        yield left_s

    def _pause(self, behaviour: Behaviour) -> Iterator[float]:
        yield NOTICE_S
        if self.restarts == 0:
            return
        backoff_s = min(behaviour.backoff_s * 2 ** min(self.restarts - 1, 16), BACKOFF_LIMIT_S)
        self.last = self.state
        self.wait("CrashLoopBackOff", f"back-off {backoff_s:.0f}s restarting failed container={self.spec.name}")
        yield backoff_s
