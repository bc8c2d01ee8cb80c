"""The faults that are active, and how often each hit; whoever waits for a hit is told."""

import asyncio
from collections.abc import Callable

from cluster.programs.proxy.apirequest import ApiRequest
from cluster.programs.proxy.faults import Fault, Kind


class Changes:
    """Lets a task wait until something is true that other tasks bring about."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def happened(self) -> None:
        """Makes everyone who waits look again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, is_true: Callable[[], bool], deadline_s: float) -> bool:
        """Waits until it is true; returns whether it was so within the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                while not is_true():
                    await self._next()
        except TimeoutError:
            return False
        return True

    async def _next(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)


class Rule:
    """One active fault."""

    def __init__(self, fault: Fault, changes: Changes) -> None:
        self.fault = fault
        self.hits = 0
        self._met = 0
        self.ended = asyncio.Event()
        self._changes = changes

    def is_live(self) -> bool:
        """Whether it may still hit."""
        return not self.ended.is_set() and (self.fault.times is None or self.hits < self.fault.times)

    def matches(self, request: ApiRequest) -> bool:
        """Whether it may hit this request."""
        return self.is_live() and self.fault.which.matches(request)

    def hit(self) -> bool:
        """Counts a hit; False, and no hit, if it may not hit any more or it is not the turn of this one."""
        if not self.is_live():
            return False
        self._met += 1
        beyond = self._met - 1 - self.fault.skip
        if beyond < 0 or beyond % self.fault.every:
            return False
        self.hits += 1
        self._changes.happened()
        return True


class Rules:
    """All active faults, in the order in which they began: the first that matches a request is the one that counts."""

    def __init__(self, changes: Changes) -> None:
        self._rules: dict[int, Rule] = {}
        self._changes = changes
        self._last = 0

    def begin(self, fault: Fault) -> tuple[int, Rule]:
        """Makes a fault active; returns its number too."""
        self._last += 1
        rule = self._rules[self._last] = Rule(fault, self._changes)
        return self._last, rule

    def end(self, number: int) -> Rule:
        """Ends a fault and releases whatever waits for that."""
        rule = self._rules.pop(number)
        rule.ended.set()
        return rule

    def __getitem__(self, number: int) -> Rule:
        return self._rules[number]

    def first(self, request: ApiRequest) -> Rule | None:
        """The rule for a new request."""
        for rule in self._rules.values():
            if rule.fault.can_begin_with(request) and rule.matches(request):
                return rule
        return None

    def stalling(self, request: ApiRequest) -> Rule | None:
        """The rule that keeps this running watch silent."""
        for rule in self._rules.values():
            if rule.fault.kind is Kind.STALL_WATCHES and rule.matches(request):
                return rule
        return None

    def are_down(self) -> bool:
        """Whether connections are to be refused."""
        return any(rule.fault.kind is Kind.DOWN for rule in self._rules.values())
