"""One file at a time: is it proved unused, and if so, away with it."""

import errno
import os
import stat
from dataclasses import dataclass

from cleanslate import filesystems, lease, openfiles
from cleanslate.ledger import Finding, Folder
from cleanslate.model import Verdict

# O_NONBLOCK: a FIFO put in the file's place must not hold us, nor another's lease. Opening does not touch the access time.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the filesystem's own
_KINDS = (
    (stat.S_ISLNK, "a symlink"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
_UNUSED_BY_LEASE = "the kernel granted a write lease: nobody else has it open or mapped"
_USED_BY_LEASE = "the kernel refused a write lease: open, mapped or in flight in a socket"


@dataclass(slots=True, kw_only=True)
class Remover:
    """Removes files that are proved unused, regular, old enough and under one name. In a dry run it only says so.

    `now` in seconds since the epoch; files younger than `min_age_s`, or from the future, are kept. `ending`: pids of processes
    that are to end; a dry run foretells that what they alone use will be removed after their end.
    """

    now: float
    min_age_s: float
    dry_run: bool
    ending: frozenset[int] = frozenset()
    open_files: openfiles.OpenFiles | None = None
    foresight: tuple[openfiles.OpenFiles, openfiles.OpenFiles] | None = None

    def __post_init__(self) -> None:
        lease.ignore_break_signal()

    def dispose(self, folder: Folder, name: str) -> Finding | None:
        """Remove one file, or say why not. None if it is gone already. Never raises OSError: that is a finding too."""
        try:
            fd = os.open(name, _OPEN_FLAGS, dir_fd=folder.fd)
        except OSError as cause:
            return _not_opened(folder, name, cause)
        try:
            status = os.fstat(fd)
            return (
                self._foretell(folder, name, status)
                or self._unfit(status)
                or self._dispose_unused(folder, name, fd, status)
            )
        except OSError as cause:
            return Finding(Verdict.KEEP, "it cannot be examined", cause.strerror or str(cause))
        finally:
            os.close(fd)

    def _unfit(self, status: os.stat_result) -> Finding | None:
        """Why the file is kept, whoever uses it; None if nothing but use can save it."""
        age_s = self.now - status.st_mtime
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and age_s >= self.min_age_s:
            return None
        if not stat.S_ISREG(status.st_mode):
            return odd_kind(status)
        size = size_bytes(status)
        if status.st_nlink != 1:
            return Finding(Verdict.KEEP, "it has other names", f"hard links: {status.st_nlink}", size)
        if age_s < 0:
            return Finding(Verdict.KEEP, "it is from the future", f"modified {-age_s:.0f} s from now", size)
        return Finding(
            Verdict.KEEP, "it is too young", f"modified {age_s:.1f} s ago, less than {self.min_age_s:g} s", size
        )

    def _dispose_unused(self, folder: Folder, name: str, fd: int, status: os.stat_result) -> Finding | None:
        """Remove it under the kernel's lease, or by the slower proof where there are no leases."""
        proof = folder.filesystem.proof
        if proof is filesystems.Proof.NONE:
            return _untold(status, "the filesystem's type is unknown, or other machines may mount it too")
        answer = lease.take(fd) if proof is filesystems.Proof.LEASE else lease.Lease.UNSUPPORTED
        if answer is lease.Lease.GRANTED:
            return self._remove(folder, name, status, _UNUSED_BY_LEASE, fd)
        if answer is lease.Lease.IN_USE:
            return Finding(Verdict.KEEP, "it is in use", _USED_BY_LEASE, size_bytes(status))
        if answer is lease.Lease.NOT_ALLOWED:
            return _untold(status, f"a write lease needs CAP_LEASE or the file's owner, uid {status.st_uid}")
        return self._dispose_unseen(folder, name, status)

    def _foretell(self, folder: Folder, name: str, status: os.stat_result) -> Finding | None:
        """In a dry run: what is used by processes that are to end, and as far as can be seen by no other, will go."""
        if not (self.dry_run and self.ending and stat.S_ISREG(status.st_mode)):
            return None
        if self.foresight is None:
            everyone = {int(pid) for pid in os.listdir("/proc") if pid.isdigit()} - {os.getpid()}
            self.foresight = openfiles.look_at(self.ending), openfiles.look_at(everyone - self.ending)
        theirs, others_too = (seen.uses(status, name, folder.filesystem) for seen in self.foresight)
        if theirs is not True or others_too:
            return None
        evidence = (
            f"open or mapped {_where(status)} by none but processes that are to end; proved again after their end"
        )
        return Finding(Verdict.REMOVE, "its users are to end", evidence, size_bytes(status))

    def _dispose_unseen(self, folder: Folder, name: str, status: os.stat_result) -> Finding | None:
        """Remove it if no process is seen to have it open or mapped."""
        if self.open_files is None or not self.open_files.is_fresh():
            self.open_files = openfiles.look()
        used = self.open_files.uses(status, name, folder.filesystem)
        if used is None:
            return _untold(status, f"no leases here, and {self.open_files.unread}")
        if used:
            evidence = f"no leases here, but a process has it open or mapped {_where(status)}"
            return Finding(Verdict.KEEP, "it is in use", evidence, size_bytes(status))
        evidence = (
            f"no leases here, but none of {self.open_files.processes} processes has it open or mapped {_where(status)}; "
            "this weaker proof does not see descriptors in flight"
        )
        return self._remove(folder, name, status, evidence, None)

    def _remove(
        self, folder: Folder, name: str, status: os.stat_result, evidence: str, leased_fd: int | None
    ) -> Finding | None:
        """Unlink the name if it is still that file and nobody has asked for it since the proof."""
        size = size_bytes(status)
        if leased_fd is not None and not lease.held(leased_fd):
            return Finding(Verdict.KEEP, "it is in use", "somebody opened it during the proof", size)
        try:
            if not filesystems.same_file(status, os.stat(name, dir_fd=folder.fd, follow_symlinks=False)):
                return Finding(Verdict.KEEP, "it was replaced", "the name became another file during the proof", size)
            error = None if self.dry_run else unlink(folder, name, status)
        except FileNotFoundError:
            return None
        return Finding(Verdict.REMOVE, "unused", evidence, size, error)


def size_bytes(status: os.stat_result) -> int:
    """The memory or disk that a file takes, which is less than its length where it has holes."""
    return status.st_blocks * _BLOCK_BYTES


def unlink(folder: Folder, name: str, status: os.stat_result) -> str | None:
    """Remove a name from its directory. Returns the message if that failed; raises FileNotFoundError if it was gone."""
    try:
        os.unlink(name, dir_fd=folder.fd)
    except FileNotFoundError:
        raise
    except OSError as cause:
        return _not_removed(folder, name, status, cause)
    return None


def odd_kind(status: os.stat_result) -> Finding:
    """The finding for anything that is not a regular file."""
    kind = next((kind for is_kind, kind in _KINDS if is_kind(status.st_mode)), "of an unknown kind")
    return Finding(Verdict.KEEP, f"it is {kind}, not a regular file", f"mode {status.st_mode:o}")


def examine_odd(folder: Folder, name: str) -> Finding | None:
    """The finding for a directory entry that is not a regular file, without opening it."""
    try:
        status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as cause:
        return Finding(Verdict.KEEP, "it cannot be examined", cause.strerror or str(cause))
    if stat.S_ISREG(status.st_mode):
        return Finding(Verdict.KEEP, "it was replaced", "the name became another file during the look")
    return odd_kind(status)


def _not_opened(folder: Folder, name: str, cause: OSError) -> Finding | None:
    if cause.errno == errno.ENOENT:
        return None
    if cause.errno in (errno.ELOOP, errno.ENXIO):
        return examine_odd(folder, name)
    if cause.errno == errno.EAGAIN:
        return Finding(Verdict.KEEP, "it is in use", "another program holds a lease on it")
    return Finding(Verdict.KEEP, "its use cannot be told", f"cannot open: {cause.strerror}")


def _not_removed(folder: Folder, name: str, status: os.stat_result, cause: OSError) -> str:
    step = {
        errno.EPERM: "look for the immutable flag with lsattr, and for another owner in a sticky directory",
        errno.EACCES: "run it as root",
        errno.EROFS: "mount the filesystem writable",
    }.get(cause.errno or 0, "run it again")
    return f"{folder.shown(name)} {_where(status)}: cannot remove: {cause.strerror}; {step}"


def _untold(status: os.stat_result, evidence: str) -> Finding:
    return Finding(Verdict.KEEP, "its use cannot be told", evidence, size_bytes(status))


def _where(status: os.stat_result) -> str:
    return f"(dev {os.major(status.st_dev)}:{os.minor(status.st_dev)}, inode {status.st_ino})"
