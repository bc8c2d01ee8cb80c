"""The operator's image: what it is, as whom it runs, and what is not in it."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

import cleanslate
from cluster import archives, images

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

DEADLINE_S = 30
USER = 65532
UNCHECKED_HASH = 0b01  # the flags of a compiled file that is never compared with its source
LARGEST_BYTES = 100_000_000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's root, with the devices that a container has."""
    root = images.unpack("operator", tmp_path_factory.mktemp("root"))
    for name in ("null", "urandom"):
        (root / "dev").mkdir(exist_ok=True)
        os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, os.stat(f"/dev/{name}").st_rdev)
    return root


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command in the image, as its user, on a root that cannot be written."""
    read_only = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && cd "$1" && shift && exec "$@"'
    within = ["unshare", "--mount", "sh", "-c", read_only, "sh", os.fspath(root)]
    within += ["chroot", f"--userspec={USER}:{USER}", ".", *command]
    return subprocess.run(within, capture_output=True, text=True, timeout=DEADLINE_S)


def test_image_says_what_it_is_and_that_it_is_nobody() -> None:
    """It runs `cleanslate-operator`, and as a number, so that the kubelet can tell that it is not root."""
    archive = images.archive("operator")
    config = archives.read(archive).config["config"]
    label = "org.opencontainers.image."
    assert config["Entrypoint"] == ["cleanslate-operator"]
    assert not config.get("Cmd"), "a pod without arguments would be given these"
    assert config["User"] == f"{USER}:{USER}"
    assert config["Labels"].pop(f"{label}description")
    expected = {"title": "cleanslate-operator", "licenses": "Apache-2.0", "version": cleanslate.__version__}
    assert config["Labels"] == {label + key: value for key, value in expected.items()}
    assert archive.stat().st_size < LARGEST_BYTES


def test_operator_starts_on_a_read_only_root(root: Path) -> None:
    """With every library that it imports; without a setting it says which."""
    version = run(root, "cleanslate-operator", "--version")
    assert (version.returncode, version.stdout) == (0, f"cleanslate-operator {cleanslate.__version__}\n"), (
        version.stderr
    )
    refused = run(root, "cleanslate-operator")
    assert refused.returncode == 2
    assert "set CLEANSLATE_OPERATOR_IMAGE" in refused.stderr


def test_every_module_of_the_operator_can_be_imported(root: Path) -> None:
    """None needs what only the development environment or the node program's image has."""
    modules = sorted(path.stem for path in (root / "opt/cleanslate/cleanslate_operator").glob("*.py"))
    names = ", ".join(f"cleanslate_operator.{name}" for name in modules if not name.startswith("__"))
    assert len(modules) > 10
    done = run(root, "python3", "-IS", "-c", f"import sys; sys.path.append('/opt/cleanslate'); import {names}")
    assert done.returncode == 0, done.stderr


def test_image_is_compiled_ahead_and_brings_no_tools(root: Path) -> None:
    """Nothing is compiled at a start, and nothing that installs, builds or reads GPUs is left."""
    programs = list((root / "opt").rglob("*.py"))
    assert len(programs) > 500
    for program in programs:
        (compiled,) = program.parent.glob(f"__pycache__/{program.stem}.cpython-*.pyc")
        assert compiled.read_bytes()[4] == UNCHECKED_HASH, compiled
    names = {path.name for path in root.rglob("*")}
    assert names.isdisjoint({"pip", "hatchling", "setuptools", "gcc", "cc", "constraints.txt", "pip.conf"})
    assert names.isdisjoint({"psutil", "pynvml.py"})


def test_node_program_has_nothing_of_the_operator(tmp_path: Path) -> None:
    """What runs as root on every node has two libraries, and no client of Kubernetes."""
    root = images.unpack("node-program", tmp_path)
    found = {path.name for path in (root / "opt/cleanslate").iterdir() if not path.name.endswith(".dist-info")}
    assert found == {"cleanslate", "psutil", "pynvml.py", "example.py", "__pycache__"}
