"""A behaviour being played: the life of one pod on its node, without any input or output."""

import heapq
import math
from collections.abc import Iterable, Iterator

from cluster.fakenodes.behaviours import Behaviour, Run, Start
from cluster.fakenodes.containers import Clock, Container
from cluster.fakenodes.pods import Pod

PULL_RETRY_S = 2.0  # ErrImagePull stays about that long before ImagePullBackOff


class Play:
    """The containers of one pod and what they are at. Whoever drives it takes `moments` and waits as long as each says."""

    def __init__(self, pod: Pod, behaviour: Behaviour, clock: Clock) -> None:
        self.pod = pod
        self.behaviour = behaviour
        self.clock = clock
        self.started_s = clock()
        self.init = tuple(Container(pod, spec, clock, init=True) for spec in pod.init)
        self.main = tuple(Container(pod, spec, clock, init=False) for spec in pod.main)
        self.has_sandbox = False
        self.is_over = False
        self.transitions: dict[str, tuple[bool, float]] = {}

    def moments(self) -> Iterator[float]:
        """Yields, for each state that the pod comes to, how many seconds it stays in it; the last one is infinite.

        States that stay for 0 seconds need not be shown to anybody. After a change of `behaviour` ask again: the new moments
        go on from the state that was reached.
        """
        yield from self._course()
        yield math.inf

    @property
    def is_visible(self) -> bool:
        """Whether the node says anything of the pod."""
        return self.behaviour.start is not Start.IGNORED

    @property
    def phase(self) -> str:
        """As getPhase of the kubelet's kubelet_pods.go decides it."""
        if self.is_over:
            return "Succeeded" if all(one.succeeded for one in self.main) else "Failed"
        regular = [one for one in self.init if not one.spec.sidecar]
        if any(_is_lost(one) for one in regular):
            return "Failed"
        if not all(one.succeeded for one in regular) or not all(one.ever_started for one in self.main):
            return "Pending"
        if any(one.running or one.restartable for one in self.main):
            return "Running"
        return "Succeeded" if all(one.succeeded for one in self.main) else "Failed"

    def end(self) -> None:
        """The pod was deleted and its containers have ended."""
        for one in (*self.init, *self.main):
            if one.running:
                one.end(Run(exit_code=self.behaviour.deletion_exit_code))
            one.ready = False
        self.is_over = True

    def _course(self) -> Iterator[float]:
        start = self.behaviour.start
        if start is Start.IMAGE_MISSING:
            yield from self._pull()
        if start is not Start.RUNS:
            return
        if self.behaviour.start_after_s and not self.has_sandbox:
            yield self.behaviour.start_after_s
        self.has_sandbox = True
        for one in self.init:
            yield from self._initialize(one)
            if not one.spec.sidecar and not one.succeeded:
                return
        staying = [one for one in self.init if one.spec.sidecar]
        yield from _together(one.runs(self.behaviour) for one in (*staying, *self.main))

    def _initialize(self, one: Container) -> Iterator[float]:
        if not one.spec.sidecar:
            yield from () if one.succeeded else one.runs(self.behaviour)
        elif not one.ever_started:
            one.start()
            one.ready = True

    def _pull(self) -> Iterator[float]:
        self.has_sandbox = True
        pending = [one for one in self.init if not one.ever_started]
        waiting = pending[:1] or [one for one in self.main if not one.ever_started]
        for one in waiting:
            one.wait("ErrImagePull", f'failed to pull and unpack image "{one.spec.image}": not found')
        yield PULL_RETRY_S
        for one in waiting:
            one.wait("ImagePullBackOff", f'Back-off pulling image "{one.spec.image}": ErrImagePull: not found')


def _is_lost(one: Container) -> bool:
    return one.exit_code not in {None, 0} and not one.restartable


def _together(courses: Iterable[Iterator[float]]) -> Iterator[float]:
    """Several courses at once, as one: yields the time to the next change of any."""
    queue = [(0.0, number, course) for number, course in enumerate(courses)]
    now_s = 0.0
    while queue:
        then_s, number, course = heapq.heappop(queue)
        if then_s > now_s:
            yield then_s - now_s
        now_s = then_s
        stays_s = next(course, None)
        if stays_s is not None:
            heapq.heappush(queue, (now_s + stays_s, number, course))
