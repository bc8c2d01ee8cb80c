"""Which filesystem a directory lies on, and which proof of disuse holds there."""

import os
from enum import Enum
from typing import NamedTuple


class Proof(Enum):
    """How it can be proved that nobody uses a file."""

    LEASE = "lease"
    SCAN = "scan"  # a pass over every process: slower and weaker
    NONE = "none"  # not from this machine


# A mapping on these holds the very inode that the lease looks at. Not so on overlayfs: there a file that is mapped and closed
# still gets a lease (measured, kernel 6.18), since the mapping holds the inode of the layer below.
_LEASE_TYPES = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})
_SCAN_TYPES = frozenset({"overlay", "zfs", "bcachefs", "hugetlbfs", "jfs", "vfat", "exfat"})


class Filesystem(NamedTuple):
    """A mounted filesystem: its type, its device number as mountinfo and maps show it, the best proof that holds there.

    Type and device are None if they cannot be told. What is unknown, and all that other machines can mount too, has no proof.
    """

    kind: str | None = None
    device: int | None = None
    proof: Proof = Proof.NONE

    @classmethod
    def of_kind(cls, kind: str, device: int | None) -> "Filesystem":
        """A filesystem with the proof that its type allows."""
        proof = Proof.LEASE if kind in _LEASE_TYPES else Proof.SCAN if kind in _SCAN_TYPES else Proof.NONE
        return cls(kind, device, proof)


UNKNOWN = Filesystem()


class Mounts:
    """The mounts of this program's mount namespace, as one reading of mountinfo found them (proc_pid_mountinfo(5))."""

    def __init__(self, mountinfo: bytes) -> None:
        self._filesystems = dict(filter(None, map(_parse, mountinfo.splitlines())))

    @classmethod
    def read(cls) -> "Mounts":
        """Read them now. Raises OSError without /proc."""
        with open("/proc/thread-self/mountinfo", "rb") as file:
            return cls(file.read())

    def of(self, fd: int) -> Filesystem:
        """The filesystem behind a descriptor, UNKNOWN if it cannot be told or was mounted since.

        By mount id, not by device number, which on btrfs differs between mountinfo and stat.
        """
        mount = _mount_id(fd)
        return UNKNOWN if mount is None else self._filesystems.get(mount, UNKNOWN)


def _parse(line: bytes) -> tuple[int, Filesystem] | None:
    before, separator, after = line.partition(b" - ")
    fields = before.split(b" ", 3)
    if not separator or len(fields) < 4 or not fields[0].isdigit():
        return None
    kind = after.split(b" ", 1)[0].decode("ascii", "replace")
    return int(fields[0]), Filesystem.of_kind(kind, device_number(fields[2], base=10))


def device_number(text: bytes, *, base: int) -> int | None:
    """The device number that /proc writes as MAJOR:MINOR: decimal in mountinfo, hexadecimal in maps. None if it is none."""
    major, _, minor = text.partition(b":")
    try:
        return os.makedev(int(major, base), int(minor, base))
    except (ValueError, OverflowError):
        return None


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
