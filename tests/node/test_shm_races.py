"""A purge of shared memory with others at work in the same directory: nothing is followed, nobody loses a file."""

import fcntl
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cleanslate import lease
from cleanslate.model import FileTally
from node import files, mounts


@pytest.fixture(autouse=True, scope="module")
def _private_mounts() -> Iterator[None]:
    with mounts.private_mounts():
        yield


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tmpfs of the test's own."""
    return mounts.mount("tmpfs", tmp_path / "shm", nodev=False)


SWAP_MOMENTS = {
    "before it is opened": (lambda event, args: event == "open" and args[0] == "psm_00000001", ""),
    "before the lease": (lambda event, args: event == "fcntl.fcntl" and args[1] == fcntl.F_SETLEASE, "it was replaced"),
    "under the lease": (lambda event, args: event == "fcntl.fcntl" and args[1] == fcntl.F_GETLEASE, "it was replaced"),
}


def purge_with_hook(root: pathlib.Path, is_moment: Callable[[str, Any], bool], act: Callable[[Any], None]) -> FileTally:
    """A purge in a child in which `act` happens at the first moment that the interpreter's audit events tell of."""

    def run() -> FileTally:
        done = False

        def hook(event: str, args: Any) -> None:
            nonlocal done
            if not done and is_moment(event, args):
                done = True
                act(args)

        sys.addaudithook(hook)
        return files.purge(root)

    tally = mounts.in_child(run)
    assert isinstance(tally, FileTally)
    return tally


@pytest.mark.parametrize("moment", SWAP_MOMENTS)
@pytest.mark.parametrize("newcomer", ["a symlink", "a new file", "a FIFO"])
def test_a_file_swapped_in_mid_purge_is_kept(
    root: pathlib.Path, tmp_path: pathlib.Path, moment: str, newcomer: str
) -> None:
    """Whatever takes the name between the look and the removal stays, and so does what a symlink points at."""
    canary, spare = files.segment(tmp_path, "canary"), root / "spare"
    files.segment(root, "psm_00000001")
    {"a symlink": lambda: spare.symlink_to(canary), "a FIFO": lambda: os.mkfifo(spare)}.get(newcomer, spare.touch)()
    is_moment, reason = SWAP_MOMENTS[moment]
    tally = purge_with_hook(root, is_moment, lambda _: os.rename(spare, root / "psm_00000001"))
    assert canary.read_bytes()
    if moment == "before it is opened":  # then it is the newcomer that was looked at, and an unused file is a leftover
        reason = f"it is {newcomer}, not a regular file"
        if newcomer == "a new file":
            assert files.removed(tally) == {"psm_00000001"}
            return
    assert files.kept(tally) == {"psm_00000001": reason}
    assert os.listdir(root) == ["psm_00000001"]
    assert (root / "psm_00000001").is_fifo() == (newcomer == "a FIFO")


def test_a_symlink_swapped_in_at_the_last_moment_is_not_followed(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Even between the last check and the removal, the target of a symlink is safe."""
    canary, spare = files.segment(tmp_path, "canary"), root / "spare"
    files.segment(root, "psm_00000001")
    spare.symlink_to(canary)
    purge_with_hook(root, lambda event, _: event == "os.remove", lambda _: os.rename(spare, root / "psm_00000001"))
    assert canary.read_bytes()


def test_an_opener_during_the_lease_gets_its_file(root: pathlib.Path) -> None:
    """Somebody who opens the file under our lease waits, gets it with its name, and the signal about it does not end us."""
    live = files.segment(root, "psm_00000001")
    openers: list[int] = []

    def let_one_open(args: Any) -> None:
        pid = os.fork()
        if pid == 0:
            os.close(args[0])  # a copy of ours, with which the lease would outlive our closing it
            os._exit(0 if os.stat(os.open(live, os.O_RDWR)).st_nlink == 1 else 1)
        openers.append(pid)
        deadline = time.monotonic() + 20
        while lease.held(args[0]):
            assert time.monotonic() < deadline

    def run() -> tuple[FileTally, int]:
        armed = True

        def hook(event: str, args: Any) -> None:
            nonlocal armed
            if armed and event == "fcntl.fcntl" and args[1] == fcntl.F_GETLEASE:
                armed = False
                let_one_open(args)

        sys.addaudithook(hook)
        tally = files.purge(root)
        return tally, os.waitstatus_to_exitcode(os.waitpid(openers[0], 0)[1])

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    tally, opener_code = mounts.in_child(run)
    assert files.kept(tally) == {"psm_00000001": "it is in use"}
    assert tally.kept[0].evidence == "somebody opened it during the proof"
    assert opener_code == 0
    assert live.exists()
