"""What a run does to files: the requests of its settings, checked before anything is touched, then carried out."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cleanslate import bytecode, caches, logs, shm, shmroots, tree
from cleanslate.bytecode import BytecodeRequest
from cleanslate.caches import CacheRequest
from cleanslate.ledger import LIST_LIMIT
from cleanslate.logs import LogRequest
from cleanslate.model import FileTally
from cleanslate.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """What became of the files."""

    shared_memory: FileTally = field(default_factory=FileTally)
    caches: FileTally = field(default_factory=FileTally)
    logs: FileTally = field(default_factory=FileTally)

    def then(self, later: "Purged") -> "Purged":
        """Both of two purges one after the other: all that was removed, and what the later one kept."""
        return Purged(
            shared_memory=_after(self.shared_memory, later.shared_memory),
            caches=_after(self.caches, later.caches),
            logs=_after(self.logs, later.logs),
        )

    def errors(self) -> list[str]:
        """Why files could not be removed that were to be."""
        records = (
            record for tally in (self.shared_memory, self.caches, self.logs) for record in (*tally.removed, *tally.kept)
        )
        return [record.error for record in records if record.error]


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """What is to be purged: requests that have been found admissible."""

    settings: Settings
    shm_roots: tuple[str, ...]
    bytecode: tuple[BytecodeRequest, ...]
    caches: tuple[CacheRequest, ...]
    logs: tuple[LogRequest, ...]

    def carry_out(self, *, dry_run: bool, now_s: float, ending: frozenset[int] = frozenset()) -> Purged:
        """Remove what is proved unused, or only say what would be. `now_s`: Unix time for ages.

        `ending`: pids of processes that a real run would have ended before.
        """
        s = self.settings
        host, allow = s.host_root, s.allow_roots
        age_s = s.shm_min_age_s
        return Purged(
            shared_memory=shm.purge(
                self.shm_roots,
                min_age_s=age_s,
                every_family=s.shm_any_name,
                dry_run=dry_run,
                now=now_s,
                host_root=host,
                ending=ending,
            ),
            caches=_together(
                bytecode.purge(self.bytecode, host, allow, dry_run=dry_run),
                caches.purge(self.caches, host, allow, min_age_s=age_s, dry_run=dry_run, now=now_s),
            ),
            logs=logs.purge(self.logs, host, allow, min_age_s=s.log_min_age_s, dry_run=dry_run, now=now_s),
        )


def prepare(settings: Settings, environ: Mapping[str, str], warn: Callable[[str], None]) -> Purge:
    """Read and check all requests; touches nothing.

    Raises ValueError for one that can't be read, tree.RefusedPathError for one that must not be carried out.
    """
    home = environ.get("HOME") or "/root"
    user = environ.get("USER") or "root"
    purge = Purge(
        settings=settings,
        shm_roots=shmroots.find_roots(settings.host_root, settings.shm_roots, warn),
        bytecode=tuple(bytecode.parse_bytecode(text) for text in settings.bytecode),
        caches=tuple(caches.parse_cache(text, environ=environ, home=home, user=user) for text in settings.caches),
        logs=tuple(logs.parse_log(text) for text in settings.logs),
    )
    bytecode.check(purge.bytecode, settings.host_root, settings.allow_roots)
    caches.check(purge.caches, settings.host_root, settings.allow_roots)
    logs.check(purge.logs, settings.host_root, settings.allow_roots)
    if settings.verb == "reset" and not settings.dry_run:
        _check_writable(purge)
    return purge


def _check_writable(purge: Purge) -> None:
    """A host that is mounted read-only is told before anything is done, not after half of it."""
    for path in (*purge.shm_roots, *(r.root for r in purge.bytecode), *(r.path for r in purge.caches)):
        try:
            flags = os.statvfs(os.path.join(purge.settings.host_root, path.lstrip("/"))).f_flag
        except OSError:
            continue  # not there, or not for us: the purge itself says so
        if flags & os.ST_RDONLY:
            raise tree.RefusedPathError(path, "its filesystem is mounted read-only", "mount the host writable")


def _after(earlier: FileTally, later: FileTally) -> FileTally:
    return replace(
        later,
        removed=(earlier.removed + later.removed)[:LIST_LIMIT],
        removed_count=earlier.removed_count + later.removed_count,
        bytes_freed=earlier.bytes_freed + later.bytes_freed,
    )


def _together(one: FileTally, other: FileTally) -> FileTally:
    return replace(
        one,
        roots=one.roots + other.roots,
        removed=one.removed + other.removed,
        removed_count=one.removed_count + other.removed_count,
        kept=one.kept + other.kept,
        kept_count=one.kept_count + other.kept_count,
        bytes_freed=one.bytes_freed + other.bytes_freed,
    )
