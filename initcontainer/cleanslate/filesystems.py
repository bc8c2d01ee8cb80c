"""Which filesystem a directory lies on, and which proof of disuse holds there."""

import os
from enum import Enum


class Proof(Enum):
    """How it can be proved that nobody uses a file."""

    LEASE = "lease"
    SCAN = "scan"  # a pass over every process: slower and weaker
    NONE = "none"  # not from this machine


# A mapping on these holds the very inode that the lease looks at. Not so on overlayfs: there a file that is mapped and closed
# still gets a lease (measured, kernel 6.18), since the mapping holds the inode of the layer below.
_LEASE_TYPES = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})
_SCAN_TYPES = frozenset({"overlay", "zfs", "bcachefs", "hugetlbfs", "jfs", "vfat", "exfat"})


def proof_for(kind: str | None) -> Proof:
    """The best proof on a filesystem type. Anything unknown, and all that other machines can mount too, has none."""
    if kind in _LEASE_TYPES:
        return Proof.LEASE
    return Proof.SCAN if kind in _SCAN_TYPES else Proof.NONE


class Mounts:
    """The mounts of this program's mount namespace, as one reading of mountinfo found them (proc_pid_mountinfo(5))."""

    def __init__(self, mountinfo: bytes) -> None:
        self._types = dict(filter(None, map(_parse, mountinfo.splitlines())))

    @classmethod
    def read(cls) -> "Mounts":
        """Read them now. Raises OSError without /proc."""
        with open("/proc/thread-self/mountinfo", "rb") as file:
            return cls(file.read())

    def type_of(self, fd: int) -> str | None:
        """The filesystem type behind a descriptor, None if it cannot be told or was mounted since.

        By mount id, not by device number, which on btrfs differs between mountinfo and stat.
        """
        mount = _mount_id(fd)
        return None if mount is None else self._types.get(mount)


def _parse(line: bytes) -> tuple[int, str] | None:
    before, separator, after = line.partition(b" - ")
    number = before.split(b" ", 1)[0]
    if not separator or not number.isdigit():
        return None
    return int(number), after.split(b" ", 1)[0].decode("ascii", "replace")


def _mount_id(fd: int) -> int | None:
    try:
        with open(f"/proc/thread-self/fdinfo/{fd}", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    numbers = [line[len(b"mnt_id:") :].strip() for line in lines if line.startswith(b"mnt_id:")]
    return int(numbers[0]) if numbers and numbers[0].isdigit() else None


def same_file(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether two stats are of one inode."""
    return one.st_ino == other.st_ino and one.st_dev == other.st_dev
