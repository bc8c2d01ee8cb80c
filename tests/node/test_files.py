"""Caches and logs on a real filesystem: what is stale and unused goes, and nothing outside what was named."""

import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cleanslate import caches, logs, tree
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


def purge_cache(
    host: pathlib.Path, *texts: str, min_age_s: float = 10, now_s: float = files.OLD_S, **how: Any
) -> FileTally:
    requests = [caches.parse_cache(text, environ={}, home="/root", user="root") for text in texts]
    allow, dry_run = how.get("allow", ()), how.get("dry_run", False)
    return caches.purge(requests, str(host), allow, min_age_s=min_age_s, dry_run=dry_run, now=time.time() + now_s)


def test_a_whole_cache_goes_and_its_directory_stays(host: pathlib.Path) -> None:
    """Files and the directories they leave empty."""
    cache = host / "root/.triton/cache"
    for name in ("AB12/kernel.cubin", "AB12/kernel.json", "CD34/sub/x.so", "top"):
        files.written(cache / name)
    tally = purge_cache(host, "triton")
    assert tally.removed_count == 4
    assert tally.kept == ()
    assert tally.roots == ("/root/.triton/cache",)
    assert os.listdir(cache) == []


@pytest.mark.parametrize("way", ["open", "mapped"])
def test_a_cache_in_use_is_kept_whole(host: pathlib.Path, way: str) -> None:
    """One file that a live server has loaded keeps the others, which it may load next; the report names that file."""
    cache = host / "root/.triton/cache"
    library = files.written(cache / "AB12/launcher.so")
    other = files.written(cache / "CD34/kernel.cubin")
    with mounts.user_of(library, way):
        tally = purge_cache(host, "triton")
        assert files.reasons(tally) == {"/root/.triton/cache/AB12/launcher.so": "it keeps all of triton: it is in use"}
        assert other.exists()
    assert purge_cache(host, "triton").removed_count == 2


def test_a_cache_that_is_being_written_is_kept_whole(host: pathlib.Path) -> None:
    """A file younger than the minimum age says that somebody is compiling."""
    files.written(host / "root/.triton/cache/a")
    young = files.written(host / "root/.triton/cache/b/c")
    os.utime(young, (time.time() + files.OLD_S - 5,) * 2)
    tally = purge_cache(host, "triton")
    assert files.reasons(tally) == {"/root/.triton/cache/b/c": "it keeps all of triton: it is too young"}
    assert tally.removed == ()


@pytest.mark.parametrize("name", ["model.safetensors", "x.GGUF", "pytorch_model-00001-of-2.bin", "w.pt", "model.bin"])
def test_a_directory_with_model_weights_is_kept_whole(host: pathlib.Path, name: str) -> None:
    """Weights in the wrong place, or a wrong path, must not cost a download; a symlink to weights counts too."""
    files.written(host / "data/triton/a")
    (host / "data/triton" / name).symlink_to("/nowhere")
    tally = purge_cache(host, "triton=/data/triton")
    assert files.reasons(tally) == {
        f"/data/triton/{name}": "it keeps all of triton: it is a model's weights by its name",
    }
    assert tally.removed == ()


def test_of_vllms_cache_only_what_is_compiled_goes(host: pathlib.Path) -> None:
    """Assets and model facts stay, also when an asset is in use."""
    top = host / "root/.cache/vllm"
    for name in ("torch_compile_cache/ab/rank_0_0/x.py", "torch_compile_cache/torch_aot_compile/y", "deep_gemm/z"):
        files.written(top / name)
    staying = [
        files.written(top / name) for name in ("assets/img.png", "modelinfos/m.json", "gpu_p2p_access_cache.json")
    ]
    with mounts.user_of(staying[0], "open"):
        assert purge_cache(host, "vllm").removed_count == 3
    assert all(path.exists() for path in staying)


def test_of_flashinfers_cache_only_what_is_compiled_goes(host: pathlib.Path) -> None:
    """Downloaded cubins stay."""
    top = host / "root/.cache/flashinfer"
    for name in ("0.6.1/90a/cached_ops/op/op.so", "0.6.1/90a/generated/op.cu", "90a/cached_ops/x.so"):
        files.written(top / name)
    cubin = files.written(top / "cubins/abc/x.cubin")
    assert purge_cache(host, "flashinfer").removed_count == 3
    assert cubin.exists()


def test_only_stale_locks_of_torch_extensions_go(host: pathlib.Path) -> None:
    """A lock that a build holds open is kept, each lock on its own, and all else stays."""
    top = host / "root/.cache/torch_extensions/py311_cu128"
    stale, live = files.written(top / "a/lock"), files.written(top / "b/lock")
    library = files.written(top / "a/a.so")
    with mounts.user_of(live, "open"):
        tally = purge_cache(host, "torch-extensions-locks")
    assert files.paths(tally.removed) == {"/root/.cache/torch_extensions/py311_cu128/a/lock"}
    assert files.reasons(tally) == {"/root/.cache/torch_extensions/py311_cu128/b/lock": "it is in use"}
    assert not stale.exists()
    assert library.exists()


def test_links_in_a_cache_are_neither_followed_nor_removed(host: pathlib.Path) -> None:
    """What they point at is outside."""
    outside = files.written(host / "srv/outside/file")
    files.written(host / "root/.triton/cache/a")
    (host / "root/.triton/cache/link").symlink_to("/srv/outside")
    tally = purge_cache(host, "triton")
    assert files.paths(tally.removed) == {"/root/.triton/cache/a"}
    assert files.reasons(tally) == {"/root/.triton/cache/link": "it is a symlink, not a regular file"}
    assert outside.exists()


def test_a_mount_in_a_cache_keeps_it_whole(host: pathlib.Path) -> None:
    """What is in it was not looked at."""
    files.written(host / "root/.triton/cache/a")
    mounts.mount("tmpfs", host / "root/.triton/cache/mounted")
    tally = purge_cache(host, "triton")
    assert files.reasons(tally) == {"/root/.triton/cache/mounted": "it keeps all of triton: it was not entered"}
    assert tally.removed == ()


def test_a_missing_cache_is_nothing_to_report(host: pathlib.Path) -> None:
    """Most nodes have few of them."""
    tally = purge_cache(host, *caches.CACHES)
    assert (tally.removed, tally.kept, tally.kept_count) == ((), (), 0)


def test_a_dry_run_of_caches_removes_nothing(host: pathlib.Path) -> None:
    """Neither files nor empty directories."""
    files.written(host / "root/.triton/cache/a/b")
    (host / "root/.triton/cache/empty").mkdir()
    tally = purge_cache(host, "triton", dry_run=True)
    assert files.paths(tally.removed) == {"/root/.triton/cache/a/b"}
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
    file = files.written(host / path.replace("*", "x").strip("/") / "file")
    with pytest.raises(tree.RefusedPathError, match=cause):
        purge_cache(host, f"triton={path}")
    assert file.exists()


def purge_logs(host: pathlib.Path, *patterns: str, allow: Sequence[str] = (), **how: Any) -> FileTally:
    settings = {"min_age_s": 10.0, "dry_run": False, "now": time.time() + files.OLD_S, **how}
    return logs.purge([logs.parse_log(pattern) for pattern in patterns], str(host), allow, **settings)


def test_old_logs_that_nobody_has_open_go(host: pathlib.Path) -> None:
    """By pattern, one directory a `*`; a log that a server writes is kept."""
    top = host / "var/log/vllm"
    dead, live = files.written(top / "a/server.log"), files.written(top / "b/server.log")
    others = [
        files.written(top / name) for name in ("server.log", "a/deep/server.log", "a/server.txt", "a/.hidden.log")
    ]
    with mounts.user_of(live, "open"):
        tally = purge_logs(host, "/var/log/vllm/*/*.log")
    assert files.paths(tally.removed) == {"/var/log/vllm/a/server.log"}
    assert files.reasons(tally) == {"/var/log/vllm/b/server.log": "it is in use"}
    assert not dead.exists()
    assert all(path.exists() for path in others)


def test_a_young_log_is_kept(host: pathlib.Path) -> None:
    """By the time of its last line."""
    files.written(host / "var/log/vllm.log")
    tally = purge_logs(host, "/var/log/vllm.log", now=time.time(), min_age_s=3600)
    assert files.reasons(tally) == {"/var/log/vllm.log": "it is too young"}


def test_a_log_that_is_a_link_is_kept(host: pathlib.Path) -> None:
    """Its target is somewhere else, and a linked directory never matches."""
    target = files.written(host / "srv/logs/x.log")
    (host / "var/log").mkdir(parents=True)
    (host / "var/log/x.log").symlink_to("/srv/logs/x.log")
    (host / "var/log/linked").symlink_to("/srv/logs")
    tally = purge_logs(host, "/var/log/*.log", "/var/log/*/x.log")
    assert files.reasons(tally) == {"/var/log/x.log": "it is a symlink, not a regular file"}
    assert target.exists()


def test_a_wildcard_does_not_reach_what_is_off_limits(host: pathlib.Path) -> None:
    """A wildcard matches no directory that a path may not name."""
    image, good = files.written(host / "var/lib/docker/x"), files.written(host / "var/lib/vllm/x")
    assert files.paths(purge_logs(host, "/var/lib/*/x").removed) == {"/var/lib/vllm/x"}
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
