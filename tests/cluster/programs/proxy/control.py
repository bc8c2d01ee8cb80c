"""The conversation with the test's side: a JSON object a line, a question and its answer at a time."""

import asyncio
import json
from typing import Any

from cluster.programs.proxy.faults import Fault, Kind, Which
from cluster.programs.proxy.listener import Listener
from cluster.programs.proxy.requestlog import RequestLog
from cluster.programs.proxy.rules import Changes, Rules
from cluster.programs.proxy.watches import Watches


class Control:
    """Answers the test's questions."""

    def __init__(self, changes: Changes, rules: Rules, log: RequestLog, watches: Watches, listener: Listener) -> None:
        self._changes = changes
        self._rules = rules
        self._log = log
        self._watches = watches
        self._listener = listener

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers until the other end closes, whether on purpose or because its process has ended."""
        while line := await reader.readline():
            question = json.loads(line)
            answer = await getattr(self, f"_{question.pop('do')}")(**question)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()

    async def _begin(self, fault: dict[str, Any]) -> dict[str, Any]:
        number, rule = self._rules.begin(Fault.from_json(fault))
        self._watches.apply(rule)
        if rule.fault.kind is Kind.DOWN:
            rule.hits += self._listener.close()
        return {"number": number}

    async def _end(self, number: int) -> dict[str, Any]:
        rule = self._rules.end(number)
        if rule.fault.kind is Kind.DOWN and not self._rules.are_down():
            await self._listener.open()
        return {"hits": rule.hits}

    async def _hits(self, number: int, at_least: int, deadline_s: float) -> dict[str, Any]:
        rule = self._rules[number]
        await self._changes.until(lambda: rule.hits >= at_least, deadline_s)
        return {"hits": rule.hits}

    async def _requests(
        self, which: dict[str, list[str]], since_s: float, answered: int, deadline_s: float
    ) -> dict[str, Any]:
        """All that match, once `answered` of them have been answered or the deadline is over."""
        chosen = Which.of(**{key: tuple(patterns) for key, patterns in which.items()})

        def enough() -> bool:
            return sum(one.code is not None for one in self._log.matching(chosen, since_s)) >= answered

        await self._changes.until(enough, deadline_s)
        return {"requests": [one.to_json() for one in self._log.matching(chosen, since_s)]}

    async def _forget(self) -> dict[str, Any]:
        self._log.forget()
        return {}
