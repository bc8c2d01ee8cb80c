"""Stale bytecode: `__pycache__/*.pyc` with its source beside the directory. A lone .pyc is a program and stays.

No proof of disuse is needed: a running process has already read it, and the next one compiles it anew.
"""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate

from cleanslate import filesystems, printing, removal, tree
from cleanslate.ledger import Finding, Folder, Ledger
from cleanslate.model import FileTally, Verdict

# NAME.TAG.pyc or NAME.TAG.opt-LEVEL.pyc (PEP 3147, PEP 488)
_COMPILED = re.compile(r"(?P<source>.+?)\.[^.]+(?:\.opt-[A-Za-z0-9]+)?\.pyc", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class BytecodeRequest:
    """Which bytecode is stale: below `root`, a path on the node, where the full path of the file fits `pattern`."""

    root: str
    pattern: str


def parse_bytecode(text: str) -> BytecodeRequest:
    """Read `PATH:PATTERN`, for example `/opt/vllm:*/deepseek_v2*`. `*` stands for any text, `/` included.

    Raises ValueError with a message for the user.
    """
    root, colon, pattern = text.partition(":")
    if not colon or not root.startswith("/") or not pattern:
        raise ValueError(
            f"--bytecode {text!r}: cannot parse: not PATH:PATTERN; write for example /opt/vllm:*/deepseek_v2*"
        )
    return BytecodeRequest(root=root, pattern=pattern)


def check(requests: Sequence[BytecodeRequest], host_root: str, allow: Sequence[str]) -> None:
    """Raise tree.RefusedPathError if a request must not be carried out. Touches nothing."""
    for request in requests:
        tree.check(host_root, request.root, allow)


def purge(requests: Sequence[BytecodeRequest], host_root: str, allow: Sequence[str], *, dry_run: bool) -> FileTally:
    """Remove the bytecode of every request. Raises tree.RefusedPathError, before anything is touched, as `check` does."""
    check(requests, host_root, allow)
    limits = tree.Limits.of(host_root)
    ledger = Ledger(dry_run=dry_run)
    for request in requests:
        try:
            with tree.opened(host_root, tree.parts_of(request.root)) as fd:
                _purge_tree(fd, request, limits, ledger, dry_run=dry_run)
        except (OSError, tree.RefusedPathError) as cause:  # a symlink since the check
            ledger.add_unreadable(request.root, cause)
    return ledger.tally(tuple(request.root for request in requests))


def _purge_tree(fd: int, request: BytecodeRequest, limits: tree.Limits, ledger: Ledger, *, dry_run: bool) -> None:
    fits = re.compile(translate(request.pattern)).match
    for seen in tree.walk(fd, request.root, limits):
        folder = Folder(seen.fd, seen.path, filesystems.UNKNOWN)
        if seen.problem:
            ledger.add(Finding(Verdict.KEEP, "it was not entered", seen.problem), folder, seen.name)
        elif not seen.is_left and _is_cached(seen) and fits(f"{seen.path}/{seen.name}"):
            ledger.add(_dispose(folder, seen, dry_run=dry_run), folder, seen.name)


def _is_cached(seen: tree.Seen) -> bool:
    return seen.name.endswith(".pyc") and os.path.basename(seen.path) == "__pycache__"


def _dispose(folder: Folder, seen: tree.Seen, *, dry_run: bool) -> Finding | None:
    """Remove one file of bytecode. Only its name goes: under another name, as conda and uv link it, it stays."""
    if not seen.is_file:
        return removal.examine_odd(folder, seen.name)
    source = source_of(seen.name)
    if source is None:
        return Finding(Verdict.KEEP, "it has no source", "its name is not NAME.TAG.pyc")
    if not _is_regular(folder.fd, f"../{source}"):
        return Finding(
            Verdict.KEEP, "it has no source", f"no regular file {printing.printable(source)} beside __pycache__"
        )
    try:
        status = os.stat(seen.name, dir_fd=folder.fd, follow_symlinks=False)
        error = None if dry_run else removal.unlink(folder, seen.name, status)
    except FileNotFoundError:
        return None
    evidence = f"{printing.printable(source)} is beside __pycache__"
    return Finding(Verdict.REMOVE, "bytecode that fits the pattern", evidence, removal.size_bytes(status), error)


def source_of(name: str) -> str | None:
    """The source file of a file in `__pycache__`, by the names that Python gives, or None if it is not such a name."""
    match = _COMPILED.fullmatch(name)
    return f"{match['source']}.py" if match else None


def _is_regular(fd: int, path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path, dir_fd=fd, follow_symlinks=False).st_mode)
    except (OSError, ValueError):
        return False
