"""The install script where it must not install: on a full disk, and where an earlier run was cut off."""

import sys
from pathlib import Path

import pytest

from node.machine import Machine

pytestmark = pytest.mark.vllm

SCRIPT = str(Path(__file__).resolve().parent / "install.py")
SMALL = "/run/small"
NO_ROOM = 77


@pytest.fixture
def small_disk(machine_alone: Machine) -> Machine:
    """A machine with a disk of one megabyte at SMALL."""
    machine_alone.path(SMALL).mkdir()
    machine_alone.mount("tmpfs", SMALL, "tmpfs", 0, "size=1m")
    return machine_alone


def test_a_disk_without_room_is_told_before_anything_is_installed(small_disk: Machine) -> None:
    """Below 10 GB free the script ends with the code of a skipped test and one line that says what is missing."""
    done = small_disk.run(sys.executable, SCRIPT, env={"CLEANSLATE_BUILD_CACHE": SMALL})

    assert done.returncode == NO_ROOM
    assert done.stderr.count("\n") == 1
    assert "0.0 GB free, 10 GB needed" in done.stderr
    assert small_disk.names(f"{SMALL}/vllm") == {"lock"}


def test_what_an_interrupted_install_left_is_removed_and_not_used(small_disk: Machine) -> None:
    """An environment that was never finished is not taken for one; the next run removes it."""
    unfinished = small_disk.path(f"{SMALL}/vllm/0123456789abcdef.part")
    (unfinished / "bin").mkdir(parents=True)
    (unfinished / "bin" / "python").touch()

    assert small_disk.run(sys.executable, SCRIPT, env={"CLEANSLATE_BUILD_CACHE": SMALL}).returncode == NO_ROOM
    assert not unfinished.exists()
