"""Workers: whatever a look at a reset does, the others go on, and it is looked at again when it should be."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from cleanslate_operator import api, metrics, workers, workqueue
from unit.operator.fakeapi import Clock


async def work_off(
    reconcile: workers.Reconcile, *keys: str, until: Callable[[], bool], figures: metrics.Metrics | None = None
) -> None:
    """Have three workers work on these keys until something is so."""
    queue = workqueue.WorkQueue()
    crew = workers.Workers(queue, reconcile, figures or metrics.Metrics())
    for key in keys:
        queue.add(key)
    working = asyncio.create_task(crew.run(3))
    async with asyncio.timeout(5):
        while not until():
            await asyncio.sleep(0.005)
    queue.close()
    await working


def run(check: Callable[[], Awaitable[None]]) -> None:
    """Run a check."""
    asyncio.run(check())  # type: ignore[arg-type]


def test_a_reset_is_looked_at_again_when_it_says_so() -> None:
    """At once, after a while, and not at all for None."""
    looks: list[str] = []
    answers: dict[str, list[float | None]] = {"a": [0.0, 0.02, None], "b": [None]}

    async def reconcile(name: str) -> float | None:
        looks.append(name)
        return answers[name].pop(0)

    async def check() -> None:
        await work_off(reconcile, "a", "b", until=lambda: not any(answers.values()))
        assert sorted(looks) == ["a", "a", "a", "b"]

    run(check)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (api.Unavailable(request="/x: cannot get", message="no answer"), logging.WARNING),
        (api.Conflict(request="/x: cannot replace", status=409, reason="Conflict"), logging.INFO),
        (KeyError("spec"), logging.ERROR),
        (RecursionError("deep"), logging.ERROR),
    ],
    ids=["api server away", "conflict", "a mistake of ours", "a deep one"],
)
def test_a_failed_look_is_repeated_and_the_others_go_on(
    error: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With a traceback only where it is our mistake; counted by kind."""
    looks: list[str] = []
    figures = metrics.Metrics()

    async def reconcile(name: str) -> float | None:
        looks.append(name)
        if name == "bad" and looks.count("bad") < 3:
            raise error
        return None

    async def check() -> None:
        await work_off(reconcile, "bad", "good", until=lambda: looks.count("bad") == 3, figures=figures)
        assert looks.count("good") == 1

    with caplog.at_level(logging.INFO):
        run(check)
    told = [record for record in caplog.records if "GPUNodeReset bad: cannot go on" in record.getMessage()]
    assert [record.levelno for record in told] == [level, level]
    assert all(bool(record.exc_info) == (level == logging.ERROR) for record in told)
    assert f'cleanslate_reconcile_errors_total{{kind="{type(error).__name__}"}} 2.0' in figures.render().decode()


def test_one_reset_is_never_in_two_hands() -> None:
    """However often it is added while it is worked on."""
    inside: list[str] = []
    most = 0
    looks = 0

    async def check() -> None:
        queue = workqueue.WorkQueue()

        async def reconcile(name: str) -> float | None:
            nonlocal most, looks
            inside.append(name)
            most = max(most, inside.count(name))
            queue.add(name)
            await asyncio.sleep(0.001)
            inside.remove(name)
            looks += 1
            return 0.0

        crew = workers.Workers(queue, reconcile, metrics.Metrics())
        queue.add("a")
        working = asyncio.create_task(crew.run(4))
        await asyncio.sleep(0.2)
        queue.close()
        await working
        assert looks > 5
        assert most == 1

    run(check)


def test_what_is_in_hand_at_the_end_is_finished() -> None:
    """Closing the queue ends nothing in the middle."""
    done: list[str] = []

    async def check() -> None:
        queue = workqueue.WorkQueue()
        started = asyncio.Event()

        async def reconcile(name: str) -> float | None:
            started.set()
            await asyncio.sleep(0.05)
            done.append(name)
            return 0.0

        crew = workers.Workers(queue, reconcile, metrics.Metrics())
        queue.add("a")
        queue.add("b")
        working = asyncio.create_task(crew.run(1))
        await started.wait()
        queue.close()
        await working
        assert done == ["a"]

    run(check)


def test_it_tells_for_how_long_the_longest_look_goes_on() -> None:
    """For /livez."""
    clock = Clock()

    async def check() -> None:
        queue, let_go = workqueue.WorkQueue(), asyncio.Event()

        async def reconcile(name: str) -> float | None:
            await let_go.wait()
            return None

        crew = workers.Workers(queue, reconcile, metrics.Metrics(), clock=clock)
        assert crew.running_s() == 0.0
        queue.add("a")
        working = asyncio.create_task(crew.run(1))
        await asyncio.sleep(0.02)
        clock.now_s += 200
        assert crew.running_s() == 200.0
        let_go.set()
        queue.close()
        await working
        assert crew.running_s() == 0.0

    run(check)
