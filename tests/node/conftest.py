"""Fixtures of the tests on real processes: they need root, and a machine each."""

import os
from collections.abc import Iterator

import pytest

from node.machine import Machine


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: it makes namespaces, mounts and cgroups of its own")


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine of the test's own, without GPUs."""
    with Machine() as one:
        yield one
