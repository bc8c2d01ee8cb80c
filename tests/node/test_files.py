"""Bytecode, caches and logs on real filesystems: what is stale and unused goes, and nothing outside what was named."""

import os
import pathlib
import py_compile
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cleanslate import bytecode, caches, logs, tree
from cleanslate.model import FileTally
from node import mounts

OLD_S = 1000.0


@pytest.fixture(autouse=True, scope="module")
def _private_mounts() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts filesystems of its own")
    with mounts.private_mounts():
        yield


@pytest.fixture
def host(tmp_path: pathlib.Path) -> pathlib.Path:
    """A node's root, seen below a directory."""
    return mounts.mount("tmpfs", tmp_path / "host", nodev=False)


def written(path: pathlib.Path, text: str = "x") -> pathlib.Path:
    """A file with its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def paths(records: Sequence[Any]) -> set[str]:
    """Paths of file records."""
    return {record.path for record in records}


def reasons(tally: FileTally) -> dict[str, str]:
    """Reasons of what was kept, by path."""
    return {record.path: record.reason for record in tally.kept}


def purge_bytecode(host: pathlib.Path, *texts: str, allow: Sequence[str] = (), dry_run: bool = False) -> FileTally:
    return bytecode.purge([bytecode.parse_bytecode(text) for text in texts], str(host), allow, dry_run=dry_run)


def test_stale_bytecode_that_runs_old_code_is_cured(tmp_path: pathlib.Path) -> None:
    """A source edited without a new time and size goes on running as it was; after the purge it runs as it is."""
    source = written(tmp_path / "deepseek_v2.py", "print('old')\n")
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
        written(package / name)
    (package / "deepseek_v2_link.py").symlink_to("llama.py")
    cache = package / "__pycache__"
    stale = [
        "deepseek_v2.cpython-311.pyc",
        "deepseek_v2.cpython-311.opt-2.pyc",
        "deepseek_v2.attention.cpython-312.pyc",
    ]
    lone = ["deepseek_v2_gone.cpython-311.pyc", "deepseek_v2_link.cpython-311.pyc", "deepseek_v2.pyc"]
    for name in (*stale, *lone, "llama.cpython-311.pyc", "deepseek_v2.cpython-311.pyc.tmp"):
        written(cache / name)
    written(package / "deepseek_v2.pyc")
    tally = purge_bytecode(host, "/opt/vllm:*/deepseek_v2*")
    assert paths(tally.removed) == {f"/opt/vllm/models/__pycache__/{name}" for name in stale}
    assert reasons(tally) == {f"/opt/vllm/models/__pycache__/{name}": "it has no source" for name in lone}
    assert set(os.listdir(cache)) == {*lone, "llama.cpython-311.pyc", "deepseek_v2.cpython-311.pyc.tmp"}
    assert (package / "deepseek_v2.pyc").exists()


def test_bytecode_under_several_names_loses_one(host: pathlib.Path) -> None:
    """Package managers link bytecode from their own store, which keeps it."""
    store, name = written(host / "store/m.pyc"), host / "opt/__pycache__/m.cpython-311.pyc"
    written(host / "opt/m.py")
    name.parent.mkdir()
    os.link(store, name)
    assert purge_bytecode(host, "/opt:*").removed_count == 1
    assert store.exists()


def test_nothing_out_of_the_tree_is_reached(host: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Symlinks to directories and files, and filesystems mounted below, are left alone."""
    for top in (host / "outside", mounts.mount("tmpfs", host / "opt/mounted")):
        written(top / "m.py")
        written(top / "__pycache__/m.cpython-311.pyc")
    (host / "opt/link").symlink_to("/outside")
    (host / "opt/relative").symlink_to("../outside")
    written(host / "opt/n.py")
    written(host / "elsewhere.pyc")
    (host / "opt/__pycache__").mkdir()
    (host / "opt/__pycache__/n.cpython-311.pyc").symlink_to("../../elsewhere.pyc")
    tally = purge_bytecode(host, "/opt:*")
    assert tally.removed == ()
    assert reasons(tally) == {
        "/opt/mounted": "it was not entered",
        "/opt/__pycache__/n.cpython-311.pyc": "it is a symlink, not a regular file",
    }
    assert (host / "elsewhere.pyc").exists()


def test_a_dry_run_of_bytecode_removes_nothing(host: pathlib.Path) -> None:
    """It lists what would go, and frees nothing."""
    written(host / "opt/m.py")
    stale = written(host / "opt/__pycache__/m.cpython-311.pyc")
    tally = purge_bytecode(host, "/opt:*", dry_run=True)
    assert paths(tally.removed) == {"/opt/__pycache__/m.cpython-311.pyc"}
    assert tally.bytes_freed == 0
    assert stale.exists()


def test_an_engines_image_store_is_not_entered_under_any_name(host: pathlib.Path) -> None:
    """A bind mount of the store on the same filesystem is known by its inode."""
    stale = written(host / "var/lib/containerd/snapshots/1/__pycache__/m.cpython-311.pyc")
    written(host / "var/lib/containerd/snapshots/1/m.py")
    mounts.bind(host / "var/lib/containerd", host / "data/store")
    tally = purge_bytecode(host, "/data:*", "/var:*")
    assert tally.removed == ()
    assert "/data/store" in reasons(tally)
    assert stale.exists()


def test_a_tree_deeper_than_the_limit_is_left_alone(host: pathlib.Path) -> None:
    """A walk holds a descriptor a level, so its depth is bounded."""
    deep = host / "opt" / "/".join(["d"] * (tree.DEPTH_LIMIT + 1))
    written(deep / "m.py")
    stale = written(deep / "__pycache__/m.cpython-311.pyc")
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
    written(host / "opt/real/below/m.py")
    stale = written(host / "opt/real/below/__pycache__/m.cpython-311.pyc")
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
        written(host / top / "m.py")
        written(host / top / "__pycache__/m.cpython-311.pyc")
    with pytest.raises(tree.RefusedPathError, match="outside the allowed directories"):
        purge_bytecode(host, "/opt/ab:*", allow=["/opt/a", "/srv"])
    assert purge_bytecode(host, "/opt/a:*", allow=["/opt/a"]).removed_count == 1


def test_a_pods_volume_may_be_purged(host: pathlib.Path) -> None:
    """Below kubelet's directory, volumes are the one place where pods keep what may be stale."""
    volume = "var/lib/kubelet/pods/u1/volumes/kubernetes.io~empty-dir/code"
    written(host / volume / "m.py")
    written(host / volume / "__pycache__/m.cpython-311.pyc")
    assert purge_bytecode(host, f"/{volume}:*").removed_count == 1


def purge_cache(host: pathlib.Path, *texts: str, min_age_s: float = 10, now_s: float = OLD_S, **how: Any) -> FileTally:
    requests = [caches.parse_cache(text, environ={}, home="/root", user="root") for text in texts]
    allow, dry_run = how.get("allow", ()), how.get("dry_run", False)
    return caches.purge(requests, str(host), allow, min_age_s=min_age_s, dry_run=dry_run, now=time.time() + now_s)


def test_a_whole_cache_goes_and_its_directory_stays(host: pathlib.Path) -> None:
    """Files and the directories they leave empty."""
    cache = host / "root/.triton/cache"
    for name in ("AB12/kernel.cubin", "AB12/kernel.json", "CD34/sub/x.so", "top"):
        written(cache / name)
    tally = purge_cache(host, "triton")
    assert tally.removed_count == 4
    assert tally.kept == ()
    assert tally.roots == ("/root/.triton/cache",)
    assert os.listdir(cache) == []


@pytest.mark.parametrize("way", ["open", "mapped"])
def test_a_cache_in_use_is_kept_whole(host: pathlib.Path, way: str) -> None:
    """One file that a live server has loaded keeps the others, which it may load next; the report names that file."""
    cache = host / "root/.triton/cache"
    library = written(cache / "AB12/launcher.so")
    other = written(cache / "CD34/kernel.cubin")
    with mounts.user_of(library, way):
        tally = purge_cache(host, "triton")
        assert reasons(tally) == {"/root/.triton/cache/AB12/launcher.so": "it keeps all of triton: it is in use"}
        assert other.exists()
    assert purge_cache(host, "triton").removed_count == 2


def test_a_cache_that_is_being_written_is_kept_whole(host: pathlib.Path) -> None:
    """A file younger than the minimum age says that somebody is compiling."""
    written(host / "root/.triton/cache/a")
    young = written(host / "root/.triton/cache/b/c")
    os.utime(young, (time.time() + OLD_S - 5,) * 2)
    tally = purge_cache(host, "triton")
    assert reasons(tally) == {"/root/.triton/cache/b/c": "it keeps all of triton: it is too young"}
    assert tally.removed == ()


@pytest.mark.parametrize("name", ["model.safetensors", "x.GGUF", "pytorch_model-00001-of-2.bin", "w.pt", "model.bin"])
def test_a_directory_with_model_weights_is_kept_whole(host: pathlib.Path, name: str) -> None:
    """Weights in the wrong place, or a wrong path, must not cost a download; a symlink to weights counts too."""
    written(host / "data/triton/a")
    (host / "data/triton" / name).symlink_to("/nowhere")
    tally = purge_cache(host, "triton=/data/triton")
    assert reasons(tally) == {
        f"/data/triton/{name}": "it keeps all of triton: it is a model's weights by its name",
    }
    assert tally.removed == ()


def test_of_vllms_cache_only_what_is_compiled_goes(host: pathlib.Path) -> None:
    """Assets and model facts stay, also when an asset is in use."""
    top = host / "root/.cache/vllm"
    for name in ("torch_compile_cache/ab/rank_0_0/x.py", "torch_compile_cache/torch_aot_compile/y", "deep_gemm/z"):
        written(top / name)
    staying = [written(top / name) for name in ("assets/img.png", "modelinfos/m.json", "gpu_p2p_access_cache.json")]
    with mounts.user_of(staying[0], "open"):
        assert purge_cache(host, "vllm").removed_count == 3
    assert all(path.exists() for path in staying)


def test_of_flashinfers_cache_only_what_is_compiled_goes(host: pathlib.Path) -> None:
    """Downloaded cubins stay."""
    top = host / "root/.cache/flashinfer"
    for name in ("0.6.1/90a/cached_ops/op/op.so", "0.6.1/90a/generated/op.cu", "90a/cached_ops/x.so"):
        written(top / name)
    cubin = written(top / "cubins/abc/x.cubin")
    assert purge_cache(host, "flashinfer").removed_count == 3
    assert cubin.exists()


def test_only_stale_locks_of_torch_extensions_go(host: pathlib.Path) -> None:
    """A lock that a build holds open is kept, each lock on its own, and all else stays."""
    top = host / "root/.cache/torch_extensions/py311_cu128"
    stale, live = written(top / "a/lock"), written(top / "b/lock")
    library = written(top / "a/a.so")
    with mounts.user_of(live, "open"):
        tally = purge_cache(host, "torch-extensions-locks")
    assert paths(tally.removed) == {"/root/.cache/torch_extensions/py311_cu128/a/lock"}
    assert reasons(tally) == {"/root/.cache/torch_extensions/py311_cu128/b/lock": "it is in use"}
    assert not stale.exists()
    assert library.exists()


def test_links_in_a_cache_are_neither_followed_nor_removed(host: pathlib.Path) -> None:
    """What they point at is outside."""
    outside = written(host / "srv/outside/file")
    written(host / "root/.triton/cache/a")
    (host / "root/.triton/cache/link").symlink_to("/srv/outside")
    tally = purge_cache(host, "triton")
    assert paths(tally.removed) == {"/root/.triton/cache/a"}
    assert reasons(tally) == {"/root/.triton/cache/link": "it is a symlink, not a regular file"}
    assert outside.exists()


def test_a_mount_in_a_cache_keeps_it_whole(host: pathlib.Path) -> None:
    """What is in it was not looked at."""
    written(host / "root/.triton/cache/a")
    mounts.mount("tmpfs", host / "root/.triton/cache/mounted")
    tally = purge_cache(host, "triton")
    assert reasons(tally) == {"/root/.triton/cache/mounted": "it keeps all of triton: it was not entered"}
    assert tally.removed == ()


def test_a_missing_cache_is_nothing_to_report(host: pathlib.Path) -> None:
    """Most nodes have few of them."""
    tally = purge_cache(host, *caches.CACHES)
    assert (tally.removed, tally.kept, tally.kept_count) == ((), (), 0)


def test_a_dry_run_of_caches_removes_nothing(host: pathlib.Path) -> None:
    """Neither files nor empty directories."""
    written(host / "root/.triton/cache/a/b")
    (host / "root/.triton/cache/empty").mkdir()
    tally = purge_cache(host, "triton", dry_run=True)
    assert paths(tally.removed) == {"/root/.triton/cache/a/b"}
    assert sorted(os.listdir(host / "root/.triton/cache")) == ["a", "empty"]


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("/root", "a whole area of the system"),
        ("/home/someone", "a whole area of the system"),
        ("/root/.cache/", "a whole area of the system"),
        ("/var//lib", "a whole area of the system"),
        ("/tmp", "a whole area of the system"),
        ("/data/*", "it has a wildcard"),
        ("/etc/triton", "/etc is off limits"),
    ],
)
def test_a_path_too_wide_for_a_cache_is_refused(host: pathlib.Path, path: str, cause: str) -> None:
    """A slip of the pen must not empty somebody's home."""
    file = written(host / path.replace("*", "x").strip("/") / "file")
    with pytest.raises(tree.RefusedPathError, match=cause):
        purge_cache(host, f"triton={path}")
    assert file.exists()


def purge_logs(host: pathlib.Path, *patterns: str, allow: Sequence[str] = (), **how: Any) -> FileTally:
    settings = {"min_age_s": 10.0, "dry_run": False, "now": time.time() + OLD_S, **how}
    return logs.purge([logs.parse_log(pattern) for pattern in patterns], str(host), allow, **settings)


def test_old_logs_that_nobody_has_open_go(host: pathlib.Path) -> None:
    """By pattern, one directory a `*`; a log that a server writes is kept."""
    top = host / "var/log/vllm"
    dead, live = written(top / "a/server.log"), written(top / "b/server.log")
    others = [written(top / name) for name in ("server.log", "a/deep/server.log", "a/server.txt", "a/.hidden.log")]
    with mounts.user_of(live, "open"):
        tally = purge_logs(host, "/var/log/vllm/*/*.log")
    assert paths(tally.removed) == {"/var/log/vllm/a/server.log"}
    assert reasons(tally) == {"/var/log/vllm/b/server.log": "it is in use"}
    assert not dead.exists()
    assert all(path.exists() for path in others)


def test_a_young_log_is_kept(host: pathlib.Path) -> None:
    """By the time of its last line."""
    written(host / "var/log/vllm.log")
    tally = purge_logs(host, "/var/log/vllm.log", now=time.time(), min_age_s=3600)
    assert reasons(tally) == {"/var/log/vllm.log": "it is too young"}


def test_a_log_that_is_a_link_is_kept(host: pathlib.Path) -> None:
    """Its target is somewhere else, and a linked directory never matches."""
    target = written(host / "srv/logs/x.log")
    (host / "var/log").mkdir(parents=True)
    (host / "var/log/x.log").symlink_to("/srv/logs/x.log")
    (host / "var/log/linked").symlink_to("/srv/logs")
    tally = purge_logs(host, "/var/log/*.log", "/var/log/*/x.log")
    assert reasons(tally) == {"/var/log/x.log": "it is a symlink, not a regular file"}
    assert target.exists()


def test_a_wildcard_does_not_reach_what_is_off_limits(host: pathlib.Path) -> None:
    """A wildcard matches no directory that a path may not name."""
    image, good = written(host / "var/lib/docker/x"), written(host / "var/lib/vllm/x")
    assert paths(purge_logs(host, "/var/lib/*/x").removed) == {"/var/lib/vllm/x"}
    assert not good.exists()
    assert image.exists()


@pytest.mark.parametrize(
    ("pattern", "cause"),
    [
        ("/etc/*.log", "/etc is off limits"),
        ("/*/x.log", r"/\*/x.log: cannot purge: its first directory is a wildcard"),
        ("/x.log", "its first directory is a wildcard, or missing"),
        ("/srv/*/x.log", "outside the allowed directories"),
        ("/link/*.log", "/link is a symlink; give the real path, /var/log"),
    ],
)
def test_a_log_pattern_that_must_not_be_purged_is_refused(host: pathlib.Path, pattern: str, cause: str) -> None:
    """By the directories before its first wildcard."""
    (host / "link").symlink_to("/var/log")
    with pytest.raises(tree.RefusedPathError, match=cause):
        purge_logs(host, pattern, allow=["/var/log", "/etc", "/link"])


def test_a_pattern_without_its_directory_matches_nothing(host: pathlib.Path) -> None:
    """A server that never ran left no log."""
    tally = purge_logs(host, "/var/log/none/*.log")
    assert (tally.removed, tally.kept_count) == ((), 0)
