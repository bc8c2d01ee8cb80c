"""Shared memory on real tmpfs mounts: exactly what nobody uses goes, and everything odd stays and is named."""

import array
import errno
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Iterator

import pytest

from cleanslate import lease, ledger
from cleanslate.model import FileTally, Verdict
from node import files, mounts

NOBODY = 65534
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_IMMUTABLE_FL = 0x80086601, 0x40086602, 0x10


@pytest.fixture(autouse=True, scope="module")
def _private_mounts() -> Iterator[None]:
    with mounts.private_mounts():
        yield


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tmpfs of the test's own."""
    return mounts.mount("tmpfs", tmp_path / "shm", nodev=False)


@pytest.mark.parametrize("namespace", mounts.NAMESPACES)
@pytest.mark.parametrize("way", ["open", "mapped", "in flight"])
def test_a_segment_in_use_is_kept_however_it_is_used(root: pathlib.Path, way: str, namespace: str) -> None:
    """The kernel's lease sees a use in every form and namespace; the leftover beside it goes, and so does the segment at last."""
    live, _ = files.segment(root, "psm_00000001"), files.segment(root, "psm_00000002")
    with mounts.user_of(live, way, namespace):
        tally = files.purge(root)
        assert files.kept(tally) == {"psm_00000001": "it is in use"}
        assert "lease" in tally.kept[0].evidence
        assert files.removed(tally) == {"psm_00000002"}
        assert live.exists()
    assert files.removed(files.purge(root)) == {"psm_00000001"}


def test_the_same_name_on_two_filesystems_is_two_files(tmp_path: pathlib.Path) -> None:
    """A live server's segment in one mount proves nothing about the same path in another."""
    one, other = mounts.mount("tmpfs", tmp_path / "one"), mounts.mount("tmpfs", tmp_path / "other")
    live, dead = files.segment(one, "psm_0000000a"), files.segment(other, "psm_0000000a")
    with mounts.user_of(live, "mapped"):
        files.purge(one, other)
    assert live.exists()
    assert not dead.exists()


def test_exactly_the_leftovers_of_ten_thousand_go(root: pathlib.Path) -> None:
    """One live segment among 10,000 leftovers stays; counts and bytes are whole while the lists are bounded."""
    for number in range(10_001):
        (root / f"psm_{number:08x}").touch()
    files.segment(root, "psm_00000063", 8192)
    live = files.segment(root, "psm_00001388")
    with mounts.user_of(live, "mapped"):
        tally = files.purge(root)
    assert os.listdir(root) == ["psm_00001388"]
    assert (tally.removed_count, tally.kept_count) == (10_000, 1)
    assert len(tally.removed) == ledger.LIST_LIMIT
    assert tally.bytes_freed == 8192


def test_what_is_no_regular_file_is_kept_and_named(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Symlinks, directories, FIFOs, sockets, devices and hard links with a leftover's name are neither followed nor removed."""
    target = files.segment(tmp_path, "target")
    (root / "psm_00000001").symlink_to(target)
    (root / "psm_00000002").mkdir()
    os.mkfifo(root / "psm_00000003")
    os.mknod(root / "psm_00000004", 0o020600, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "psm_00000005"))
    os.mknod(root / "psm_00000006", 0o060600, os.makedev(7, 250))
    os.link(files.segment(root, "psm_00000007"), root / "other name")
    names = {f"psm_0000000{number}" for number in range(1, 8)}
    tally = files.purge(root)
    assert files.kept(tally) == {
        "psm_00000001": "it is a symlink, not a regular file",
        "psm_00000002": "it is a directory, not a regular file",
        "psm_00000003": "it is a FIFO, not a regular file",
        "psm_00000004": "it is a character device, not a regular file",
        "psm_00000005": "it is a socket, not a regular file",
        "psm_00000006": "it is a block device, not a regular file",
        "psm_00000007": "it has other names",
    }
    assert set(os.listdir(root)) == {*names, "other name"}
    assert target.exists()


def test_names_with_any_byte_are_judged_and_printed_on_one_line(root: pathlib.Path) -> None:
    """Line feeds, escapes and bytes that are not UTF-8 are fine in a name and harmless in a report."""
    raw = os.fsencode(root)
    for name in (b"vllm\n/dev".replace(b"/", b""), b"vllm_\xff\xfe", b"nccl-\x1b[2J"):
        with open(raw + b"/" + name, "wb"):
            pass
    os.symlink("/", raw + b"/vllm\nlink")
    tally = files.purge(root)
    assert os.listdir(root) == ["vllm\nlink"]
    assert files.removed(tally) == {r"vllm\x0adev", r"vllm_\xff\xfe", r"nccl-\x1b[2J"}
    assert set(files.kept(tally)) == {r"vllm\x0alink"}


def test_a_file_under_anothers_lease_is_in_use(root: pathlib.Path) -> None:
    """Another program's lease does not make the purge wait."""
    live = files.segment(root, "psm_00000001")
    lease.ignore_break_signal()
    with live.open("rb") as file:
        assert lease.take(file.fileno()) is lease.Lease.GRANTED
        tally = files.purge(root)
    assert [record.evidence for record in tally.kept] == ["another program holds a lease on it"]
    assert live.exists()


def as_nobody(root: pathlib.Path) -> FileTally:
    """A purge without any privilege."""

    def run() -> FileTally:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        return files.purge(root)

    tally = mounts.in_child(run)
    assert isinstance(tally, FileTally)
    return tally


def test_without_privilege_ones_own_leftovers_go(tmp_path: pathlib.Path) -> None:
    """An ordinary user's gate tells its own leftovers from its own live segments; another user's files stay, each reported."""
    root = mounts.mount("tmpfs", tmp_path / "shm", "mode=1777")
    for name in ("psm_00000001", "psm_00000002"):
        os.chown(files.segment(root, name), NOBODY, NOBODY)
    files.segment(root, "psm_00000003").chmod(0o666)
    files.segment(root, "psm_00000004").chmod(0o600)
    here = pathlib.Path("/mnt")  # the test's own directory is root's alone
    mounts.bind(root, here)
    with mounts.user_of(here / "psm_00000002", "mapped"):
        tally = as_nobody(here)
    assert files.removed(tally) == {"psm_00000001"}
    assert files.kept(tally) == {
        "psm_00000002": "it is in use",
        "psm_00000003": "its use cannot be told",
        "psm_00000004": "its use cannot be told",
    }


def test_another_users_leftover_goes_if_we_are_root(root: pathlib.Path) -> None:
    """Root needs no ownership."""
    os.chown(files.segment(root, "psm_00000001"), NOBODY, NOBODY)
    assert files.removed(files.purge(root)) == {"psm_00000001"}


def test_an_immutable_file_is_reported_and_the_rest_goes(root: pathlib.Path) -> None:
    """A file that cannot be removed is a record with what to do next, not the end."""
    stuck, _ = files.segment(root, "psm_00000001"), files.segment(root, "psm_00000002")
    with stuck.open("rb") as file:
        flags = array.array("L", [0])
        try:
            fcntl.ioctl(file, _FS_IOC_GETFLAGS, flags)
            fcntl.ioctl(file, _FS_IOC_SETFLAGS, array.array("L", [flags[0] | _FS_IMMUTABLE_FL]))
        except OSError as cause:
            if cause.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM):
                pytest.skip("needs a kernel whose tmpfs has file attributes (6.6 and later)")
            raise
    tally = files.purge(root)
    assert files.removed(tally) == {"psm_00000002"}
    (record,) = tally.kept
    assert record.verdict is Verdict.REMOVE
    assert record.error is not None
    assert record.error.startswith(f"{stuck} (dev ")
    assert record.error.endswith(
        "cannot remove: Operation not permitted; "
        "look for the immutable flag with lsattr, and for another owner in a sticky directory"
    )
    assert tally.bytes_freed == 4096


def test_what_is_young_or_from_the_future_is_kept(root: pathlib.Path) -> None:
    """A segment may have been created and not yet opened by its second process."""
    now = time.time()
    for name, age_s in (("psm_0000000a", 9.5), ("psm_0000000b", 10.5), ("psm_0000000c", -5)):
        os.utime(files.segment(root, name), (now - age_s, now - age_s))
    tally = files.purge(root, now=now)
    assert files.removed(tally) == {"psm_0000000b"}
    assert files.kept(tally) == {"psm_0000000a": "it is too young", "psm_0000000c": "it is from the future"}


def test_unknown_names_are_counted_and_go_only_on_request(root: pathlib.Path) -> None:
    """Without `every_family` a stranger's file is only counted; with it, it goes too, but never what is never touched."""
    names = (
        "my-app",
        "psm2_shm.1",
        "dcgm_vllm",
        "PostgreSQL.42",
        "libpod_lock",
        "lttng-ust-wait-8",
        "pulse-shm-1",
        "mps.log",
    )
    for name in names:
        files.segment(root, name)
    tally = files.purge(root)
    assert files.removed(tally) == {"psm2_shm.1"}
    assert (tally.kept, tally.kept_count) == ((), 7)
    tally = files.purge(root, every_family=True)
    assert files.removed(tally) == {"my-app"}
    assert set(files.kept(tally).values()) == {"it is never touched"}
    assert len(os.listdir(root)) == 6


def test_a_dry_run_says_the_same_and_touches_nothing(root: pathlib.Path) -> None:
    """What would go is listed with its evidence, nothing is freed, and no time stamp moves."""
    live, dead = files.segment(root, "psm_00000001"), files.segment(root, "psm_00000002")
    before = dead.stat()
    with mounts.user_of(live, "mapped"):
        tally = files.purge(root, dry_run=True)
    assert files.removed(tally) == {"psm_00000002"}
    assert files.kept(tally) == {"psm_00000001": "it is in use"}
    assert tally.bytes_freed == 0
    assert dead.stat() == before


def test_a_root_that_is_gone_is_a_record(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A sandbox may end between the look and the purge; the other roots are purged."""
    files.segment(root, "psm_00000001")
    tally = files.purge(tmp_path / "gone", root)
    assert files.kept(tally) == {"gone": "the directory cannot be read"}
    assert files.removed(tally) == {"psm_00000001"}


def test_only_the_top_level_is_purged(root: pathlib.Path) -> None:
    """Directories in shared memory are somebody's own."""
    (root / "mine").mkdir()
    deep = files.segment(root / "mine", "psm_00000001")
    files.purge(root, every_family=True)
    assert deep.exists()
