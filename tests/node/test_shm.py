"""Shared memory on real tmpfs mounts: exactly what nobody uses goes, and nothing is followed."""

import array
import errno
import fcntl
import os
import pathlib
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cleanslate import lease, ledger, shm, shmroots, tree
from cleanslate.model import FileTally, Verdict
from node import mounts

OLD_S = 100.0
NOBODY = 65534
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_IMMUTABLE_FL = 0x80086601, 0x40086602, 0x10
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC


@pytest.fixture(autouse=True, scope="module")
def _private_mounts() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts filesystems of its own")
    with mounts.private_mounts():
        yield


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tmpfs of the test's own."""
    return mounts.mount("tmpfs", tmp_path / "shm", nodev=False)


def purge(*roots: pathlib.Path, min_age_s: float = 10, **how: Any) -> FileTally:
    """A purge `OLD_S` from now, so that every file of the test is old."""
    settings = {"every_family": False, "dry_run": False, "now": time.time() + OLD_S, **how}
    return shm.purge([str(one) for one in roots], min_age_s=min_age_s, **settings)


def segment(root: pathlib.Path, name: str, size: int = 4096) -> pathlib.Path:
    """A shared memory file with pages of its own."""
    path = root / name
    path.write_bytes(b"x" * size)
    return path


def kept(tally: FileTally) -> dict[str, str]:
    """Reasons by file name."""
    return {os.path.basename(record.path): record.reason for record in tally.kept}


def removed(tally: FileTally) -> set[str]:
    """File names."""
    return {os.path.basename(record.path) for record in tally.removed}


def needs_sight_of_all_processes() -> None:
    """The slower proof is blind in a PID namespace, and says so (tested below)."""
    if os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE:
        pytest.skip("needs the machine's own PID namespace: the slower proof must see every process")


@pytest.mark.parametrize("namespace", mounts.NAMESPACES)
@pytest.mark.parametrize("way", ["open", "mapped", "in flight"])
def test_a_segment_in_use_is_kept_however_it_is_used(root: pathlib.Path, way: str, namespace: str) -> None:
    """The kernel's lease sees a use in every form and namespace; the leftover beside it goes, and so does the segment at last."""
    live, _ = segment(root, "psm_00000001"), segment(root, "psm_00000002")
    with mounts.user_of(live, way, namespace):
        tally = purge(root)
        assert kept(tally) == {"psm_00000001": "it is in use"}
        assert "lease" in tally.kept[0].evidence
        assert removed(tally) == {"psm_00000002"}
        assert live.exists()
    assert removed(purge(root)) == {"psm_00000001"}


def test_the_same_name_on_two_filesystems_is_two_files(tmp_path: pathlib.Path) -> None:
    """A live server's segment in one mount proves nothing about the same path in another."""
    one, other = mounts.mount("tmpfs", tmp_path / "one"), mounts.mount("tmpfs", tmp_path / "other")
    live, dead = segment(one, "psm_0000000a"), segment(other, "psm_0000000a")
    with mounts.user_of(live, "mapped"):
        purge(one, other)
    assert live.exists()
    assert not dead.exists()


def test_exactly_the_leftovers_of_ten_thousand_go(root: pathlib.Path) -> None:
    """One live segment among 10,000 leftovers stays; counts and bytes are whole while the lists are bounded."""
    for number in range(10_001):
        (root / f"psm_{number:08x}").touch()
    segment(root, "psm_00000063", 8192)
    live = segment(root, "psm_00001388")
    with mounts.user_of(live, "mapped"):
        tally = purge(root)
    assert os.listdir(root) == ["psm_00001388"]
    assert (tally.removed_count, tally.kept_count) == (10_000, 1)
    assert len(tally.removed) == ledger.LIST_LIMIT
    assert tally.bytes_freed == 8192


def test_what_is_no_regular_file_is_kept_and_named(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Symlinks, directories, FIFOs, sockets, devices and hard links with a leftover's name are neither followed nor removed."""
    target = segment(tmp_path, "target")
    (root / "psm_00000001").symlink_to(target)
    (root / "psm_00000002").mkdir()
    os.mkfifo(root / "psm_00000003")
    os.mknod(root / "psm_00000004", 0o020600, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "psm_00000005"))
    os.mknod(root / "psm_00000006", 0o060600, os.makedev(7, 250))
    os.link(segment(root, "psm_00000007"), root / "other name")
    names = {f"psm_0000000{number}" for number in range(1, 8)}
    tally = purge(root)
    assert kept(tally) == {
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
    tally = purge(root)
    assert os.listdir(root) == ["vllm\nlink"]
    assert removed(tally) == {r"vllm\x0adev", r"vllm_\xff\xfe", r"nccl-\x1b[2J"}
    assert set(kept(tally)) == {r"vllm\x0alink"}


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
        return purge(root)

    tally = mounts.in_child(run)
    assert isinstance(tally, FileTally)
    return tally


@pytest.mark.parametrize("moment", SWAP_MOMENTS)
@pytest.mark.parametrize("newcomer", ["a symlink", "a new file", "a FIFO"])
def test_a_file_swapped_in_mid_purge_is_kept(
    root: pathlib.Path, tmp_path: pathlib.Path, moment: str, newcomer: str
) -> None:
    """Whatever takes the name between the look and the removal stays, and so does what a symlink points at."""
    canary, spare = segment(tmp_path, "canary"), root / "spare"
    segment(root, "psm_00000001")
    {"a symlink": lambda: spare.symlink_to(canary), "a FIFO": lambda: os.mkfifo(spare)}.get(newcomer, spare.touch)()
    is_moment, reason = SWAP_MOMENTS[moment]
    tally = purge_with_hook(root, is_moment, lambda _: os.rename(spare, root / "psm_00000001"))
    assert canary.read_bytes()
    if moment == "before it is opened":  # then it is the newcomer that was looked at, and an unused file is a leftover
        reason = f"it is {newcomer}, not a regular file"
        if newcomer == "a new file":
            assert removed(tally) == {"psm_00000001"}
            return
    assert kept(tally) == {"psm_00000001": reason}
    assert os.listdir(root) == ["psm_00000001"]
    assert (root / "psm_00000001").is_fifo() == (newcomer == "a FIFO")


def test_a_symlink_swapped_in_at_the_last_moment_is_not_followed(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Even between the last check and the removal, the target of a symlink is safe."""
    canary, spare = segment(tmp_path, "canary"), root / "spare"
    segment(root, "psm_00000001")
    spare.symlink_to(canary)
    purge_with_hook(root, lambda event, _: event == "os.remove", lambda _: os.rename(spare, root / "psm_00000001"))
    assert canary.read_bytes()


def test_an_opener_during_the_lease_gets_its_file(root: pathlib.Path) -> None:
    """Somebody who opens the file under our lease waits, gets it with its name, and the signal about it does not end us."""
    live = segment(root, "psm_00000001")
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
        tally = purge(root)
        return tally, os.waitstatus_to_exitcode(os.waitpid(openers[0], 0)[1])

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    tally, opener_code = mounts.in_child(run)
    assert kept(tally) == {"psm_00000001": "it is in use"}
    assert tally.kept[0].evidence == "somebody opened it during the proof"
    assert opener_code == 0
    assert live.exists()


def test_a_file_under_anothers_lease_is_in_use(root: pathlib.Path) -> None:
    """Another program's lease does not make the purge wait."""
    live = segment(root, "psm_00000001")
    lease.ignore_break_signal()
    with live.open("rb") as file:
        assert lease.take(file.fileno()) is lease.Lease.GRANTED
        tally = purge(root)
    assert [record.evidence for record in tally.kept] == ["another program holds a lease on it"]
    assert live.exists()


def as_nobody(root: pathlib.Path) -> FileTally:
    """A purge without any privilege."""

    def run() -> FileTally:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        return purge(root)

    tally = mounts.in_child(run)
    assert isinstance(tally, FileTally)
    return tally


def test_without_privilege_ones_own_leftovers_go(tmp_path: pathlib.Path) -> None:
    """An ordinary user's gate tells its own leftovers from its own live segments; another user's files stay, each reported."""
    root = mounts.mount("tmpfs", tmp_path / "shm", "mode=1777")
    for name in ("psm_00000001", "psm_00000002"):
        os.chown(segment(root, name), NOBODY, NOBODY)
    segment(root, "psm_00000003").chmod(0o666)
    segment(root, "psm_00000004").chmod(0o600)
    here = pathlib.Path("/mnt")  # the test's own directory is root's alone
    mounts.bind(root, here)
    with mounts.user_of(here / "psm_00000002", "mapped"):
        tally = as_nobody(here)
    assert removed(tally) == {"psm_00000001"}
    assert kept(tally) == {
        "psm_00000002": "it is in use",
        "psm_00000003": "its use cannot be told",
        "psm_00000004": "its use cannot be told",
    }


def test_another_users_leftover_goes_if_we_are_root(root: pathlib.Path) -> None:
    """Root needs no ownership."""
    os.chown(segment(root, "psm_00000001"), NOBODY, NOBODY)
    assert removed(purge(root)) == {"psm_00000001"}


def test_an_immutable_file_is_reported_and_the_rest_goes(root: pathlib.Path) -> None:
    """A file that cannot be removed is a record with what to do next, not the end."""
    stuck, _ = segment(root, "psm_00000001"), segment(root, "psm_00000002")
    with stuck.open("rb") as file:
        flags = array.array("L", [0])
        try:
            fcntl.ioctl(file, _FS_IOC_GETFLAGS, flags)
            fcntl.ioctl(file, _FS_IOC_SETFLAGS, array.array("L", [flags[0] | _FS_IMMUTABLE_FL]))
        except OSError as cause:
            if cause.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM):
                pytest.skip("needs a kernel whose tmpfs has file attributes (6.6 and later)")
            raise
    tally = purge(root)
    assert removed(tally) == {"psm_00000002"}
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
        os.utime(segment(root, name), (now - age_s, now - age_s))
    tally = purge(root, now=now)
    assert removed(tally) == {"psm_0000000b"}
    assert kept(tally) == {"psm_0000000a": "it is too young", "psm_0000000c": "it is from the future"}


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
        segment(root, name)
    tally = purge(root)
    assert removed(tally) == {"psm2_shm.1"}
    assert (tally.kept, tally.kept_count) == ((), 7)
    tally = purge(root, every_family=True)
    assert removed(tally) == {"my-app"}
    assert set(kept(tally).values()) == {"it is never touched"}
    assert len(os.listdir(root)) == 6


def test_a_dry_run_says_the_same_and_touches_nothing(root: pathlib.Path) -> None:
    """What would go is listed with its evidence, nothing is freed, and no time stamp moves."""
    live, dead = segment(root, "psm_00000001"), segment(root, "psm_00000002")
    before = dead.stat()
    with mounts.user_of(live, "mapped"):
        tally = purge(root, dry_run=True)
    assert removed(tally) == {"psm_00000002"}
    assert kept(tally) == {"psm_00000001": "it is in use"}
    assert tally.bytes_freed == 0
    assert dead.stat() == before


def test_a_root_that_is_gone_is_a_record(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A sandbox may end between the look and the purge; the other roots are purged."""
    segment(root, "psm_00000001")
    tally = purge(tmp_path / "gone", root)
    assert kept(tally) == {"gone": "the directory cannot be read"}
    assert removed(tally) == {"psm_00000001"}


def test_only_the_top_level_is_purged(root: pathlib.Path) -> None:
    """Directories in shared memory are somebody's own."""
    (root / "mine").mkdir()
    deep = segment(root / "mine", "psm_00000001")
    purge(root, every_family=True)
    assert deep.exists()


def test_without_leases_the_slower_proof_answers_the_same(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Open and mapped segments are kept, the leftover goes, and the evidence says that this proof is the weaker one."""
    needs_sight_of_all_processes()
    if not shutil.which("cc"):
        pytest.skip("needs cc: it builds a library that refuses leases")
    library = mounts.without_leases(tmp_path)
    one, two, three, _ = (segment(root, f"psm_0000000{number}") for number in range(1, 5))
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
    dead = segment(root, "psm_00000001")
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
    live, dead = segment(root, "psm_00000001"), segment(root, "psm_00000002")
    with mounts.user_of(live, "mapped"):
        tally = purge(root)
    assert live.exists()
    assert "psm_00000001" in kept(tally)
    needs_sight_of_all_processes()
    assert not dead.exists()


@pytest.fixture
def host(tmp_path: pathlib.Path) -> pathlib.Path:
    """A node's root with shared memory wherever engines put it, seen below a directory."""
    top = mounts.mount("tmpfs", tmp_path / "host")
    mounts.mount("ramfs", top / "var/lib/kubelet/pods")  # anything but tmpfs, as a disk is
    for path in (
        "dev/shm",
        "run/containerd/io.containerd.grpc.v1.cri/sandboxes/aaa/shm",
        "run/k3s/containerd/io.containerd.grpc.v1.cri/sandboxes/bbb/shm",
        "run/containers/storage/overlay-containers/ccc/userdata/shm",
        "var/lib/kubelet/pods/u1/volumes/kubernetes.io~empty-dir/dshm",
        "run/nvidia/mps/shm",
        "var/lib/kubelet/plugins/gpu.nvidia.com/mps/m1/shm",
    ):
        mounts.mount("tmpfs", top / path)
    (top / "var/lib/kubelet/pods/u1/volumes/kubernetes.io~empty-dir/scratch").mkdir()
    (top / "var/run").symlink_to("/run")
    return top


def roots_of(host: pathlib.Path, *extra: str) -> tuple[set[str], list[str]]:
    """The roots and the warnings."""
    warnings: list[str] = []
    return set(shmroots.find_roots(str(host), extra, warnings.append)), warnings


ALL_ROOTS = {
    "/dev/shm",
    "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/aaa/shm",
    "/run/k3s/containerd/io.containerd.grpc.v1.cri/sandboxes/bbb/shm",
    "/run/containers/storage/overlay-containers/ccc/userdata/shm",
    "/var/lib/kubelet/pods/u1/volumes/kubernetes.io~empty-dir/dshm",
}


def test_every_engines_shared_memory_is_a_root(host: pathlib.Path) -> None:
    """The host's, each sandbox's and each memory volume; not a volume that lies in an ordinary directory on disk."""
    assert roots_of(host) == (ALL_ROOTS, [])


def test_the_multi_process_services_memory_is_no_root_under_any_path(host: pathlib.Path) -> None:
    """Neither its own directories, nor a client pod's /dev/shm that is the same filesystem, nor by request."""
    client = "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/mps-client/shm"
    other = "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/mps-part/shm"
    (host / "run/nvidia/mps/shm/part").mkdir()
    mounts.bind(host / "run/nvidia/mps/shm", host / client[1:])
    mounts.bind(host / "run/nvidia/mps/shm/part", host / other[1:])
    assert roots_of(host)[0] == ALL_ROOTS
    with pytest.raises(tree.RefusedPathError, match="multi-process service"):
        roots_of(host, "/run/nvidia/mps/shm")


def test_one_directory_under_two_paths_is_one_root(host: pathlib.Path) -> None:
    """Else its leftovers would be counted twice."""
    mounts.bind(host / "dev/shm", host / "data/shm")
    roots, _ = roots_of(host, "/data/shm")
    assert len(roots & {"/dev/shm", "/data/shm"}) == 1


def test_a_missing_root_is_a_warning(host: pathlib.Path) -> None:
    """The reset goes on with the others."""
    roots, warnings = roots_of(host, "/data/nowhere")
    assert roots == ALL_ROOTS
    assert warnings == [
        "/data/nowhere: cannot look for shared memory: No such file or directory; check that it is mounted"
    ]


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("data/shm", "not an absolute path"),
        ("/data/../etc", "'.', '..'"),
        ("/etc", "/etc is off limits"),
        ("/var/lib/containerd/x", "/var/lib/containerd is off limits"),
        ("/", "the whole machine"),
        ("/link", "/link is a symlink; give the real path, /dev/shm"),
    ],
)
def test_a_root_that_must_not_be_purged_is_refused(host: pathlib.Path, path: str, cause: str) -> None:
    """The message says why and what to do."""
    (host / "link").symlink_to("/dev/shm")
    with pytest.raises(tree.RefusedPathError) as refusal:
        roots_of(host, path)
    assert cause in str(refusal.value)


def test_paths_are_the_nodes_own(host: pathlib.Path) -> None:
    """A report from a pod with the node mounted somewhere names the file as the node does."""
    dead = segment(host / "dev/shm", "psm_00000001")
    tally = shm.purge(
        ["/dev/shm"], min_age_s=0, every_family=False, dry_run=False, now=time.time() + OLD_S, host_root=str(host)
    )
    assert [record.path for record in tally.removed] == ["/dev/shm/psm_00000001"]
    assert tally.roots == ("/dev/shm",)
    assert not dead.exists()


def test_in_a_volume_a_chosen_name_is_not_enough(host: pathlib.Path) -> None:
    """A memory volume may hold a pod's own files, `vllm.yaml` say; only names that vLLM itself makes are leftovers there."""
    volume = host / "var/lib/kubelet/pods/u1/volumes/kubernetes.io~empty-dir/dshm"
    mine, cache = segment(volume, "vllm.yaml"), segment(volume, f"vllm_mm_{'a' * 22}")
    roots, _ = roots_of(host)
    shm.purge(
        sorted(roots), min_age_s=0, every_family=False, dry_run=False, now=time.time() + OLD_S, host_root=str(host)
    )
    assert mine.exists()
    assert not cache.exists()
