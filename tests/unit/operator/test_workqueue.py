"""The work queue's promises: each key once, never by two workers, storms coalesce, failures wait longer each time."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from cleanslate_operator import buckets, workqueue
from cleanslate_operator.buckets import Rate
from cleanslate_operator.workqueue import WorkQueue
from unit.operator.fakeapi import Clock


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._jumped_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> object:
            ready = select(0 if timeout is None or timeout > 0 else timeout)
            if not ready and timeout and timeout > 0:
                self._jumped_s += timeout
            return ready

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._jumped_s


def run(check: Callable[[], Awaitable[None]]) -> None:
    """Run a check on such a loop."""
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        runner.run(check())  # type: ignore[arg-type]


async def nothing_for(queue: WorkQueue, seconds: float) -> None:
    """The queue gives nothing for that long."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), seconds)


def test_a_key_waits_once_however_often_it_is_added() -> None:
    """Ten events about a reset are one look at it."""

    async def check() -> None:
        queue = WorkQueue()
        for _ in range(10):
            queue.add("a")
        queue.add("b")
        assert queue.depth() == 2
        assert await queue.get() == "a"
        assert await queue.get() == "b"
        assert queue.depth() == 0
        await nothing_for(queue, 60)

    run(check)


def test_a_key_is_never_worked_on_twice_at_once_and_comes_again() -> None:
    """What happens during a look leads to one more look, after it."""

    async def check() -> None:
        queue = WorkQueue()
        queue.add("a")
        assert await queue.get() == "a"
        for _ in range(5):
            queue.add("a")
            queue.add_after("a", 0)
        queue.add_after("a", 0.1)
        await nothing_for(queue, 5)
        queue.done("a")
        assert await queue.get() == "a"
        queue.done("a")
        await nothing_for(queue, 60)

    run(check)


def test_a_storm_of_events_is_looked_at_four_times_a_second() -> None:
    """Ten at once, then four a second, for this key; another key does not wait for it."""

    async def check() -> None:
        queue, looks = WorkQueue(), 0
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 10

        async def work() -> None:
            nonlocal looks
            while (key := await queue.get()) is not None:
                looks += key == "storm"
                queue.done(key)

        worker = asyncio.create_task(work())
        while loop.time() < until_s:
            queue.add("storm")
            await asyncio.sleep(0.01)
        started = loop.time()
        queue.add("calm")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert loop.time() == started
        assert queue.depth() == 0
        assert looks == pytest.approx(10 + 10 * 4, abs=2)
        queue.close()
        await worker

    run(check)


def test_steps_that_a_reset_asks_for_itself_do_not_count_as_a_storm() -> None:
    """`look again at once` is not slowed down within reason, and is without."""

    async def check() -> None:
        queue = WorkQueue()
        started = asyncio.get_running_loop().time()
        for step in range(300):
            queue.add_after("a", 0)
            assert await queue.get() == "a"
            queue.done("a")
            if step == 150:
                assert asyncio.get_running_loop().time() == started
        assert asyncio.get_running_loop().time() - started == pytest.approx(100 / 20, abs=0.1)

    run(check)


def test_the_earliest_of_several_moments_counts() -> None:
    """And none is left once the key was looked at."""

    async def check() -> None:
        queue, loop = WorkQueue(), asyncio.get_running_loop()
        started = loop.time()
        queue.add_after("a", 30)
        queue.add_after("a", 5)
        queue.add_after("a", 60)
        assert await queue.get() == "a"
        assert loop.time() - started == pytest.approx(5)
        queue.done("a")
        await nothing_for(queue, 120)

    run(check)


def test_an_event_comes_before_a_moment_that_was_set() -> None:
    """A reset that waits for 30 s is looked at when its pod changes, and asks anew."""

    async def check() -> None:
        queue, loop = WorkQueue(), asyncio.get_running_loop()
        queue.add_after("a", 30)
        queue.add("a")
        started = loop.time()
        assert await queue.get() == "a"
        assert loop.time() == started
        queue.done("a")
        await nothing_for(queue, 60)

    run(check)


def test_failures_wait_longer_each_time_up_to_half_a_minute() -> None:
    """And from the start again after a success."""

    async def check() -> None:
        queue, loop = WorkQueue(), asyncio.get_running_loop()
        waits = []
        for _ in range(15):
            started = loop.time()
            queue.add_rate_limited("a")
            await queue.get()
            queue.done("a")
            waits.append(loop.time() - started)
        assert 0.04 <= waits[0] <= 0.05
        assert all(1.5 * before <= after <= 2.6 * before for before, after in itertools.pairwise(waits[:9]))
        assert all(24 <= wait <= 30 for wait in waits[-3:])
        queue.forget("a")
        started = loop.time()
        queue.add_rate_limited("a", at_least_s=0.0)
        await queue.get()
        assert loop.time() - started <= 0.05

    run(check)


def test_the_servers_own_wish_is_waited_for() -> None:
    """`Retry-After` is the least, not the most."""

    async def check() -> None:
        queue, loop = WorkQueue(), asyncio.get_running_loop()
        started = loop.time()
        queue.add_rate_limited("a", at_least_s=10.0)
        await queue.get()
        assert loop.time() - started == pytest.approx(10.0)

    run(check)


def test_a_closed_queue_sends_every_worker_home() -> None:
    """Also one that comes later; what still waited is for the next process."""

    async def check() -> None:
        queue = WorkQueue()
        workers = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(0)
        queue.add_after("later", 1)
        queue.close()
        queue.add("a")
        queue.add_after("a", 0.1)
        assert [await worker for worker in workers] == [None] * 3
        assert await queue.get() is None
        assert queue.depth() == 0

    run(check)


def test_it_tells_how_long_the_first_has_waited() -> None:
    """For the metrics."""

    async def check() -> None:
        queue = WorkQueue()
        assert queue.oldest_s() == 0.0
        queue.add("a")
        await asyncio.sleep(3)
        queue.add("b")
        assert queue.oldest_s() == pytest.approx(3.0)

    run(check)


def test_a_worker_that_is_cancelled_while_it_waits_loses_no_key() -> None:
    """The key goes to the next one."""

    async def check() -> None:
        queue = WorkQueue()
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        queue.add("a")
        assert await queue.get() == "a"

    run(check)


def test_buckets_of_keys_that_are_quiet_are_forgotten() -> None:
    """A million resets over time leave nothing behind."""
    clock = Clock()
    some = buckets.Buckets(Rate(burst=2, per_s=1.0), clock)
    for number in range(10_000):
        clock.now_s += 0.1
        assert some.take(f"reset-{number}") == 0.0
    assert len(some) < 200


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    """The answer of an empty one is exactly when there is a token again."""
    clock = Clock()
    one = buckets.Buckets(Rate(burst=2, per_s=4.0), clock)
    assert [one.take("a"), one.take("a")] == [0.0, 0.0]
    wait_s = one.take("a")
    assert wait_s == pytest.approx(0.25)
    clock.now_s += wait_s + 1e-9
    assert one.take("a") == 0.0
    assert one.take("b") == 0.0


def test_the_defaults_are_as_documented() -> None:
    """A change here is a change of behaviour."""
    assert Rate(burst=10, per_s=4.0) == workqueue.EVENTS
    assert (workqueue.FIRST_RETRY_S, workqueue.LAST_RETRY_S) == (0.05, 30.0)
