"""The cluster of the demonstration: the embedded one, or one of one's own that was named and is allowed."""

import os
import pathlib
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import yaml

from cluster import binaries, cluster, images, installed, own
from cluster.kubectl import Kubectl
from cluster.places import Place

FILES = ROOT / "build" / "demo"  # what the commands that are shown read; `make clean` removes it
GPU_BYTES = 40 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A cluster to demonstrate on."""

    title: str
    kubectl: Kubectl
    helm: pathlib.Path
    node: str
    gpus: bool  # whether the servers hold memory on simulated GPUs
    stays: bool  # whether what the demonstration made may stay, to be looked at

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs kubectl or helm on this cluster."""
        return subprocess.run(
            self.command(program, *arguments), env=self.environment, capture_output=True, text=True, check=False
        )

    def command(self, program: str, *arguments: str) -> list[str]:
        """The command line."""
        path = {"kubectl": self.kubectl.program, "helm": self.helm}[program]
        return [str(path), *self.context(program), *arguments]

    def context(self, program: str) -> list[str]:
        """The flag that names the cluster, where the kubeconfig may hold several."""
        flag = {"kubectl": "--context", "helm": "--kube-context"}[program]
        return [f"{flag}={self.kubectl.context}"] if self.kubectl.context else []

    @property
    def environment(self) -> dict[str, str]:
        """Helm keeps nothing but below `build/`."""
        kept = {f"HELM_{kind}_HOME": str(FILES / "helm" / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        return os.environ | kept | {"KUBECONFIG": str(self.kubectl.kubeconfig)}


@contextmanager
def ground(name: str) -> Iterator[Ground]:
    """One's own cluster if CLEANSLATE_TEST_CONTEXT names one, and then nothing stays there; else the embedded one, which stays.

    Raises RuntimeError where the demonstration would touch what is not its own.
    """
    FILES.mkdir(parents=True, exist_ok=True)
    if theirs := own.kubectl():
        yield _own(theirs)
    else:
        yield _embedded(name)


def write_files(place: Ground) -> None:
    """The manifests and values that the commands name, for this cluster."""
    limits = {"nvidia.com/gpu": 2} if place.gpus else {}
    arguments = f"--gpu-bytes={GPU_BYTES}" if place.gpus else "--workers=2"
    facts = {"node": place.node, "image": images.reference("server"), "arguments": arguments, "limits": str(limits)}
    _fill(ROOT / "demo" / "servers.yaml", facts)
    (FILES / "values.yaml").write_text(yaml.safe_dump(installed.images_of_the_cluster()))
    reset = (ROOT / "examples" / "reset.yaml").read_text()
    (FILES / "reset.yaml").write_text(reset.replace("node-1", place.node))


def reset_file(place: Ground) -> str:
    """The example as it is, where it names the node."""
    return "examples/reset.yaml" if place.node == "node-1" else str((FILES / "reset.yaml").relative_to(ROOT))


def _embedded(name: str) -> Ground:
    if os.geteuid() != 0:
        raise RuntimeError("the embedded cluster needs root: it makes namespaces, mounts and cgroups of its own")
    running = cluster.start(Place(name=name))
    title = "on the embedded cluster of tests/cluster: real Kubernetes, SIMULATED GPUs (all else is real)"
    where = {"kubectl": running.kubectl, "helm": binaries.helm(), "node": "node-1"}
    return Ground(title=title, gpus=True, stays=True, **where)


def _own(kubectl: Kubectl) -> Ground:
    if kubectl("get", "crd", *installed.CRDS, "--ignore-not-found", "-o", "name"):
        raise RuntimeError(
            f"context {kubectl.context}: Clean Slate is installed there, and the demonstration would remove it; use another"
        )
    helm = shutil.which("helm")
    if helm is None:
        raise RuntimeError(f"context {kubectl.context}: no helm; install it")
    nodes = kubectl("get", "nodes", "-o", "name").split()
    title = f"on the cluster of context {kubectl.context}: its GPUs are measured, none is used by the servers"
    where = {"kubectl": kubectl, "helm": pathlib.Path(helm), "node": nodes[-1].removeprefix("node/")}
    return Ground(title=title, gpus=False, stays=False, **where)


def _fill(template: pathlib.Path, facts: dict[str, str]) -> None:
    (FILES / template.name).write_text(string.Template(template.read_text()).substitute(facts))
