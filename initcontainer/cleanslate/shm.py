"""Shared memory that a dead server left behind: found by name, proved unused, removed. Only the top level of each root."""

import os
from collections.abc import Sequence

from cleanslate import filesystems, names, removal, shmroots, tree
from cleanslate.ledger import Finding, Folder, Ledger
from cleanslate.model import FileTally, Verdict
from cleanslate.removal import Remover


def purge(
    roots: Sequence[str],
    *,
    min_age_s: float,
    every_family: bool,
    dry_run: bool,
    now: float,
    host_root: str = "/",
    ending: frozenset[int] = frozenset(),
) -> FileTally:
    """Remove the unused shared memory of known families in `roots`, paths on the node as `shmroots.find_roots` gives them.

    `every_family` takes unknown names too; names on the list of never-touched ones are kept all the same. Files younger than
    `min_age_s` before `now` (seconds since the epoch) are kept. `ending`: see removal.Remover. A root that
    cannot be read is a record.
    """
    mounts = filesystems.Mounts.read()
    ledger = Ledger(dry_run=dry_run)
    remover = Remover(now=now, min_age_s=min_age_s, dry_run=dry_run, ending=ending)
    for root in roots:
        try:
            with tree.opened(host_root, tree.parts_of(root)) as fd:
                folder = Folder(fd, tree.joined(tree.parts_of(root)), mounts.of(fd))
                _purge_folder(folder, remover, ledger, every_family=every_family)
        except (OSError, tree.RefusedPathError) as cause:
            ledger.add_unreadable(root, cause)
    return ledger.tally(tuple(roots))


def _purge_folder(folder: Folder, remover: Remover, ledger: Ledger, *, every_family: bool) -> None:
    """Judge every entry. The loop is written out since 10,000 leftovers are common after a night of crashes."""
    broad = not shmroots.is_empty_dir(folder.path)
    family, dispose, add = names.family, remover.dispose, ledger.add
    with os.scandir(folder.fd) as entries:
        for entry in entries:
            name = entry.name
            raw = os.fsencode(name)
            if not every_family and family(raw, broad=broad) is None:
                ledger.count_kept()
            elif every_family and names.is_never_touched(raw):
                add(Finding(Verdict.KEEP, "it is never touched", "its name is another program's"), folder, name)
            elif entry.is_file(follow_symlinks=False):
                add(dispose(folder, name), folder, name)
            else:
                add(removal.examine_odd(folder, name), folder, name)
