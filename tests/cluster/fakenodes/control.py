"""The process's side of the conversation with a test: one JSON object a line, questions on stdin, answers on stdout.

Question: {"do": NAME, "with": {…}}. Answer: {"answer": …} or {"error": TEXT}. The end of the questions is the end of the fleet.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cluster.fakenodes import behaviours
from cluster.fakenodes.fleets import Fleet

LINE_LIMIT_BYTES = 1 << 24


async def serve(fleet: Fleet) -> None:
    """Answers until stdin ends."""
    questions = await _stdin()
    actions = _actions(fleet)
    while line := await questions.readline():
        print(json.dumps(await _answer(actions, line)), flush=True)


async def _answer(actions: Mapping[str, Callable[..., Any]], line: bytes) -> dict[str, Any]:
    try:
        question = json.loads(line)
        answer = actions[question["do"]](**question.get("with", {}))
        return {"answer": await answer if inspect.isawaitable(answer) else answer}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _actions(fleet: Fleet) -> dict[str, Callable[..., Any]]:
    async def wait_registered(timeout_s: float) -> float:
        try:
            async with asyncio.timeout(timeout_s):
                return await fleet.wait_registered()
        except TimeoutError:
            data = fleet.data()
            raise TimeoutError(
                f"{data['nodes']} of {len(fleet.nodes)} nodes registered in {timeout_s:.0f} s; {data['last_troubles'][-3:]}"
            ) from None

    return {
        "wait_registered": wait_registered,
        "behave": lambda rules: fleet.behave(behaviours.from_data(rules)),
        "silence": fleet.silence,
        "wake": fleet.wake,
        "set_ready": fleet.set_ready,
        "skew": fleet.skew,
        "remove": fleet.remove,
        "register": fleet.register,
        "figures": fleet.data,
    }


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader
