"""Base images made from Debian packages, without a registry, a daemon or the packages' scripts.

`localhost/python` runs things, `localhost/python-build` has pip too and builds things, `localhost/pause` holds a pod's
namespaces. Other Dockerfiles name them by build argument, as they would name `python:3.13-slim`.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import archives

RECIPE = 1  # raise it with every change of this file or of `archives` that changes an image
VERSION = "3.11"  # the Python of Debian 12
MERGED = ("bin", "lib", "lib64", "sbin")  # links to below /usr, as base-files and usrmerge make them
UNUSED = (
    "usr/share/bash-completion",
    "usr/share/doc-base",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/lib/x86_64-linux-gnu/gconv",
    f"usr/lib/python{VERSION}/pydoc_data",
)
ACCOUNTS = {
    "passwd": "root:x:0:0:root:/:/bin/sh\nnonroot:x:65532:65532:nonroot:/:/bin/sh\n",
    "group": "root:x:0:\nnonroot:x:65532:\n",
}
ENVIRONMENT = ("PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin", "LANG=C.UTF-8")
DOWNLOAD_S = 300
STEP_S = 120


@dataclass(frozen=True, kw_only=True)
class Base:
    """An image of these Debian packages and all that they depend on."""

    name: str
    packages: tuple[str, ...]


PYTHON = Base(
    name="python",
    packages=(f"python{VERSION}-minimal", f"libpython{VERSION}-stdlib", "busybox-static", "libnuma1", "libgomp1"),
)
PYTHON_BUILD = Base(name="python-build", packages=(*PYTHON.packages, "python3-pip"))


def key(base: Base) -> str:
    """Changes with the list of packages, this recipe and the Debian release; not with the packages' own versions."""
    debian = Path("/etc/debian_version").read_text().strip()
    return archives.key_of(RECIPE, debian, VERSION, base.packages)


def reference(base: Base) -> str:
    """The image's name in buildah, containerd and pods."""
    return f"localhost/{base.name}:test-{key(base)}"


def archive(base: Base) -> Path:
    """The image's OCI archive in the cache; the first call takes about 10 s, and downloads through apt.

    The image itself records the packages' versions in /var/lib/dpkg/status.d, as distroless images do. Raises RuntimeError.
    """
    return archives.obtain(base.name, key(base), lambda draft, work: _make(base, draft, work))


def pause_reference(binary: Path) -> str:
    """The pause image's name, which changes with the binary."""
    return f"localhost/pause:test-{archives.key_of(RECIPE, archives.digest_of(binary))}"


def pause(binary: Path) -> Path:
    """The OCI archive of an image that holds this static binary as /pause and nothing else."""

    def make(draft: Path, work: Path) -> None:
        root = work / "root"
        root.mkdir()
        shutil.copyfile(binary, root / "pause")
        (root / "pause").chmod(0o755)
        archives.pack_layer(root, work / "layer")
        archives.write_layout(work / "layout", [work / "layer"], {"Entrypoint": ["/pause"], "User": "65535:65535"})
        archives.pack(work / "layout", pause_reference(binary), draft)

    return archives.obtain("pause", archives.key_of(RECIPE, archives.digest_of(binary)), make)


def run(
    what: str,
    command: Sequence[str],
    deadline_s: float,
    *,
    stdin: bytes = b"",
    environment: Mapping[str, str] = {},
) -> bytes:
    """What a step of making the image `what` wrote to its output. Raises RuntimeError with what it said, also at the deadline."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"} | environment
    failed = f"image {what}: cannot make: {' '.join(command)[:300]}"
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=deadline_s, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{failed}: killed after {deadline_s:g} s") from error
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")[-3000:].strip()
        raise RuntimeError(f"{failed}: exit {done.returncode}: {said}")
    return done.stdout


def _make(base: Base, draft: Path, work: Path) -> None:
    packages = _download(base, work / "apt")
    root = work / "root"
    _prepare(root)
    for package in packages:
        _unpack(package, root)
    _finish(base, root)
    archives.pack_layer(root, work / "layer")
    archives.write_layout(work / "layout", [work / "layer"], {"Env": ENVIRONMENT, "Cmd": ["python3"]})
    archives.pack(work / "layout", reference(base), draft)


def _download(base: Base, folder: Path) -> list[Path]:
    """The packages' files. With an empty status file apt takes nothing for installed, so it fetches the whole closure."""
    (folder / "archives" / "partial").mkdir(parents=True)
    (folder / "status").touch()
    own = [f"Dir::State::status={folder}/status", f"Dir::Cache::archives={folder}/archives", "APT::Sandbox::User=root"]
    command = ["apt-get", "--yes", "--quiet=2", "--download-only", "--no-install-recommends"]
    for option in own:
        command += ["-o", option]
    try:
        run(base.name, [*command, "install", *base.packages], DOWNLOAD_S)
    except RuntimeError:  # no package lists yet, or so old ones that they name files that are gone
        run(base.name, ["apt-get", "--quiet=2", "update"], DOWNLOAD_S)
        run(base.name, [*command, "install", *base.packages], DOWNLOAD_S)
    return sorted((folder / "archives").glob("*.deb"))


def _prepare(root: Path) -> None:
    root.mkdir(mode=0o755)
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("dev", "proc", "sys", "etc", "run"):
        (root / name).mkdir()
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "var" / "lib" / "dpkg" / "status.d").mkdir(parents=True)


def _unpack(package: Path, root: Path) -> None:
    """`dpkg-deb --extract` would replace the links of the merged /usr by folders; tar can keep them."""
    fields = run(package.name, ["dpkg-deb", "--field", str(package)], STEP_S)
    (root / "var/lib/dpkg/status.d" / package.name.partition("_")[0]).write_bytes(fields)
    files = run(package.name, ["dpkg-deb", "--fsys-tarfile", str(package)], STEP_S)
    run(package.name, ["tar", "--extract", "--keep-directory-symlink", "--directory", str(root)], STEP_S, stdin=files)


def _finish(base: Base, root: Path) -> None:
    """What the packages' scripts would do: the shell and its commands, accounts, `python3`, bytecode."""
    for path in UNUSED:
        shutil.rmtree(root / path, ignore_errors=True)
    for path in sorted((root / "usr/share/doc").glob("*/*")):
        if path.name != "copyright" and path.is_file():
            path.unlink()
    for name, text in ACCOUNTS.items():
        (root / "etc" / name).write_text(text)
    commands = run(base.name, ["chroot", str(root), "busybox", "--list"], STEP_S).decode().split()
    for name in ("python3", *commands):
        if not any(os.path.lexists(root / "usr" / folder / name) for folder in ("bin", "sbin")):
            (root / "usr/bin" / name).symlink_to(f"python{VERSION}" if name == "python3" else "busybox")
    # By the image's own interpreter, whose bytecode differs from another version's. A container's own cache would be lost
    # with it, or its root be read-only; unchecked, since the layer sets all times to 0.
    compile_all = ["python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    folders = [f"/{folder}" for folder in (f"usr/lib/python{VERSION}", "usr/lib/python3") if (root / folder).is_dir()]
    run(base.name, ["chroot", str(root), *compile_all, *folders], STEP_S)
