"""Ways into a directory tree that others may write to: by directory descriptors, never through a symlink, never off limits.

Paths are the node's own, absolute, and are looked up below `host_root`, where the node's root is mounted.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import translate
from typing import NamedTuple

from cleanslate import printing

DEPTH_LIMIT = 64  # directories below a root: deeper than any cache or package, and it bounds the open descriptors
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WILDCARDS = re.compile(r"[*?\[]")

# Where a file that nobody has open is still needed. Each with all that is below it.
OFF_LIMITS = (
    "/proc", "/sys", "/dev", "/boot", "/etc", "/efi",
    "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin",
    "/lib/modules", "/lib/firmware", "/usr/lib/modules", "/usr/lib/firmware", "/lib/systemd", "/usr/lib/systemd",
    "/var/lib/dpkg", "/var/lib/rpm", "/var/lib/etcd",
    # images and writable layers of container engines: an edit there damages every container that shares the layer
    "/var/lib/containerd", "/var/lib/containers", "/var/lib/docker", "/run/containerd", "/run/containers", "/run/docker",
    "/var/lib/rancher", "/run/k3s", "/var/snap/microk8s", "/var/lib/kubelet",
)  # fmt: skip
# Volumes that pods share with their node lie within them.
_WITHIN_LIMITS = (
    re.compile(r"/var/lib/kubelet/pods/[^/]+/volumes/[^/]+/[^/]+(?:/.*)?", re.DOTALL),
    re.compile(r"/var/lib/rancher/k3s/storage(?:/.*)?", re.DOTALL),
    re.compile(r"/var/snap/microk8s/common/default-storage(?:/.*)?", re.DOTALL),
)


class RefusedPathError(Exception):
    """A path that the program will not work on. Nothing has been touched."""

    def __init__(self, path: str, cause: str, next_step: str) -> None:
        super().__init__(path, cause, next_step)
        self.path = path
        self.cause = cause
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{printing.printable(self.path)}: cannot purge: {self.cause}; {self.next_step}"


class Seen(NamedTuple):
    """One entry of a walk: in the directory `fd`, called `path`, an entry `name`.

    `is_file` for a regular file; `is_left` for a directory that has been walked and left; `problem` for one that was not entered.
    """

    fd: int
    path: str
    name: str
    is_file: bool = False
    is_left: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The directories of this node that a walk must not enter, as (st_dev, st_ino), whatever path leads to them."""

    forbidden: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, host_root: str) -> "Limits":
        """Look them up below `host_root`. A missing one is no limit."""
        statuses = (_status(host_root.rstrip("/") + path) for path in OFF_LIMITS)
        return cls(frozenset((status.st_dev, status.st_ino) for status in statuses if status))

    def forbid(self, fd: int) -> bool:
        """Whether an open directory is one of them."""
        status = os.fstat(fd)
        return (status.st_dev, status.st_ino) in self.forbidden


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def parts_of(path: str) -> tuple[str, ...]:
    """The components of an absolute path without `.` and `..`. Raises RefusedPathError for any other path, and for `/` itself."""
    if not path.startswith("/"):
        raise RefusedPathError(path, "it is not an absolute path", "write it from / on")
    parts = tuple(part for part in path.split("/") if part)
    if ".." in parts or "." in parts or "\0" in path:
        raise RefusedPathError(path, "it has a component that is '.', '..' or no name", "write the real path")
    if not parts:
        raise RefusedPathError(path, "it is the whole machine", "name the directory that holds what is stale")
    return parts


def joined(parts: Sequence[str]) -> str:
    """The absolute path of these components."""
    return "/" + "/".join(parts)


def admit(path: str, allow: Sequence[str]) -> tuple[str, ...]:
    """The components of a path that may be purged, judged by its words alone.

    Raises RefusedPathError if it is off limits, or outside every directory of `allow`; an empty `allow` adds no limit.
    """
    parts = parts_of(path)
    plain = joined(parts)
    limit = next((limit for limit in OFF_LIMITS if is_below(plain, limit)), None)
    if limit and not any(within.fullmatch(plain) for within in _WITHIN_LIMITS):
        raise RefusedPathError(path, f"{limit} is off limits", "name a directory of caches, packages or logs")
    if allow and not any(is_below(plain, joined(parts_of(root))) for root in allow):
        raise RefusedPathError(
            path, f"it is outside the allowed directories ({', '.join(allow)})", "ask whoever allowed those"
        )
    return parts


def check(host_root: str, path: str, allow: Sequence[str]) -> None:
    """Raise RefusedPathError if a path must not be purged: by its words, or for a symlink in it. A missing one passes."""
    try:
        with opened(host_root, admit(path, allow)):
            return
    except OSError:
        return


def is_below(path: str, root: str) -> bool:
    """Whether a plain absolute path is `root` or lies below it, by its words."""
    return path == root or path.startswith(root + "/")


@contextmanager
def opened(host_root: str, parts: Sequence[str]) -> Iterator[int]:
    """The directory of these components below `host_root`, open for a while.

    Raises RefusedPathError if a component is a symlink, naming the path to give; OSError if it is missing or no directory.
    """
    fd = os.open(host_root, _DIRECTORY_FLAGS & ~os.O_NOFOLLOW)
    try:
        for depth, part in enumerate(parts):
            fd = _stepped(fd, part, parts, depth)
        yield fd
    finally:
        os.close(fd)


def _stepped(fd: int, part: str, parts: Sequence[str], depth: int) -> int:
    """One component further down. Closes `fd` if that worked."""
    try:
        below = os.open(part, _DIRECTORY_FLAGS, dir_fd=fd)
    except OSError as cause:
        target = _link_target(fd, part)
        if target is None:
            cause.filename = joined(parts[: depth + 1])
            raise
        here = joined(parts[:depth])
        real = os.path.normpath(os.path.join(here, target, *parts[depth + 1 :]))
        link = os.path.join(here, part)
        cause_text = f"{printing.printable(link)} is a symlink"
        raise RefusedPathError(joined(parts), cause_text, f"give the real path, {printing.printable(real)}") from cause
    os.close(fd)
    return below


def _link_target(fd: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=fd)
    except OSError:
        return None


def directories(fd: int, path: str, pattern: Sequence[str], limits: Limits | None) -> Iterator[tuple[int, str]]:
    """Every directory below an open one that a pattern of components names, as (descriptor, path), open for its turn only.

    `*`, `?` and `[…]` stand for part of a name, and no leading dot. Symlinks, and what `limits` forbid, never match.
    """
    if not pattern:
        yield fd, path
        return
    for name in matching_names(fd, pattern[0]):
        try:
            below = os.open(name, _DIRECTORY_FLAGS, dir_fd=fd)
        except OSError:
            continue  # gone, no directory, a symlink, or not ours to read
        try:
            if not (limits and limits.forbid(below)):
                yield from directories(below, f"{path}/{name}", pattern[1:], limits)
        finally:
            os.close(below)


def matching_names(fd: int, pattern: str) -> Iterator[str]:
    """The entries of a directory that a pattern without `/` names. A pattern without wildcards is itself."""
    if not has_wildcard(pattern):
        yield pattern
        return
    match = re.compile(translate(pattern)).match
    try:
        entries = os.scandir(fd)
    except OSError:
        return
    with entries:
        for entry in entries:
            if match(entry.name) and (pattern.startswith(".") or not entry.name.startswith(".")):
                yield entry.name


def has_wildcard(text: str) -> bool:
    """Whether a pattern's component stands for more than itself."""
    return _WILDCARDS.search(text) is not None


def walk(fd: int, path: str, limits: Limits, *, depth: int = 0) -> Iterator[Seen]:
    """Every entry below an open directory, on its filesystem only, a directory after all that is in it.

    Follows no symlink, enters no mount point, nothing forbidden, nothing deeper than DEPTH_LIMIT. What it does not enter it
    yields with the problem. An entry's descriptor is open until the next entry is asked for.
    """
    try:
        entries = os.scandir(fd)
    except OSError as cause:
        yield Seen(fd, path, ".", problem=f"cannot list: {cause.strerror}")
        return
    with entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield Seen(fd, path, entry.name, is_file=entry.is_file(follow_symlinks=False))
            else:
                yield from _walk_below(fd, path, entry.name, limits, depth + 1)


def _walk_below(fd: int, path: str, name: str, limits: Limits, depth: int) -> Iterator[Seen]:
    try:
        below = os.open(name, _DIRECTORY_FLAGS, dir_fd=fd)
    except FileNotFoundError:
        return
    except OSError as cause:
        yield Seen(fd, path, name, problem=f"cannot enter: {cause.strerror}")
        return
    try:
        problem = _barrier(fd, below, limits, depth)
        if not problem:
            yield from walk(below, f"{path}/{name}", limits, depth=depth)
    finally:
        os.close(below)
    yield Seen(fd, path, name, is_left=not problem, problem=problem)


def _barrier(fd: int, below: int, limits: Limits, depth: int) -> str:
    if os.fstat(fd).st_dev != os.fstat(below).st_dev:
        return "another filesystem"
    if limits.forbid(below):
        return "off limits"
    return f"deeper than {DEPTH_LIMIT} directories" if depth > DEPTH_LIMIT else ""


def identity(fd: int) -> tuple[int, int]:
    """(st_dev, st_ino) of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
