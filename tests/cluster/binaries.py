"""The cluster's programs, built from Go modules once a machine: Kubernetes and etcd as one binary, and small ones beside it.

Kept below the build cache by the hash of their sources. Building Kubernetes takes five to eight minutes on two cores and 3.5 GB
of Go's own cache; that cache is not needed afterwards.
"""

import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.places import build_cache

MODULE = Path(__file__).resolve().parent / "go"
HELM_MODULE = MODULE.with_name("go-helm")  # its own, since its libraries' versions are not Kubernetes'
HELM = "helm.sh/helm/v4"
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet")
SMALL = {"pause": "./pause", "nvidia-device-plugin": "./deviceplugin", "nvidia-container-runtime": "./runtime"}
_PACKAGES = 2900  # that Kubernetes compiles, to tell how far the build is
_PROGRESS_S = 15.0
# Debug data would cost time, memory and cache, and the linker drops it anyway.
_FLAGS = ("-buildvcs=false", "-trimpath", "-gcflags=all=-dwarf=false")


class BuildError(Exception):
    """A program that could not be built."""


def kubernetes() -> Path:
    """The folder of the Kubernetes components, a link each. Builds them if need be, which takes minutes. Raises BuildError."""
    key = _key(MODULE / "go.mod", MODULE / "go.sum", MODULE / "main.go")
    folder = build_cache() / "kubernetes" / key
    with _built(folder) as draft:
        if draft:
            _say("building Kubernetes from Go modules: five to eight minutes, once")
            _go_build(draft / "kube", ".", _kubernetes_flags())
            for name in COMPONENTS:
                (draft / name).symlink_to("kube")
    return folder


def small(name: str) -> Path:
    """One of SMALL: the program's path. Builds it if need be, which takes seconds. Raises BuildError."""
    sources = [path for path in MODULE.glob("*/**/*.go") if not path.name.endswith("_test.go")]  # they share packages
    key = _key(MODULE / "go.mod", MODULE / "go.sum", *sorted(sources))
    folder = build_cache() / "programs" / f"{name}-{key}"
    with _built(folder) as draft:
        if draft:
            _say(f"building {name}")
            _go_build(draft / name, SMALL[name], "-s -w")
    return folder / name


def helm() -> Path:
    """Helm. Builds it if need be, which takes a minute beside Kubernetes' own build, and two without. Raises BuildError."""
    folder = build_cache() / "helm" / _key(HELM_MODULE / "go.mod", HELM_MODULE / "go.sum")
    with _built(folder) as draft:
        if draft:
            _say("building Helm from Go modules: one to three minutes, once")
            version = _version(HELM, HELM_MODULE)
            flags = f"-s -w -X {HELM}/internal/version.version={version}"  # without it, it calls itself v4.0
            _go_build(draft / "helm", f"{HELM}/cmd/helm", flags, HELM_MODULE)
    return folder / "helm"


def kubectl() -> Path:
    """kubectl of the cluster's own version."""
    return kubernetes() / "kubectl"


def _key(*sources: Path) -> str:
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS)).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _built(folder: Path) -> Iterator[Path | None]:
    """A draft of the folder to fill, renamed at the end, so that an interrupted build is never taken for a whole one.

    None if the folder is there. One process builds at a time.
    """
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for unfinished in folder.parent.glob("*.part-*"):
            shutil.rmtree(unfinished)
        if folder.is_dir():
            yield None
            return
        draft = folder.with_name(f"{folder.name}.part-{secrets.token_hex(4)}")
        draft.mkdir()
        yield draft
        draft.rename(folder)


def _kubernetes_flags() -> str:
    """Without these a server calls itself v0.0.0, which a chart's kubeVersion refuses."""
    version = _version("k8s.io/kubernetes", MODULE)
    major, minor, _ = version.removeprefix("v").split(".", 2)
    facts = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    facts["buildDate"] = "1970-01-01T00:00:00Z"
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(["-s -w", *(f"-X {package}.{k}={v}" for package in packages for k, v in facts.items())])


def _version(package: str, module: Path) -> str:
    argv = ["go", "list", "-m", "-f", "{{.Version}}", package]
    try:
        done = subprocess.run(argv, cwd=module, env=_environment(), capture_output=True, text=True)
    except FileNotFoundError:
        raise BuildError(f"test cluster: cannot build {package}: no go; install Go 1.26 or later") from None
    if done.returncode:
        raise BuildError(f"{' '.join(argv)}: ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def _go_build(target: Path, package: str, linker_flags: str, module: Path = MODULE) -> None:
    argv = ["go", "build", "-v", *_FLAGS, "-ldflags", linker_flags, "-o", os.fspath(target), package]
    with subprocess.Popen(argv, cwd=module, env=_environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        tail = _follow(process.stderr)
    if process.returncode:
        raise BuildError(f"{target.name}: cannot build: go ended with {process.returncode}:\n" + "".join(tail))


def _follow(lines: Iterator[str]) -> list[str]:
    """Tells how far the build is, a line every 15 s; returns the last lines that Go wrote."""
    tail: list[str] = []
    told = started = time.monotonic()
    for count, line in enumerate(lines, start=1):
        tail = [*tail[-19:], line]
        if time.monotonic() - told > _PROGRESS_S:
            told = time.monotonic()
            _say(f"compiled {count} of at most {_PACKAGES} packages in {told - started:.0f} s")
    return tail


def _environment() -> dict[str, str]:
    return os.environ | {"CGO_ENABLED": "0"}


def _say(text: str) -> None:
    print(f"test cluster: {text}", file=sys.stderr, flush=True)
