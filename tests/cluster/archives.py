"""OCI image archives in the build cache: named by the key of all that they are made from, whole or not there at all.

They lie in `images/` below the cluster's build cache. An archive is written beside them as a draft and renamed at its end,
under a lock, so that a killed build is never taken for a whole one and two checkouts do not build at once.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import places

KEPT = 4  # archives of one name; older ones are removed when a new one is made
INDEX = "index.json"


@dataclass(frozen=True, kw_only=True)
class Image:
    """What an archive holds: the name it is imported under, its OCI configuration, and its layers' paths in the archive."""

    reference: str
    config: Mapping[str, Any]
    layers: tuple[str, ...]


def directory() -> Path:
    """Where images and what builds them are kept; made if missing."""
    path = places.build_cache() / "images"
    path.mkdir(parents=True, exist_ok=True)
    return path


def key_of(*parts: object) -> str:
    """12 hexadecimal digits that change with the parts, which are text, numbers, and tuples or dicts of them."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def path_of(name: str, key: str) -> Path:
    """Where the archive of this name and key is, if it is there."""
    return directory() / f"{name}-{key}.tar"


def obtain(name: str, key: str, make: Callable[[Path, Path], None]) -> Path:
    """The archive of this name and key, made if it is not there yet; blocks while another process builds.

    `make(draft, work)` writes the archive to `draft` and may use the empty folder `work`; both are removed at the end.
    """
    archive = path_of(name, key)
    if not archive.exists():
        with _drafts() as drafts:
            if not archive.exists():  # another checkout may have made it meanwhile
                work = drafts / "work"
                work.mkdir()
                make(drafts / archive.name, work)
                (drafts / archive.name).rename(archive)
                _remove_old(name, archive)
    os.utime(archive)  # used now: the last to be removed
    return archive


def pack_layer(root: Path, layer: Path) -> None:
    """Write a directory's content as a layer that is the same for the same content: no times, root's own."""
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            entry = archive.gettarinfo(path, arcname=str(path.relative_to(root)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            if not entry.isreg():
                archive.addfile(entry)
                continue
            with path.open("rb") as file:
                archive.addfile(entry, file)


def write_layout(layout: Path, layers: Sequence[Path], config: Mapping[str, Any]) -> None:
    """Write an OCI layout of one image; moves the layers' files into it. `config` as in the OCI image specification."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def entry(kind: str, path: Path) -> dict[str, Any]:
        digest = digest_of(path)
        size = path.stat().st_size
        path.rename(blobs / digest)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": size}

    def document(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
        path = blobs / "document"
        path.write_text(json.dumps(content))
        return entry(kind, path)

    descriptors = [entry("layer.v1.tar", layer) for layer in layers]
    rootfs = {"type": "layers", "diff_ids": [descriptor["digest"] for descriptor in descriptors]}
    # Buildah insists on a line of history for every layer.
    history = [{"created": "1970-01-01T00:00:00Z", "created_by": "tests/cluster"} for _ in layers]
    image = {"architecture": "amd64", "os": "linux", "config": config, "rootfs": rootfs, "history": history}
    manifest = {"schemaVersion": 2, "config": document("config.v1+json", image), "layers": descriptors}
    index = {"schemaVersion": 2, "manifests": [document("manifest.v1+json", manifest)]}
    (layout / INDEX).write_text(json.dumps(index))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def pack(layout: Path, reference: str, archive: Path) -> None:
    """Write an OCI layout of one image as an archive that is imported under this reference."""
    index = json.loads((layout / INDEX).read_text())
    (manifest,) = index["manifests"]
    # containerd imports under the first of these, buildah under the second; containerd puts a prefix before the second.
    manifest["annotations"] = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference}
    (layout / INDEX).write_text(json.dumps(index))
    with tarfile.open(archive, "w") as packed:
        for path in sorted(path for path in layout.rglob("*") if path.is_file()):
            packed.add(path, arcname=str(path.relative_to(layout)))


def read(archive: Path) -> Image:
    """What an archive holds. Raises KeyError where it names a blob that it does not have."""
    with tarfile.open(archive) as packed:

        def document(name: str) -> dict[str, Any]:
            return json.load(packed.extractfile(name))

        (entry,) = document(INDEX)["manifests"]
        manifest = document(_blob(entry))
        layers = tuple(_blob(layer) for layer in manifest["layers"])
        for layer in layers:
            packed.getmember(layer)
        reference = entry["annotations"]["io.containerd.image.name"]
        return Image(reference=reference, config=document(_blob(manifest["config"])), layers=layers)


def _blob(descriptor: Mapping[str, Any]) -> str:
    return "blobs/" + descriptor["digest"].replace(":", "/")


@contextmanager
def _drafts() -> Iterator[Path]:
    """The lock, and an empty folder for what is not whole yet. Whoever holds the lock has deadlines, and its death frees it."""
    with (directory() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        drafts = directory() / "drafts"
        shutil.rmtree(drafts, ignore_errors=True)  # of a build that was killed
        drafts.mkdir()
        try:
            yield drafts
        finally:
            shutil.rmtree(drafts)


def _remove_old(name: str, newest: Path) -> None:
    length = len(newest.name)  # "python" is not "python-build": keys are of one length
    archives = [path for path in directory().glob(f"{name}-*.tar") if len(path.name) == length]
    for path in sorted(archives, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        path.unlink()
