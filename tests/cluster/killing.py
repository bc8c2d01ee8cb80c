"""Kills the operator at one write after the other, each in a reset of its own, and starts it again."""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.faultproxy import FaultProxy, Selection
from cluster.kubectl import Object
from cluster.operatorprocess import OperatorProcess
from cluster.operatorworld import END_S, WRITES, OperatorWorld

_SIGKILL = -9


@dataclass(slots=True)
class Victim:
    """An operator that is started again, under the same name, whenever it was killed."""

    world: OperatorWorld
    proxy: FaultProxy
    _process: OperatorProcess = field(init=False)
    _end: futures.Future[int] = field(init=False)

    def start(self) -> None:
        """Starts it. As a Pod's container does, it has the name that it had before."""
        self._process = self.world.operator(self.proxy).__enter__()
        self._end = self.world.workers.submit(self._process.wait)

    def stop(self) -> None:
        """Ends it for good."""
        self._process.__exit__()

    def killed(
        self, kind: str, number: int, awaited: futures.Future[Object], act: Callable[[], object], *, done: bool
    ) -> bool:
        """Acts, and kills it at its write of this kind ("create leases") and number, before or (`done`) after that is done.

        Starts it again. False: it came to the end that is awaited without that write.
        """
        which = self._which(kind)
        with self.proxy.killing(self._process.pid, upstream_first=done, skip=number - 1, **which) as fault:
            act()
            futures.wait({awaited, self._end}, timeout=END_S, return_when=futures.FIRST_COMPLETED)
            if not fault.hits:
                assert not self._end.done(), f"it ended by itself: {self._end.result()}; see {self._process.log}"
                return False
        assert self._end.result(END_S) == _SIGKILL
        self.start()
        return True

    def writes(self) -> set[str]:
        """The kinds of writes that it made since the proxy's log was last forgotten."""
        return {f"{one.verb} {one.resource}" for one in self.proxy.requests(**WRITES)}

    @staticmethod
    def _which(kind: str) -> Selection:
        verb, resource = kind.split()
        return {**WRITES, "verb": verb, "resource": resource}


@contextmanager
def victim(world: OperatorWorld) -> Iterator[Victim]:
    """A running one."""
    with world.proxy() as proxy:
        one = Victim(world, proxy)
        one.start()
        try:
            yield one
        finally:
            one.stop()
