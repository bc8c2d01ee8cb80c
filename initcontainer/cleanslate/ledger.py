"""The bounded account of a purge: what became of each file, and the whole counts."""

from typing import NamedTuple

from cleanslate import filesystems, printing
from cleanslate.model import FileRecord, FileTally, Verdict

LIST_LIMIT = 1_000  # records a list: the memory of a purge must not grow with the number of files


class Finding(NamedTuple):
    """What became of one file, before it is written down. Cheap, since there may be millions."""

    verdict: Verdict
    reason: str
    evidence: str
    size_bytes: int = 0
    error: str | None = None


class Folder(NamedTuple):
    """An open directory: its descriptor, its path on the node for messages, and its filesystem."""

    fd: int
    path: str
    filesystem: filesystems.Filesystem

    def shown(self, name: str) -> str:
        """The printable path of a file in it."""
        return printing.printable(f"{self.path.rstrip('/')}/{name}")


class Ledger:
    """Counts every finding, keeps the first ones in full, and every list within LIST_LIMIT.

    What could not be removed comes first among the kept: it must not drown in what is kept for a good reason.
    """

    def __init__(self, *, dry_run: bool) -> None:
        self._dry_run = dry_run
        self._removed: list[FileRecord] = []
        self._kept: list[FileRecord] = []
        self._failed: list[FileRecord] = []
        self._removed_count = self._kept_count = self._bytes = 0

    def add(self, finding: Finding | None, folder: Folder, name: str) -> None:
        """Write down what became of one file; None, a file that was gone already, is not written down."""
        if finding is None:
            return
        if finding.verdict is Verdict.REMOVE and finding.error is None:
            self._removed_count += 1
            self._bytes += finding.size_bytes
            records = self._removed
        else:
            self._kept_count += 1
            records = self._failed if finding.error else self._kept
        if len(records) < LIST_LIMIT:
            records.append(_record(finding, folder.shown(name)))

    def add_unreadable(self, path: str, cause: Exception) -> None:
        """Write down a directory that could not be looked at."""
        above, _, name = path.rstrip("/").rpartition("/")
        finding = Finding(Verdict.KEEP, "the directory cannot be read", getattr(cause, "strerror", None) or str(cause))
        self.add(finding, Folder(-1, above, filesystems.UNKNOWN), name)

    def count_kept(self) -> None:
        """Count a file that nobody asked about, without a record."""
        self._kept_count += 1

    def tally(self, roots: tuple[str, ...]) -> FileTally:
        """The account so far."""
        return FileTally(
            roots=tuple(map(printing.printable, roots)),
            removed=tuple(self._removed),
            removed_count=self._removed_count,
            kept=tuple((self._failed + self._kept)[:LIST_LIMIT]),
            kept_count=self._kept_count,
            bytes_freed=0 if self._dry_run else self._bytes,
        )


def _record(finding: Finding, path: str) -> FileRecord:
    return FileRecord(
        path=path,
        verdict=finding.verdict,
        reason=finding.reason,
        evidence=finding.evidence,
        size_bytes=finding.size_bytes,
        error=finding.error,
    )
