"""Files for a purge, the purge, and what it says of them."""

import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from cleanslate import shm
from cleanslate.model import FileRecord, FileTally

OLD_S = 100.0


def purge(*roots: pathlib.Path, min_age_s: float = 10, **how: Any) -> FileTally:
    """A purge `OLD_S` from now, so that every file of the test is old."""
    settings = {"every_family": False, "dry_run": False, "now": time.time() + OLD_S, **how}
    return shm.purge([str(one) for one in roots], min_age_s=min_age_s, **settings)


def segment(root: pathlib.Path, name: str, size: int = 4096) -> pathlib.Path:
    """A shared memory file with pages of its own."""
    path = root / name
    path.write_bytes(b"x" * size)
    return path


def kept(tally: FileTally) -> dict[str, str]:
    """Reasons by file name."""
    return {os.path.basename(record.path): record.reason for record in tally.kept}


def removed(tally: FileTally) -> set[str]:
    """File names."""
    return {os.path.basename(record.path) for record in tally.removed}


def written(path: pathlib.Path, text: str = "x") -> pathlib.Path:
    """A file with its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def paths(records: Sequence[FileRecord]) -> set[str]:
    """Paths of file records."""
    return {record.path for record in records}


def reasons(tally: FileTally) -> dict[str, str]:
    """Reasons of what was kept, by path."""
    return {record.path: record.reason for record in tally.kept}
