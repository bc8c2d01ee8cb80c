"""The fault proxy leaves requests unanswered, ends whoever makes them, and spares those whose turn it is not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.littleworld import World

_NODE = "/api/v1/nodes/n"
# Asks once, as soon as it is told to.
_CLIENT = """
import pathlib, sys
from cluster.plainclient import Client
sys.stdin.readline()
Client(sys.argv[1], pathlib.Path(sys.argv[2])).ask("PUT", sys.argv[3], b"{}")
"""


@contextmanager
def client(world: World) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its turn to write."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    argv = [sys.executable, "-c", _CLIENT, world.proxy.url, str(world.client.ca), _NODE]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_client_is_killed_at_its_write(world: World, done: bool) -> None:
    """Before, the API server has never heard of it; after, it has done what was asked."""
    with client(world) as process, world.proxy.killing(process.pid, upstream_first=done, verb="update") as fault:
        process.communicate(b"\n", timeout=30)
        assert (process.returncode, fault.hits) == (-9, 1)
    assert (_NODE in world.api.objects) is done


def test_client_lives_on_where_its_write_is_not_the_one(world: World) -> None:
    """The first is let by."""
    with client(world) as process, world.proxy.killing(process.pid, skip=1, verb="update") as fault:
        process.communicate(b"\n", timeout=30)
        assert (process.returncode, fault.hits) == (0, 0)
    assert _NODE in world.api.objects


def test_silence_has_no_answer_and_the_request_is_never_passed_on(world: World) -> None:
    """The connection is taken, and cut when the silence ends."""
    with ThreadPoolExecutor(1) as aside:
        with world.proxy.silencing(verb="update") as fault:
            asked = aside.submit(world.client.ask, "PUT", _NODE, b"{}")
            fault.wait()
            assert not asked.done()
        assert isinstance(asked.exception(10), OSError)
    assert world.api.asked == []
    assert world.client.ask("GET", _NODE).code == 404


def test_fault_hits_those_whose_turn_it_is(world: World) -> None:
    """After the first that are skipped, the first of each so many."""
    with world.proxy.answering(500, skip=1, every=3) as fault:
        assert [world.client.ask("GET", _NODE).code for _ in range(8)] == [404, 500, 404, 404, 500, 404, 404, 500]
    assert fault.hits == 3
