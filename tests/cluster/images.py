"""The cluster's images, built from the project's own Dockerfiles with buildah, and only when what they are made from changed.

An image's tag carries the key of its inputs, so that Kubernetes sees a changed image as another one. A build gets a copy of
its listed inputs and nothing else: what is not listed cannot get in, so the key tells the whole. buildah runs in mount and
PID namespaces of its own; nothing of it stays but its store below the build cache.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster import archives, baseimage, binaries, places

RECIPE = 1  # raise it with every change of this file that changes an image
BUILD_S = 600
STORE = f"store-{RECIPE}"  # buildah's own; another recipe must not find its layers
STORE_LIMIT_BYTES = 3 << 30
PYTHON_BASES = {"BUILDER": baseimage.PYTHON_BUILD, "BASE": baseimage.PYTHON}
# The machine's way to its package index, if it has one of its own.
MACHINE_FILES = ("/etc/ssl/certs", "/etc/pip.conf")
# buildah as root keeps a cache in /var/lib/containers and mounts on its store: here both are this namespace's own. $1 is the
# cache, $2 the folder where the namespace sees it.
_PRIVATE = """
set -e
mount --rbind "$1" "$2"
mount -t tmpfs tmpfs /var/lib
mkdir /var/lib/run /var/lib/tmp
cd "$2"
shift 2
exec "$@"
"""
_SEEN = "/mnt"
_DISTRIBUTION = (
    ".dockerignore",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "initcontainer/cleanslate/*.*",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What one image is made from: a Dockerfile, the files that it copies, and its build arguments.

    `inputs` are paths or patterns relative to `root`, and so is `dockerfile`. `bases`: build arguments that name base images.
    """

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    bases: Mapping[str, baseimage.Base] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    root: Path = places.CHECKOUT


def node_program() -> Recipe:
    """The product's node program; its entry point is `cleanslate`."""
    return Recipe(
        name="cleanslate",
        dockerfile="initcontainer/Dockerfile",
        inputs=_DISTRIBUTION,
        bases=PYTHON_BASES,
        arguments={"VERSION": _version()},
    )


def operator() -> Recipe:
    """The product's operator; its entry point is `cleanslate-operator`."""
    return Recipe(
        name="cleanslate-operator",
        dockerfile="operator/Dockerfile",
        inputs=(*_DISTRIBUTION, "operator/cleanslate_operator/*.*"),
        bases=PYTHON_BASES,
        arguments={"VERSION": _version()},
    )


def server() -> Recipe:
    """A server that leaks as vLLM does; see its Dockerfile for how to run it."""
    own = "tests/cluster/images/server"
    inputs = (".dockerignore", "constraints.txt", f"{own}/outlive.sh")
    programs = ("tests/gpusim/holder.py", "tests/node/programs/server.py")
    return Recipe(name="server", dockerfile=f"{own}/Dockerfile", inputs=inputs + programs, bases=PYTHON_BASES)


def _version() -> str:
    text = (places.CHECKOUT / "initcontainer/cleanslate/__init__.py").read_text()
    return re.search('__version__ = "(.+)"', text)[1]


_RECIPES = {"node-program": node_program, "operator": operator, "server": server}
NAMES = ("pause", "python", *_RECIPES)


def reference(name: str) -> str:
    """The name under which containerd knows one of `NAMES` once its archive is imported; changes with its content."""
    if name == "pause":
        return baseimage.pause_reference(binaries.small("pause"))
    if name == "python":
        return baseimage.reference(baseimage.PYTHON)
    return reference_of(_RECIPES[name]())


def archive(name: str) -> Path:
    """The OCI archive of one of `NAMES`, built first if its inputs changed; blocks for seconds, or a minute the first time.

    For `ctr --namespace k8s.io images import`. Raises RuntimeError with what the build said.
    """
    if name == "pause":
        return baseimage.pause(binaries.small("pause"))
    if name == "python":
        return baseimage.archive(baseimage.PYTHON)
    return build(_RECIPES[name]())


def unpack(name: str, root: Path) -> Path:
    """The content of one of `NAMES` as a folder, which is returned. Raises RuntimeError as `archive`."""
    whole = archive(name)
    with tarfile.open(whole) as packed:
        for layer in archives.read(whole).layers:
            with tarfile.open(fileobj=packed.extractfile(layer)) as content:
                content.extractall(root, filter="fully_trusted")
    root.chmod(0o755)  # pytest's own folders are closed to others
    return root


def key(recipe: Recipe) -> str:
    """Changes with the Dockerfile, an input's path, content or execute bit, a base image, or a build argument."""
    contents = [(str(path.relative_to(recipe.root)), _mode(path), archives.digest_of(path)) for path in _inputs(recipe)]
    bases = {argument: baseimage.reference(base) for argument, base in recipe.bases.items()}
    return archives.key_of(RECIPE, recipe.name, contents, bases, dict(recipe.arguments))


def reference_of(recipe: Recipe) -> str:
    """As `reference`, for a recipe of the caller's own."""
    return f"localhost/{recipe.name}:test-{key(recipe)}"


def build(recipe: Recipe) -> Path:
    """As `archive`, for a recipe of the caller's own."""
    wanted = key(recipe)
    if not archives.path_of(recipe.name, wanted).exists():
        for base in recipe.bases.values():
            baseimage.archive(base)
    return archives.obtain(recipe.name, wanted, lambda draft, work: _build(recipe, wanted, draft, work))


def _build(recipe: Recipe, wanted: str, draft: Path, work: Path) -> None:
    print(f"image {recipe.name}: building from {recipe.dockerfile}", file=sys.stderr, flush=True)
    _copy_inputs(recipe, work / "context")
    if key(dataclasses.replace(recipe, root=work / "context")) != wanted:
        raise RuntimeError(f"image {recipe.name}: cannot build: its inputs changed while they were copied; build again")
    if _size_bytes(archives.directory() / STORE) > STORE_LIMIT_BYTES:
        shutil.rmtree(archives.directory() / STORE)
    for base in recipe.bases.values():
        _pull(recipe, base)
    name = f"localhost/{recipe.name}:test-{wanted}"
    _buildah(recipe.name, [*_build_command(recipe, name), _seen(work / "context")])
    _buildah(recipe.name, ["push", "--quiet", name, f"oci:{_seen(work)}/layout:image"])
    archives.pack(work / "layout", name, draft)


def _build_command(recipe: Recipe, name: str) -> list[str]:
    """All but the context. Fixed times and no version of buildah, so that the same inputs make the same image."""
    bases = {argument: baseimage.reference(base) for argument, base in recipe.bases.items()}
    arguments = [f"--build-arg={argument}={value}" for argument, value in (dict(recipe.arguments) | bases).items()]
    volumes = [f"--volume={path}:{path}:ro" for path in MACHINE_FILES if os.path.exists(path)]
    same = ["--timestamp=0", "--identity-label=false"]
    command = ["build", "--pull-never", "--layers", "--force-rm", f"--tag={name}", f"--file={recipe.dockerfile}"]
    return command + same + arguments + volumes


def _pull(recipe: Recipe, base: baseimage.Base) -> None:
    """Bring a base image into buildah's store, where it stays."""
    if not _buildah(recipe.name, ["images", "--quiet", "--filter", f"reference={baseimage.reference(base)}"]):
        _buildah(
            recipe.name, ["pull", "--quiet", f"oci-archive:{_seen(archives.path_of(base.name, baseimage.key(base)))}"]
        )


def _inputs(recipe: Recipe) -> list[Path]:
    """The files that the image is made from, its Dockerfile among them."""
    found = {recipe.root / recipe.dockerfile}
    for pattern in recipe.inputs:
        matching = [path for path in recipe.root.glob(pattern) if path.is_file()]
        if not matching:
            raise RuntimeError(f"image {recipe.name}: cannot find its input {pattern}; correct its recipe in images.py")
        found.update(matching)
    return sorted(found)


def _copy_inputs(recipe: Recipe, context: Path) -> None:
    """With fixed times and modes, so that the image does not depend on when and how a checkout was made."""
    for path in _inputs(recipe):
        copy = context / path.relative_to(recipe.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copy.chmod(_mode(path))
        os.utime(copy, (0, 0))


def _mode(path: Path) -> int:
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def _seen(path: Path) -> str:
    """A path of the cache as buildah's namespace sees it."""
    return f"{_SEEN}/{path.relative_to(archives.directory())}"


def _buildah(name: str, command: Sequence[str]) -> bytes:
    """One buildah command in namespaces that end with this process, and everything in them with them."""
    alone = ["setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    private = ["sh", "-c", _PRIVATE, "sh", str(archives.directory()), _SEEN]
    own = ["buildah", f"--root={_SEEN}/{STORE}", "--runroot=/var/lib/run"]
    environment = {"BUILDAH_ISOLATION": "chroot", "TMPDIR": "/var/lib/tmp"}
    return baseimage.run(name, [*alone, *private, *own, *command], BUILD_S, environment=environment)


def _size_bytes(folder: Path) -> int:
    found = subprocess.run(["du", "--summarize", "--block-size=1", folder], capture_output=True, text=True)
    return int(found.stdout.split()[0]) if found.returncode == 0 else 0
