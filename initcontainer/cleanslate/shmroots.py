"""Where shared memory lives on a node: the host's, each sandbox's, each memory volume's. Never the multi-process service's."""

import os
from collections.abc import Callable, Iterator, Sequence

from cleanslate import filesystems, printing, tree

HOST_SHM = "/dev/shm"  # noqa: S108 - the very place

# Paths are those of the engines' default state directories, each a tmpfs of one pod.
SANDBOX_PATTERNS = (
    "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/*/shm",
    "/run/k3s/containerd/io.containerd.grpc.v1.cri/sandboxes/*/shm",
    "/var/snap/microk8s/common/run/containerd/io.containerd.grpc.v1.cri/sandboxes/*/shm",
    "/run/containers/storage/overlay-containers/*/userdata/shm",  # CRI-O
    "/var/run/containers/storage/overlay-containers/*/userdata/shm",
)
EMPTY_DIR_PATTERN = "/var/lib/kubelet/pods/*/volumes/kubernetes.io~empty-dir/*"
# The multi-process service's clients all share one tmpfs; a file of it is in use by name, open or not.
MPS_PATTERNS = (
    "/run/nvidia/mps/shm",
    "/var/run/nvidia/mps/shm",
    "/var/lib/kubelet/plugins/gpu.nvidia.com/mps/*/shm",
)
_KNOWN_PATTERNS = (HOST_SHM, *SANDBOX_PATTERNS, EMPTY_DIR_PATTERN)


def find_roots(host_root: str, extra: Sequence[str], warn: Callable[[str], None]) -> tuple[str, ...]:
    """The directories of shared memory on a node, as paths of the node, each filesystem's directory once.

    `extra` are more of them, absolute paths on the node. One that is missing is a warning; one that must not be purged raises
    tree.RefusedPathError. OSError if `host_root` cannot be opened.
    """
    mounts = filesystems.Mounts.read()
    barred = _Barred(host_root)
    found: dict[tuple[int, int], str] = {}
    for path in extra:
        _admit(path)
    for fd, path in _candidates(host_root, extra, warn):
        if barred.bars(fd, path):
            if path in extra:
                raise tree.RefusedPathError(path, "it belongs to the CUDA multi-process service", "leave it out")
            continue
        if not is_empty_dir(path) or mounts.of(fd).kind == "tmpfs":
            found.setdefault(tree.identity(fd), path)
    return tuple(found.values())


def is_empty_dir(path: str) -> bool:
    """Whether a root is a pod's volume, where files with any name and purpose may lie, rather than a /dev/shm."""
    return "/volumes/kubernetes.io~empty-dir/" in path


def _candidates(host_root: str, extra: Sequence[str], warn: Callable[[str], None]) -> Iterator[tuple[int, str]]:
    for path in (HOST_SHM, *extra):
        parts = tree.parts_of(path)
        try:
            with tree.opened(host_root, parts) as fd:
                yield fd, tree.joined(parts)
        except tree.RefusedPathError as cause:
            if path in extra:
                raise
            warn(f"{HOST_SHM}: cannot look for shared memory: {cause.cause}; {cause.next_step} with --shm-root")
        except OSError as cause:
            warn(
                f"{printing.printable(path)}: cannot look for shared memory: {cause.strerror}; check that it is mounted"
            )
    for pattern in (*SANDBOX_PATTERNS, EMPTY_DIR_PATTERN):
        yield from _below_root(host_root, tree.parts_of(pattern))


def _below_root(host_root: str, pattern: Sequence[str]) -> Iterator[tuple[int, str]]:
    with tree.opened(host_root, ()) as fd:
        yield from tree.directories(fd, "", pattern, None)


def _admit(path: str) -> None:
    """Refuse what is off limits, except where shared memory is known to live."""
    parts = tree.parts_of(path)
    if not any(_fits(parts, tree.parts_of(pattern)) for pattern in _KNOWN_PATTERNS):
        tree.admit(path, ())


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(parts) == len(pattern) and all(one in ("*", part) for part, one in zip(parts, pattern, strict=True))


class _Barred:
    """The multi-process service's shared memory by path, by directory, and by filesystem, since it is mounted elsewhere too."""

    def __init__(self, host_root: str) -> None:
        self._patterns = tuple(map(tree.parts_of, MPS_PATTERNS))
        self._directories: set[tuple[int, int]] = set()
        self._devices: set[int] = set()
        for parts in self._patterns:
            for fd, _ in _below_root(host_root, parts):
                self._add(fd)

    def _add(self, fd: int) -> None:
        status, above = os.fstat(fd), os.stat("..", dir_fd=fd)
        self._directories.add((status.st_dev, status.st_ino))
        if status.st_dev != above.st_dev:  # else it is a mere directory, and its filesystem is the node's
            self._devices.add(status.st_dev)

    def bars(self, fd: int, path: str) -> bool:
        device, inode = tree.identity(fd)
        by_path = any(_fits(tree.parts_of(path), pattern) for pattern in self._patterns)
        return by_path or device in self._devices or (device, inode) in self._directories
