"""Where leases are refused or prove nothing: the pass over all processes answers the same, or says that it cannot tell."""

import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

import pytest

from node import files, mounts

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC


@pytest.fixture(autouse=True, scope="module")
def _private_mounts() -> Iterator[None]:
    with mounts.private_mounts():
        yield


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tmpfs of the test's own."""
    return mounts.mount("tmpfs", tmp_path / "shm", nodev=False)


def needs_sight_of_all_processes() -> None:
    """The slower proof is blind in a PID namespace, and says so (tested below)."""
    if os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE:
        pytest.skip("needs the machine's own PID namespace: the slower proof must see every process")


def test_without_leases_the_slower_proof_answers_the_same(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Open and mapped segments are kept, the leftover goes, and the evidence says that this proof is the weaker one."""
    needs_sight_of_all_processes()
    if not shutil.which("cc"):
        pytest.skip("needs cc: it builds a library that refuses leases")
    library = mounts.without_leases(tmp_path)
    one, two, three, _ = (files.segment(root, f"psm_0000000{number}") for number in range(1, 5))
    with (
        mounts.user_of(one, "open", "another mount namespace"),
        mounts.user_of(two, "mapped", "another PID namespace"),
        mounts.user_of(three, "mapped by a thread"),
    ):
        answer = mounts.purge_in_program(root, LD_PRELOAD=str(library))
    live = ["psm_00000001", "psm_00000002", "psm_00000003"]
    assert {name: reason for name, (reason, _) in answer["kept"].items()} == dict.fromkeys(live, "it is in use")
    assert list(answer["removed"]) == ["psm_00000004"]
    assert "weaker proof does not see descriptors in flight" in answer["removed"]["psm_00000004"]
    assert sorted(os.listdir(root)) == live


def test_without_leases_a_pid_namespace_makes_the_answer_unknown(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Processes outside the namespace may use the file, so nothing is removed."""
    if not shutil.which("cc"):
        pytest.skip("needs cc: it builds a library that refuses leases")
    library = mounts.without_leases(tmp_path)
    dead = files.segment(root, "psm_00000001")
    inside = mounts.NAMESPACES["another PID namespace"]
    answer = mounts.purge_in_program(root, before=inside, LD_PRELOAD=str(library))
    reason, evidence = answer["kept"]["psm_00000001"]
    assert reason == "its use cannot be told"
    assert "PID namespace" in evidence
    assert dead.exists()


def test_on_overlayfs_a_mapped_file_is_kept_although_its_lease_is_granted(tmp_path: pathlib.Path) -> None:
    """There the kernel's lease does not see a mapping whose descriptor is closed, so the slower proof decides."""
    base = mounts.mount("tmpfs", tmp_path / "base")
    for name in ("lower", "upper", "work"):
        (base / name).mkdir()
    layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    try:
        root = mounts.mount("overlay", tmp_path / "merged", layers)
    except OSError as cause:
        pytest.skip(f"needs overlayfs: {cause}")
    # Names of its own: on overlayfs a mapped file of the same name anywhere on the machine counts as this one.
    live, dead = (files.segment(root, f"psm_{secrets.token_hex(4)}") for _ in range(2))
    with mounts.user_of(live, "mapped"):
        tally = files.purge(root)
    assert live.exists()
    assert live.name in files.kept(tally)
    needs_sight_of_all_processes()
    assert not dead.exists(), files.kept(tally)
