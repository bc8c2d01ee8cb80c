"""Images: their keys, their archives, a build that is killed, and what is in them. No cluster: they run in a changed root."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cleanslate
from cluster import archives, baseimage, binaries, images
from gpusim import gpusim

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]  # the first build on a machine takes a minute or two

DEADLINE_S = 60
DRIVER = "usr/local/nvidia/lib64"
SERVE = ("python3", "/opt/server/vllm", "serve", "tiny-model")
UNCHECKED_HASH = 1  # the flags of a .pyc, PEP 552

Change = Callable[[Path, images.Recipe], images.Recipe | None]
# What a change does to a copy of a recipe's inputs, or to the recipe.
CHANGES: dict[str, Change] = {
    "an input's content": lambda root, _: (root / "constraints.txt").write_text("changed") and None,
    "an input that can be executed": lambda root, _: (root / "constraints.txt").chmod(0o755),
    "a new input": lambda root, _: (root / "initcontainer/cleanslate/new.py").touch(),
    "the Dockerfile": lambda root, recipe: (root / recipe.dockerfile).write_text("FROM scratch") and None,
    "a build argument": lambda _, recipe: dataclasses.replace(recipe, arguments={"VERSION": "9"}),
    "a base image": lambda _, recipe: dataclasses.replace(recipe, bases={"BASE": baseimage.PYTHON}),
}
SAME: dict[str, Change] = {
    "nothing": lambda _root, _recipe: None,
    "times": lambda root, _: os.utime(root / "constraints.txt", (0, 0)),
    "bits of others": lambda root, _: (root / "constraints.txt").chmod(0o600),
    "a file beside": lambda root, _: (root / "notes.txt").touch(),
}


def copy_of(recipe: images.Recipe, root: Path) -> images.Recipe:
    """The recipe on a copy of its inputs."""
    for pattern in (*recipe.inputs, recipe.dockerfile):
        for path in recipe.root.glob(pattern):
            (root / path.relative_to(recipe.root)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to(recipe.root))
    return dataclasses.replace(recipe, root=root)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build cache."""
    monkeypatch.setenv("CLEANSLATE_BUILD_CACHE", str(tmp_path / "cache"))
    return archives.directory()


@pytest.fixture(scope="module")
def pause() -> Path:
    """The pause program, from the machine's own cache."""
    return binaries.small("pause")


@pytest.mark.parametrize("change", CHANGES)
def test_key_changes_with_what_an_image_is_made_from(change: str, tmp_path: Path) -> None:
    """A change of any input makes another image, under another name."""
    recipe = copy_of(images.node_program(), tmp_path)
    before = images.reference_of(recipe)
    assert images.reference_of(CHANGES[change](tmp_path, recipe) or recipe) != before


@pytest.mark.parametrize("change", SAME)
def test_key_stays_with_everything_else(change: str, tmp_path: Path) -> None:
    """Another checkout of the same content builds nothing again."""
    recipe = copy_of(images.node_program(), tmp_path)
    SAME[change](tmp_path, recipe)
    assert images.reference_of(recipe) == images.reference("node-program")


def test_missing_input_is_named(tmp_path: Path) -> None:
    """A recipe that lists what is not there says so, before anything is built."""
    recipe = copy_of(images.server(), tmp_path)
    (tmp_path / "tests/gpusim/holder.py").unlink()
    with pytest.raises(RuntimeError, match=r"image server: cannot find its input tests/gpusim/holder\.py"):
        images.build(recipe)


def test_failed_build_leaves_nothing(cache: Path) -> None:
    """What is not whole is never taken for an archive, and the next try starts from nothing."""

    def fail(draft: Path, work: Path) -> None:
        draft.write_text("half")
        (work / "more").touch()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        archives.obtain("one", "0" * 12, fail)
    assert [path.name for path in cache.iterdir()] == ["lock"]
    assert archives.obtain("one", "0" * 12, lambda draft, _: draft.write_text("whole") and None).read_text() == "whole"


def test_two_builders_make_one_archive(cache: Path) -> None:
    """Who waits for another's build takes what that has made."""
    made: list[Path] = []
    building, go_on = threading.Event(), threading.Event()

    def make(draft: Path, _: Path) -> None:
        made.append(draft)
        building.set()
        assert go_on.wait(DEADLINE_S)
        draft.write_text("whole")

    builders = [threading.Thread(target=archives.obtain, args=("one", "0" * 12, make)) for _ in range(2)]
    builders[0].start()
    assert building.wait(DEADLINE_S)
    builders[1].start()
    go_on.set()
    for builder in builders:
        builder.join(DEADLINE_S)
    assert len(made) == 1
    assert (cache / f"one-{'0' * 12}.tar").read_text() == "whole"


def test_old_archives_go_and_others_stay(cache: Path) -> None:
    """The newest archives of a name are kept; "python" is another name than "python-build"."""

    def make(draft: Path, _: Path) -> None:
        draft.touch()

    other = archives.obtain("python-build", f"{0:012x}", make)
    kept = [archives.obtain("python", f"{number:012x}", make) for number in range(archives.KEPT + 2)]
    assert [path.exists() for path in kept] == [False] * 2 + [True] * archives.KEPT
    assert other.exists()


def test_layer_depends_on_content_alone(tmp_path: Path) -> None:
    """The same files make the same layer, whenever and by whom they were made."""
    for name, time_s in (("one", 1), ("other", 2)):
        (tmp_path / name / "etc").mkdir(parents=True)
        (tmp_path / name / "etc" / "passwd").write_text("root")
        (tmp_path / name / "link").symlink_to("etc")
        os.utime(tmp_path / name / "etc" / "passwd", (time_s, time_s))
        archives.pack_layer(tmp_path / name, tmp_path / f"{name}.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "other.tar").read_bytes()


def test_killed_build_leaves_nothing_running_mounted_or_whole(pause: Path, cache: Path, tmp_path: Path) -> None:
    """SIGKILL to the builder ends its build and all in it; the next build is a whole one."""
    hanging = pause_recipe(tmp_path, pause, 'RUN ["/pause"]\n')
    script = f"import sys; sys.path[:0] = {sys.path!r}; from cluster import images; images.build(images.{hanging!r})"
    script = script.replace("PosixPath", "__import__('pathlib').Path")
    with subprocess.Popen([sys.executable, "-c", script]) as builder:
        try:
            await_true(lambda: "/pause" in commands(builder.pid).values(), "the build's own command")
            processes = commands(builder.pid)
        finally:
            builder.kill()
    await_true(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in processes), "the end of all processes")
    assert list(cache.glob("*.tar")) == []
    assert str(cache) not in Path("/proc/self/mountinfo").read_text()
    whole = images.build(pause_recipe(tmp_path, pause, ""))
    assert archives.read(whole).config["config"]["Labels"] == {"of": "a test"}
    assert {path.name for path in cache.iterdir()} == {"lock", images.STORE, whole.name}


def pause_recipe(root: Path, pause: Path, step: str) -> images.Recipe:
    """An image of the pause program alone, with one more step of its Dockerfile."""
    shutil.copy(pause, root / "pause")
    (root / "Dockerfile").write_text(f'FROM scratch\nCOPY pause /pause\n{step}LABEL of="a test"\n')
    return images.Recipe(name="killed", dockerfile="Dockerfile", inputs=("pause",), root=root)


@pytest.mark.parametrize("name", images.NAMES)
def test_archive_is_whole_and_carries_its_reference(name: str) -> None:
    """An archive is a valid OCI layout whose blobs are what their names say; containerd imports it under the reference."""
    archive = images.archive(name)
    assert archives.read(archive).reference == images.reference(name)
    with tarfile.open(archive) as packed:
        assert json.load(packed.extractfile("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
        blobs = {path: packed.extractfile(path).read() for path in packed.getnames() if path.startswith("blobs/")}
    assert {path: f"blobs/sha256/{hashlib.sha256(content).hexdigest()}" for path, content in blobs.items()} == {
        path: path for path in blobs
    }


def test_unchanged_image_is_there_at_once() -> None:
    """What is built is not looked at by buildah again: a node's every image is asked for at each start."""
    images.archive("node-program")
    start = time.monotonic()
    images.archive("node-program")
    assert time.monotonic() - start < 1


def test_node_program_is_labelled_and_small() -> None:
    """The product's image says what it is, runs `cleanslate`, as root unless told otherwise, and is no larger than 60 MB."""
    archive = images.archive("node-program")
    config = archives.read(archive).config["config"]
    label = "org.opencontainers.image."
    assert config["Entrypoint"] == ["cleanslate"]
    assert config.get("User", "") == ""
    assert config["Labels"].pop(f"{label}description")
    expected = {"title": "cleanslate", "licenses": "Apache-2.0", "version": cleanslate.__version__}
    assert config["Labels"] == {label + key: value for key, value in expected.items()}
    assert archive.stat().st_size < 60_000_000


@pytest.fixture(scope="module")
def node_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The node program's root."""
    return images.unpack("node-program", tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, gpusim.Driver]]:
    """The server's root, with four simulated GPUs in it."""
    root = images.unpack("server", tmp_path_factory.mktemp("root"))
    os.mknod(root / "dev/null", stat.S_IFCHR | 0o666, os.stat("/dev/null").st_rdev)
    driver = gpusim.Driver.install(root / DRIVER, root / "dev", gpusim.gpus(4))
    yield root, driver
    driver.remove()


@pytest.mark.parametrize("user", [0, 12345])
def test_node_program_runs_as_anybody_on_a_read_only_root(node_program: Path, user: int) -> None:
    """A gate may run as any user, and neither needs a root that can be written."""
    read_only = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && cd "$1" && shift && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", read_only, "sh", str(node_program)]
    command += ["chroot", f"--userspec={user}:{user}", ".", "cleanslate"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (version.returncode, version.stdout) == (0, f"cleanslate {cleanslate.__version__}\n"), version.stderr
    gate = subprocess.run([*command, "gate", "--help"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert gate.returncode == 0, gate.stderr
    assert "Wait until the GPUs are clean" in gate.stdout


def test_node_program_is_compiled_ahead_and_brings_no_tools(node_program: Path) -> None:
    """Nothing is compiled at a start, and nothing that installs or builds is left."""
    programs = list((node_program / "opt").rglob("*.py"))
    assert len(programs) > 40
    for program in programs:
        (compiled,) = program.parent.glob(f"__pycache__/{program.stem}.cpython-*.pyc")
        assert compiled.read_bytes()[4] == UNCHECKED_HASH, compiled
    names = {path.name for path in node_program.rglob("*")}
    assert names.isdisjoint({"pip", "hatchling", "setuptools", "gcc", "cc", "constraints.txt", "pip.conf"})


def test_server_takes_the_gpus_it_is_given(server: tuple[Path, gpusim.Driver]) -> None:
    """One worker for each GPU of NVIDIA_VISIBLE_DEVICES; the front end as PID 1 keeps the title of its command line."""
    root, driver = server
    mine = (driver.gpus[3].uuid, driver.gpus[1].uuid)
    with container(root, *SERVE, "--gpu-bytes=7000", visible=",".join(mine)) as (pid, told):
        processes = inside(pid)
        assert processes[1] == " ".join([*SERVE, "--gpu-bytes=7000"])
        assert processes[told["engine"]] == "VLLM::EngineCore"
        assert [processes[worker] for worker in told["workers"]] == ["VLLM::Worker_TP0", "VLLM::Worker_TP1"]
        assert held(root) == {told["workers"][0]: f"{mine[0]} 7000 C", told["workers"][1]: f"{mine[1]} 7000 C"}
        assert set(told["names"]) == {path.name for path in Path(f"/proc/{pid}/root/dev/shm").iterdir()}


@pytest.mark.parametrize(("visible", "workers"), [("all", 4), ("2,0", 2), ("1", 0), ("void", 0), ("", 0)])
def test_server_reads_the_variable_as_the_runtime_does(
    server: tuple[Path, gpusim.Driver], visible: str, workers: int
) -> None:
    """Names, indexes or all; with one GPU, or none, the engine works itself."""
    with container(server[0], *SERVE, visible=visible) as (_, told):
        assert len(told["workers"]) == workers
        assert len(held(server[0])) == (1 if visible == "1" else workers)


def test_server_leaks_where_its_container_outlives_it(server: tuple[Path, gpusim.Driver]) -> None:
    """The front end is killed, PID 1 stays: engine and workers go on, with the GPUs and the shared memory."""
    root, _ = server
    with container(root, "/opt/server/outlive", *SERVE, visible="0,1") as (pid, told):
        before = held(root)
        os.kill(outer(pid, told["front_end"]), signal.SIGKILL)
        await_true(lambda: told["front_end"] not in inside(pid), "the front end's end")
        assert {told["engine"], *told["workers"], told["tracker"], 1} <= set(inside(pid))
        assert held(root) == before
        assert set(told["names"]) == {path.name for path in Path(f"/proc/{pid}/root/dev/shm").iterdir()}


def test_server_ends_in_order(server: tuple[Path, gpusim.Driver]) -> None:
    """SIGTERM to PID 1, as the kubelet sends it, ends the server and then the container: in time, or `await_true` fails."""
    for launcher in ((), ("/opt/server/outlive",)):
        with container(server[0], *launcher, *SERVE, visible="0,1") as (pid, _):
            os.kill(pid, signal.SIGTERM)
            await_true(lambda pid=pid: not Path(f"/proc/{pid}/exe").exists(), "the container's end")


@contextmanager
def container(root: Path, *command: str, visible: str) -> Iterator[tuple[int, dict]]:
    """A command in namespaces and a changed root: the pid of its PID 1 on the machine, and what the server told."""
    mounts = (
        'cd "$1" && shift && mount -t proc proc proc && mkdir -p dev/shm && mount -t tmpfs shm dev/shm && exec "$@"'
    )
    namespaces = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "sh", "-c", mounts, "sh", str(root)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "/opt/server/libraries", "NVIDIA_VISIBLE_DEVICES": visible}
    for record in (root / DRIVER / "memory").iterdir():
        record.unlink()
    with subprocess.Popen([*namespaces, "chroot", ".", *command], env=environment, stdout=subprocess.PIPE) as process:
        try:
            told = json.loads(process.stdout.readline())
            (pid,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
            yield pid, told
        finally:
            process.kill()


def inside(pid: int) -> dict[int, str]:
    """The living processes of a PID namespace by their pids there, with their titles."""
    return {there: title for there, (_, title) in _processes(pid).items()}


def outer(pid: int, there: int) -> int:
    """The machine's pid of a process of the namespace whose PID 1 is `pid`."""
    return _processes(pid)[there][0]


def _processes(pid: int) -> dict[int, tuple[int, str]]:
    namespace = os.readlink(f"/proc/{pid}/ns/pid")
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns/pid") != namespace or not (title := (folder / "cmdline").read_bytes()):
                continue
            (line,) = [line for line in (folder / "status").read_text().splitlines() if line.startswith("NSpid:")]
        except OSError:  # it has ended meanwhile
            continue
        found[int(line.split()[-1])] = (int(folder.name), title.decode().replace("\0", " ").strip())
    return found


def held(root: Path) -> dict[int, str]:
    """What the holders' records say, by the holder's pid in its container."""
    return {int(path.name.partition("-")[0]): path.read_text().strip() for path in (root / DRIVER / "memory").iterdir()}


def commands(pid: int) -> dict[int, str]:
    """A process and its descendants: the first word of their command lines."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        children = "".join(thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/children")).split()
    except OSError:  # it has ended meanwhile
        return {}
    found = {pid: words[0].decode()}
    for child in children:
        found |= commands(int(child))
    return found


def await_true(condition: Callable[[], bool], what: str) -> None:
    """Polls until the condition holds; fails at the deadline."""
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"no {what} in {DEADLINE_S} s"
        time.sleep(0.02)
