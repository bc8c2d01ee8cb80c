"""Logs of servers that are gone: by pattern and age, and only where nobody has them open."""

from collections.abc import Sequence
from dataclasses import dataclass

from cleanslate import filesystems, tree
from cleanslate.ledger import Folder, Ledger
from cleanslate.model import FileTally
from cleanslate.removal import Remover


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """Which logs: an absolute pattern of the node, whose `*`, `?` and `[…]` stand for part of one component."""

    pattern: str


def parse_log(text: str) -> LogRequest:
    """Read an absolute pattern such as `/var/log/vllm/*.log`. Raises ValueError with a message for the user."""
    what = f"--log {text!r}: cannot parse"
    if not text.startswith("/") or text.endswith("/") or "\0" in text:
        raise ValueError(f"{what}: not an absolute pattern of files; write for example /var/log/vllm/*.log")
    if "**" in text:
        raise ValueError(f"{what}: '**' is not known; write one '*' for each directory")
    return LogRequest(pattern=text)


def check(requests: Sequence[LogRequest], host_root: str, allow: Sequence[str]) -> None:
    """Raise tree.RefusedPathError if a request must not be carried out: judged by the directories before the first wildcard."""
    for request in requests:
        base, _, _ = _split(request)
        if not base:
            cause = "its first directory is a wildcard, or missing"
            raise tree.RefusedPathError(request.pattern, cause, "name the directory that holds the logs")
        tree.check(host_root, tree.joined(base), allow)


def _split(request: LogRequest) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """The directories before the first wildcard, those from it on, and the files' own pattern."""
    *above, last = tree.parts_of(request.pattern)
    wild = next((i for i, part in enumerate(above) if tree.has_wildcard(part)), len(above))
    return tuple(above[:wild]), tuple(above[wild:]), last


def purge(
    requests: Sequence[LogRequest],
    host_root: str,
    allow: Sequence[str],
    *,
    min_age_s: float,
    dry_run: bool,
    now: float,
) -> FileTally:
    """Remove the unused logs older than `min_age_s` before `now`, in seconds since the epoch.

    Raises tree.RefusedPathError, before anything is touched, as `check` does.
    """
    check(requests, host_root, allow)
    mounts, limits = filesystems.Mounts.read(), tree.Limits.of(host_root)
    ledger = Ledger(dry_run=dry_run)
    remover = Remover(now=now, min_age_s=min_age_s, dry_run=dry_run)
    for request in requests:
        base, wild, last = _split(request)
        try:
            with tree.opened(host_root, base) as top:
                for fd, path in tree.directories(top, "".join(f"/{part}" for part in base), wild, limits):
                    folder = Folder(fd, path, mounts.of(fd))
                    for name in tree.matching_names(fd, last):
                        ledger.add(remover.dispose(folder, name), folder, name)
        except FileNotFoundError:
            continue  # no such directory, so no such log
        except (OSError, tree.RefusedPathError) as cause:  # a symlink since the check
            ledger.add_unreadable(tree.joined(base), cause)
    return ledger.tally(tuple(request.pattern for request in requests))
