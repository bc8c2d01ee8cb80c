"""Where shared memory is looked for on a node, and where never."""

import pathlib
import time
from collections.abc import Iterator

import pytest

from cleanslate import shm, shmroots, tree
from node import files, mounts


@pytest.fixture(autouse=True, scope="module")
def _private_mounts() -> Iterator[None]:
    with mounts.private_mounts():
        yield


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
    dead = files.segment(host / "dev/shm", "psm_00000001")
    tally = shm.purge(
        ["/dev/shm"], min_age_s=0, every_family=False, dry_run=False, now=time.time() + files.OLD_S, host_root=str(host)
    )
    assert [record.path for record in tally.removed] == ["/dev/shm/psm_00000001"]
    assert tally.roots == ("/dev/shm",)
    assert not dead.exists()


def test_in_a_volume_a_chosen_name_is_not_enough(host: pathlib.Path) -> None:
    """A memory volume may hold a pod's own files, `vllm.yaml` say; only names that vLLM itself makes are leftovers there."""
    volume = host / "var/lib/kubelet/pods/u1/volumes/kubernetes.io~empty-dir/dshm"
    mine, cache = files.segment(volume, "vllm.yaml"), files.segment(volume, f"vllm_mm_{'a' * 22}")
    roots, _ = roots_of(host)
    shm.purge(
        sorted(roots),
        min_age_s=0,
        every_family=False,
        dry_run=False,
        now=time.time() + files.OLD_S,
        host_root=str(host),
    )
    assert mine.exists()
    assert not cache.exists()
