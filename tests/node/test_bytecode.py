"""Bytecode on a real filesystem: what is stale goes, and nothing outside what was named."""

import os
import pathlib
import py_compile
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from cleanslate import bytecode, tree
from cleanslate.model import FileTally
from node import files, mounts


@pytest.fixture(autouse=True, scope="module")
def _private_mounts() -> Iterator[None]:
    with mounts.private_mounts():
        yield


@pytest.fixture
def host(tmp_path: pathlib.Path) -> pathlib.Path:
    """A node's root, seen below a directory."""
    return mounts.mount("tmpfs", tmp_path / "host", nodev=False)


def purge_bytecode(host: pathlib.Path, *texts: str, allow: Sequence[str] = (), dry_run: bool = False) -> FileTally:
    return bytecode.purge([bytecode.parse_bytecode(text) for text in texts], str(host), allow, dry_run=dry_run)


def test_stale_bytecode_that_runs_old_code_is_cured(tmp_path: pathlib.Path) -> None:
    """A source edited without a new time and size goes on running as it was; after the purge it runs as it is."""
    source = files.written(tmp_path / "deepseek_v2.py", "print('old')\n")
    os.utime(source, (1, 1))
    py_compile.compile(str(source))
    source.write_text("print('new')\n")
    os.utime(source, (1, 1))
    run = [sys.executable, "-B", "-c", "import deepseek_v2"]
    assert subprocess.check_output(run, cwd=tmp_path, text=True) == "old\n"
    assert purge_bytecode(pathlib.Path("/"), f"{tmp_path}:*/deepseek_v2*").removed_count == 1
    assert subprocess.check_output(run, cwd=tmp_path, text=True) == "new\n"


def test_only_bytecode_beside_its_source_goes(host: pathlib.Path) -> None:
    """A lone .pyc is the program itself, in __pycache__ or out of it; another module's is not asked for."""
    package = host / "opt/vllm/models"
    for name in ("deepseek_v2.py", "deepseek_v2.attention.py", "llama.py", "deepseek_v2_linked.py"):
        files.written(package / name)
    (package / "deepseek_v2_link.py").symlink_to("llama.py")
    cache = package / "__pycache__"
    stale = [
        "deepseek_v2.cpython-311.pyc",
        "deepseek_v2.cpython-311.opt-2.pyc",
        "deepseek_v2.attention.cpython-312.pyc",
    ]
    lone = ["deepseek_v2_gone.cpython-311.pyc", "deepseek_v2_link.cpython-311.pyc", "deepseek_v2.pyc"]
    for name in (*stale, *lone, "llama.cpython-311.pyc", "deepseek_v2.cpython-311.pyc.tmp"):
        files.written(cache / name)
    files.written(package / "deepseek_v2.pyc")
    tally = purge_bytecode(host, "/opt/vllm:*/deepseek_v2*")
    assert files.paths(tally.removed) == {f"/opt/vllm/models/__pycache__/{name}" for name in stale}
    assert files.reasons(tally) == {f"/opt/vllm/models/__pycache__/{name}": "it has no source" for name in lone}
    assert set(os.listdir(cache)) == {*lone, "llama.cpython-311.pyc", "deepseek_v2.cpython-311.pyc.tmp"}
    assert (package / "deepseek_v2.pyc").exists()


def test_bytecode_under_several_names_loses_one(host: pathlib.Path) -> None:
    """Package managers link bytecode from their own store, which keeps it."""
    store, name = files.written(host / "store/m.pyc"), host / "opt/__pycache__/m.cpython-311.pyc"
    files.written(host / "opt/m.py")
    name.parent.mkdir()
    os.link(store, name)
    assert purge_bytecode(host, "/opt:*").removed_count == 1
    assert store.exists()


def test_nothing_out_of_the_tree_is_reached(host: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Symlinks to directories and files, and filesystems mounted below, are left alone."""
    for top in (host / "outside", mounts.mount("tmpfs", host / "opt/mounted")):
        files.written(top / "m.py")
        files.written(top / "__pycache__/m.cpython-311.pyc")
    (host / "opt/link").symlink_to("/outside")
    (host / "opt/relative").symlink_to("../outside")
    files.written(host / "opt/n.py")
    files.written(host / "elsewhere.pyc")
    (host / "opt/__pycache__").mkdir()
    (host / "opt/__pycache__/n.cpython-311.pyc").symlink_to("../../elsewhere.pyc")
    tally = purge_bytecode(host, "/opt:*")
    assert tally.removed == ()
    assert files.reasons(tally) == {
        "/opt/mounted": "it was not entered",
        "/opt/__pycache__/n.cpython-311.pyc": "it is a symlink, not a regular file",
    }
    assert (host / "elsewhere.pyc").exists()


def test_a_dry_run_of_bytecode_removes_nothing(host: pathlib.Path) -> None:
    """It lists what would go, and frees nothing."""
    files.written(host / "opt/m.py")
    stale = files.written(host / "opt/__pycache__/m.cpython-311.pyc")
    tally = purge_bytecode(host, "/opt:*", dry_run=True)
    assert files.paths(tally.removed) == {"/opt/__pycache__/m.cpython-311.pyc"}
    assert tally.bytes_freed == 0
    assert stale.exists()


def test_an_engines_image_store_is_not_entered_under_any_name(host: pathlib.Path) -> None:
    """A bind mount of the store on the same filesystem is known by its inode."""
    stale = files.written(host / "var/lib/containerd/snapshots/1/__pycache__/m.cpython-311.pyc")
    files.written(host / "var/lib/containerd/snapshots/1/m.py")
    mounts.bind(host / "var/lib/containerd", host / "data/store")
    tally = purge_bytecode(host, "/data:*", "/var:*")
    assert tally.removed == ()
    assert "/data/store" in files.reasons(tally)
    assert stale.exists()


def test_a_tree_deeper_than_the_limit_is_left_alone(host: pathlib.Path) -> None:
    """A walk holds a descriptor a level, so its depth is bounded."""
    deep = host / "opt" / "/".join(["d"] * (tree.DEPTH_LIMIT + 1))
    files.written(deep / "m.py")
    stale = files.written(deep / "__pycache__/m.cpython-311.pyc")
    tally = purge_bytecode(host, "/opt:*")
    assert stale.exists()
    assert [record.evidence for record in tally.kept] == [f"deeper than {tree.DEPTH_LIMIT} directories"]


REFUSALS = [
    ("relative/path", "it is not an absolute path"),
    ("/opt/../etc", "'.', '..'"),
    ("/", "it is the whole machine"),
    ("/etc/x", "/etc is off limits"),
    ("/usr/bin", "/usr/bin is off limits"),
    ("/proc/1", "/proc is off limits"),
    ("/var/lib/docker/overlay2", "/var/lib/docker is off limits"),
    ("/var/lib/kubelet/pods/u", "/var/lib/kubelet is off limits"),
    ("/opt/link/below", "/opt/link is a symlink; give the real path, /opt/real/below"),
    ("/link", "/link is a symlink; give the real path, /opt/real"),
]


@pytest.mark.parametrize(("path", "cause"), REFUSALS)
def test_a_path_that_must_not_be_purged_is_refused(host: pathlib.Path, path: str, cause: str) -> None:
    """Each with the reason and what to do; a good request beside it is not carried out either."""
    files.written(host / "opt/real/below/m.py")
    stale = files.written(host / "opt/real/below/__pycache__/m.cpython-311.pyc")
    (host / "opt/link").symlink_to("real")
    (host / "link").symlink_to("/opt/real")
    requests = [bytecode.BytecodeRequest(root=root, pattern="*") for root in ("/opt/real", path)]
    with pytest.raises(tree.RefusedPathError) as refusal:
        bytecode.purge(requests, str(host), (), dry_run=False)
    assert cause in str(refusal.value)
    assert stale.exists()


def test_the_allowed_directories_are_the_limit(host: pathlib.Path) -> None:
    """A path outside them is refused, by whole components; one inside is purged."""
    for top in ("opt/a", "opt/ab"):
        files.written(host / top / "m.py")
        files.written(host / top / "__pycache__/m.cpython-311.pyc")
    with pytest.raises(tree.RefusedPathError, match="outside the allowed directories"):
        purge_bytecode(host, "/opt/ab:*", allow=["/opt/a", "/srv"])
    assert purge_bytecode(host, "/opt/a:*", allow=["/opt/a"]).removed_count == 1


def test_a_pods_volume_may_be_purged(host: pathlib.Path) -> None:
    """Below kubelet's directory, volumes are the one place where pods keep what may be stale."""
    volume = "var/lib/kubelet/pods/u1/volumes/kubernetes.io~empty-dir/code"
    files.written(host / volume / "m.py")
    files.written(host / volume / "__pycache__/m.cpython-311.pyc")
    assert purge_bytecode(host, f"/{volume}:*").removed_count == 1
