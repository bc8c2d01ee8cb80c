"""The kernel's own proof that nobody uses a file: a write lease (fcntl(2), F_SETLEASE).

The kernel grants it only if the inode has no other opener and no mapping, in any namespace: a mapping whose descriptor is
closed, a descriptor in flight in a socket, a process in uninterruptible sleep all refuse it. While it is held, a new open waits
until it is given back by closing the descriptor.
"""

import errno
import fcntl
import signal
from enum import Enum


class Lease(Enum):
    """The kernel's answer."""

    GRANTED = "granted"
    IN_USE = "in use"
    UNSUPPORTED = "unsupported"  # the filesystem has no leases: ask openfiles
    NOT_ALLOWED = "not allowed"  # neither the file's owner nor CAP_LEASE


_REFUSALS = {
    errno.EAGAIN: Lease.IN_USE,
    errno.EINVAL: Lease.UNSUPPORTED,
    errno.EOPNOTSUPP: Lease.UNSUPPORTED,
    errno.EACCES: Lease.NOT_ALLOWED,
    errno.EPERM: Lease.NOT_ALLOWED,
}


def ignore_break_signal() -> None:
    """Ignore SIGIO, which the kernel sends when somebody opens a file under our lease, and which would end the program.

    Call it in the main thread before the first lease. It says nothing that `held` does not say.
    """
    if signal.getsignal(signal.SIGIO) is not signal.SIG_IGN:
        signal.signal(signal.SIGIO, signal.SIG_IGN)


def take(fd: int) -> Lease:
    """Ask for the write lease on a regular file that is open for reading. Closing `fd` gives it back.

    Raises OSError for an answer that says nothing about use, such as ENOMEM.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as cause:
        if cause.errno in _REFUSALS:
            return _REFUSALS[cause.errno]
        raise
    return Lease.GRANTED


def held(fd: int) -> bool:
    """Whether the lease is still whole: the kernel shows F_UNLCK or F_RDLCK as soon as somebody waits to open the file."""
    return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK
