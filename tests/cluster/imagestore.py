"""containerd's own folder with the images in it, made once for a set of images, so that a node need not import them one by one.

An import reads, hashes and unpacks each image, which takes two nodes eight seconds of two cores; unpacking this takes one.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster import archives, images, spaces

FOLDER = "/var/lib/containerd"
RECIPE = 1  # raise it with every change of this file that changes the folder
_MAKE_S = 300
# In mount and PID namespaces of its own, so that it is no containerd of anybody's and ends with this script. $1: the target.
_MAKE = """
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
containerd --log-level=error &
until ctr version >/dev/null 2>&1; do kill -0 $!; sleep 0.05; done
target=$1
shift
for archive; do ctr --namespace k8s.io images import "$archive" >/dev/null; done
kill $!
wait $!
tar --create --xattrs --file "$target" --directory /var/lib/containerd .
"""


def archive(names: Sequence[str]) -> Path:
    """A tar of FOLDER with these of images.NAMES imported; blocks for seconds if it is not there yet. Raises RuntimeError."""
    sources = [images.archive(name) for name in names]
    # Of the archives themselves: the checkout may have been edited since, and a key of what it is now would be another's.
    key = archives.key_of(RECIPE, _containerd(), [archives.read(source).reference for source in sources])
    return archives.obtain("store", key, lambda draft, _: _make(draft, sources))


def unpack(store: Path, space: spaces.Space) -> None:
    """Puts the folder in its place in a space whose containerd does not run yet. Raises SpaceError."""
    space.path(FOLDER).mkdir()
    space.run("tar", "--extract", "--xattrs", "--file", store, "--directory", FOLDER)


def _containerd() -> str:
    return subprocess.run(["containerd", "--version"], capture_output=True, text=True, check=True).stdout


def _make(draft: Path, sources: Sequence[Path]) -> None:
    alone = ["setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = [*alone, "sh", "-c", _MAKE, "sh", draft, *sources]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=_MAKE_S, env=os.environ, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        said = done.stderr[-2000:].strip()
        raise RuntimeError(f"image store: cannot make: exit {done.returncode}: {said}")
