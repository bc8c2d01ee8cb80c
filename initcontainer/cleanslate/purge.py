"""What a run does to files: the requests of its settings, checked before anything is touched, then carried out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cleanslate import bytecode, caches, logs, shm, shmroots
from cleanslate.bytecode import BytecodeRequest
from cleanslate.caches import CacheRequest
from cleanslate.logs import LogRequest
from cleanslate.model import FileTally
from cleanslate.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """What became of the files."""

    shared_memory: FileTally = field(default_factory=FileTally)
    caches: FileTally = field(default_factory=FileTally)
    logs: FileTally = field(default_factory=FileTally)


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
    return purge


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
