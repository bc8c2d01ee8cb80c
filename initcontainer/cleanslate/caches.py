"""Compile caches: each by name, as a whole or not at all, and never a model's weights.

A cache is kept if anything in it is in use, young, or of unknown use, or if it holds weights: a new server pays for a purge with
minutes of compiling, and a live one with a crash.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cleanslate import filesystems, removal, tree
from cleanslate.ledger import Finding, Folder, Ledger
from cleanslate.model import FileTally, Verdict
from cleanslate.removal import Remover


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A cache that can be purged.

    `variables`: (environment variable, path below its value), the first that is set wins, else `default` below the user's home.
    `members`: the patterns of directories in it that hold compiled code; all of it if there are none.
    `only`: the one file name to remove, each file on its own; any if empty.
    """

    variables: tuple[tuple[str, str], ...]
    default: str
    members: tuple[str, ...] = ()
    only: str = ""


CACHES: Mapping[str, Cache] = {
    "vllm": Cache(  # not assets, not modelinfos: they cost downloads and are not compiled
        variables=(("VLLM_CACHE_ROOT", ""), ("XDG_CACHE_HOME", "vllm")),
        default=".cache/vllm",
        members=("torch_compile_cache", "flashinfer_autotune_cache", "deep_gemm"),
    ),
    "triton": Cache(variables=(("TRITON_CACHE_DIR", ""), ("TRITON_HOME", ".triton/cache")), default=".triton/cache"),
    "inductor": Cache(variables=(("TORCHINDUCTOR_CACHE_DIR", ""),), default="/tmp/torchinductor_{user}"),  # noqa: S108
    "flashinfer": Cache(  # not the cubins, which are downloaded
        variables=(("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"),),
        default=".cache/flashinfer",
        members=("*/*/cached_ops", "*/*/generated", "*/cached_ops", "*/generated"),
    ),
    "deep-gemm": Cache(variables=(("DG_JIT_CACHE_DIR", ""),), default=".deep_gemm"),
    "cuda-jit": Cache(variables=(("CUDA_CACHE_PATH", ""),), default=".nv/ComputeCache"),
    "torch-extensions": Cache(
        variables=(("TORCH_EXTENSIONS_DIR", ""), ("XDG_CACHE_HOME", "torch_extensions")),
        default=".cache/torch_extensions",
    ),
    "torch-extensions-locks": Cache(  # a killed build leaves its lock, and every later build waits for it for good
        variables=(("TORCH_EXTENSIONS_DIR", ""), ("XDG_CACHE_HOME", "torch_extensions")),
        default=".cache/torch_extensions",
        only="lock",
    ),
}
_WEIGHTS = re.compile(
    r".*\.(?:safetensors|gguf|ggml|pt|pth|ckpt|onnx|h5|msgpack|nemo|engine)|(?:pytorch_|adapter_|tf_|flax_)?model.*\.bin",
    re.DOTALL | re.IGNORECASE,
)
# A path given by mistake must not empty a home directory or a whole area of the system.
_TOO_WIDE = re.compile(
    r"/(?:home(?:/[^/]+)?|root|tmp|var(?:/(?:tmp|lib|log|cache|run|opt))?|usr(?:/(?:local|share|lib|lib64|src))?(?:/lib)?"
    r"|opt|srv|mnt|media|run|lib|lib32|lib64|(?:root|home/[^/]+)/\.(?:cache|config|local(?:/share)?))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """One cache to purge: its name in CACHES and its directory on the node."""

    name: str
    path: str


def parse_cache(text: str, *, environ: Mapping[str, str], home: str, user: str) -> CacheRequest:
    """Read `NAME` or `NAME=PATH`. Without a path it is the one that the cache's own program would use.

    Raises ValueError with a message for the user.
    """
    name, equals, path = text.partition("=")
    if name not in CACHES:
        raise ValueError(f"--cache {text!r}: cannot parse: no such cache; known are {', '.join(CACHES)}")
    if equals and not path.startswith("/"):
        raise ValueError(f"--cache {text!r}: cannot parse: not an absolute path; write for example {name}=/data/{name}")
    return CacheRequest(name=name, path=path or default_path(CACHES[name], environ, home, user))


def default_path(cache: Cache, environ: Mapping[str, str], home: str, user: str) -> str:
    """Where a cache lies if nobody says otherwise."""
    for variable, below in cache.variables:
        if environ.get(variable):
            value = environ[variable]
            base = os.path.join(home, value[2:]) if value.startswith("~/") else value
            return os.path.join(base, below).rstrip("/")
    return os.path.join(home, cache.default.format(user=user))


def check(requests: Sequence[CacheRequest], host_root: str, allow: Sequence[str]) -> None:
    """Raise tree.RefusedPathError if a request must not be carried out. Touches nothing."""
    for request in requests:
        if _TOO_WIDE.fullmatch(tree.joined(tree.parts_of(request.path))):
            raise tree.RefusedPathError(
                request.path, "it is no cache but a whole area of the system", "name the cache itself"
            )
        if tree.has_wildcard(request.path):
            raise tree.RefusedPathError(request.path, "it has a wildcard", "give each cache by its own path")
        tree.check(host_root, request.path, allow)


def purge(
    requests: Sequence[CacheRequest],
    host_root: str,
    allow: Sequence[str],
    *,
    min_age_s: float,
    dry_run: bool,
    now: float,
) -> FileTally:
    """Remove the files of each cache, and the directories that are then empty. The cache's own directory stays.

    A file younger than `min_age_s` before `now` (seconds since the epoch) keeps its cache: somebody is compiling.
    A cache that does not exist is nothing to report. Raises tree.RefusedPathError, before anything is touched, as `check` does.
    """
    check(requests, host_root, allow)
    ledger = Ledger(dry_run=dry_run)
    remover = Remover(now=now, min_age_s=min_age_s, dry_run=dry_run)
    job = _Job(host_root, remover, ledger)
    for request in requests:
        job.purge(request)
    return ledger.tally(tuple(request.path for request in requests))


class _Job:
    """What all caches of one purge share."""

    def __init__(self, host_root: str, remover: Remover, ledger: Ledger) -> None:
        self._host_root = host_root
        self._remover = remover
        self._probe = replace(remover, dry_run=True)
        self._ledger = ledger
        self._mounts = filesystems.Mounts.read()
        self._limits = tree.Limits.of(host_root)

    def purge(self, request: CacheRequest) -> None:
        """Purge one cache. One that does not exist is nothing to report."""
        parts = tree.parts_of(request.path)
        try:
            with tree.opened(self._host_root, parts) as fd:
                top = Folder(fd, tree.joined(parts), self._mounts.of(fd))
                cache = CACHES[request.name]
                if cache.only or not self._is_blocked(request.name, top, cache):
                    self._empty(top, cache)
        except FileNotFoundError:
            return
        except (OSError, tree.RefusedPathError) as cause:  # a symlink since the check
            self._ledger.add_unreadable(request.path, cause)

    def _entries(self, top: Folder, cache: Cache) -> Iterator[tuple[Folder, tree.Seen]]:
        """Everything in the members of a cache, each entry with the directory it is in."""
        for member in cache.members or ("",):
            parts = tuple(part for part in member.split("/") if part)
            for fd, path in tree.directories(top.fd, top.path, parts, self._limits):
                for seen in tree.walk(fd, path, self._limits):
                    yield Folder(seen.fd, seen.path, top.filesystem), seen

    def _is_blocked(self, name: str, top: Folder, cache: Cache) -> bool:
        """Whether something keeps the whole cache. Writes down the first such thing."""
        for folder, seen in self._entries(top, cache):
            finding = self._obstacle(folder, seen)
            if finding:
                self._ledger.add(
                    finding._replace(reason=f"it keeps all of {name}: {finding.reason}"), folder, seen.name
                )
                return True
        return False

    def _obstacle(self, folder: Folder, seen: tree.Seen) -> Finding | None:
        """Why the whole cache must stay because of one entry, or None."""
        if seen.problem:
            return Finding(Verdict.KEEP, "it was not entered", seen.problem)
        if _WEIGHTS.fullmatch(seen.name):
            return Finding(
                Verdict.KEEP, "it is a model's weights by its name", "weights cost a download, not a compilation"
            )
        finding = self._probe.dispose(folder, seen.name) if seen.is_file else None
        return finding if finding and finding.verdict is Verdict.KEEP else None

    def _empty(self, top: Folder, cache: Cache) -> None:
        """Remove the files, and the directories that are then empty. Each file is proved unused once more."""
        for folder, seen in self._entries(top, cache):
            if cache.only and seen.name != cache.only:
                continue
            if seen.is_file:
                self._ledger.add(self._remover.dispose(folder, seen.name), folder, seen.name)
            elif not seen.is_left:
                self._ledger.add(removal.examine_odd(folder, seen.name), folder, seen.name)
            elif not (cache.only or self._remover.dry_run):
                _remove_directory(folder, seen.name, self._ledger)


def _remove_directory(folder: Folder, name: str, ledger: Ledger) -> None:
    try:
        os.rmdir(name, dir_fd=folder.fd)
    except OSError as cause:
        if cause.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
            finding = Finding(Verdict.KEEP, "the directory stays", f"cannot remove: {cause.strerror}")
            ledger.add(finding, folder, name)
