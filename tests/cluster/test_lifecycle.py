"""Starting a cluster: whatever happens to whoever starts it does no harm, and checkouts do not meet."""

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import cluster, kubectl, places, spaces, traces
from cluster.cluster import Cluster
from cluster.places import Place

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# What `python -m cluster` and the images need of a checkout.
NEEDED = (
    "tests",
    "initcontainer",
    "operator",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
    ".dockerignore",
)


def command(place: Place, verb: str, nodes: int = 1) -> list[str]:
    return [sys.executable, "-m", "cluster", verb, "--name", place.name, "--nodes", str(nodes)]


def run(place: Place, verb: str, **how: int) -> str:
    """`python -m cluster VERB` in the place's checkout; returns what it prints for a shell to evaluate."""
    done = subprocess.run(
        command(place, verb, **how), env=environment(place), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment(place: Place) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(place.checkout / "tests")}


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_starter_that_is_killed_does_no_harm(place: Place, verb: str) -> None:
    """SIGKILL at any moment of the start: the next `up` or `down` puts it right."""
    started = time.monotonic()
    run(place, "up")
    took_s = time.monotonic() - started
    run(place, "down")
    chance = random.Random(seed := random.randrange(1 << 32))
    print(f"seed {seed}")
    for _ in range(2):
        with subprocess.Popen(command(place, "up"), env=environment(place), stderr=subprocess.DEVNULL) as starter:
            assert starter.stdin is None
            moment = chance.uniform(0.05, took_s)
            try:
                starter.wait(moment)
            except subprocess.TimeoutExpired:
                starter.send_signal(signal.SIGKILL)
        if verb == "up":
            run(place, "up")
            found = cluster.find(place, node_count=1)
            assert found, f"killed after {moment:.2f} s"
        run(place, "down")
        assert traces.of_cluster(place) == traces.NOTHING, f"killed after {moment:.2f} s"


def test_kubectl_ends_with_whoever_waits_for_it(tmp_path: Path) -> None:
    """A starter that is killed leaves none behind that waits for a cluster which is no more."""
    stand_in, told = tmp_path / "kubectl", tmp_path / "pid"
    os.mkfifo(told)
    stand_in.write_text(f"#!/bin/sh\necho $$ >{told}\nexec sleep 60\n")
    stand_in.chmod(0o755)
    call = f"Kubectl(program=Path('{stand_in}'), kubeconfig=Path('none'))()"
    code = f"from pathlib import Path; from cluster.kubectl import Kubectl; {call}"
    env = os.environ | {"PYTHONPATH": str(places.CHECKOUT / "tests")}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as waiting:
        child = os.pidfd_open(int(told.read_text()))
        waiting.kill()
    ended = select.select([child], [], [], 30)[0]
    os.close(child)
    assert ended


def test_two_checkouts_do_not_meet(place: Place, tmp_path: Path) -> None:
    """Both start at once, each with its own API server; the end of one is not the other's."""
    theirs = Place(name=place.name, checkout=copy_of_checkout(tmp_path / "other"))
    starters = [subprocess.Popen(command(one, "up"), env=environment(one)) for one in (place, theirs)]
    try:
        assert [starter.wait(240) for starter in starters] == [0, 0]
        ours, other = Cluster(place, 1), Cluster(theirs, 1)
        ours.kubectl("create", "namespace", "only-ours")
        assert "only-ours" in ours.kubectl("get", "namespaces")
        assert "only-ours" not in other.kubectl("get", "namespaces")
        run(theirs, "down")
        assert traces.of_cluster(theirs) == traces.NOTHING
        assert cluster.find(place, node_count=1)
    finally:
        run(theirs, "down")


def copy_of_checkout(folder: Path) -> Path:
    folder.mkdir()
    for name in NEEDED:
        source = places.CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def test_a_running_cluster_is_found_again(place: Place) -> None:
    """A second start is the first one's cluster, at once, with nothing started anew."""
    first = cluster.start(place, node_count=0)
    assert cluster.start(place, node_count=0).control.pid == first.control.pid


def test_a_broken_cluster_is_replaced(place: Place) -> None:
    """A component that has ended makes a cluster unsound; the next start makes another."""
    broken = cluster.start(place, node_count=0)
    broken.control.component("kube-scheduler").stop()
    assert [one.partition(":")[0] for one in broken.ended()] == ["kube-scheduler"]
    assert cluster.find(place, node_count=0) is None
    pid = broken.control.pid
    mended = cluster.start(place, node_count=0)
    assert mended.control.pid != pid
    assert mended.ended() == []


def test_a_component_that_cannot_start_is_told_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the component and the logs, and what there is of the cluster stays to be looked at."""
    lines = cluster.components.control_plane
    broken = lambda *a, **k: lines(*a, **k) | {"kube-scheduler": ["kube-scheduler-that-is-not-there"]}  # noqa: E731
    monkeypatch.setattr(cluster.components, "control_plane", broken)
    with pytest.raises(cluster.ClusterError, match=rf"kube-scheduler.*{place.logs}"):
        cluster.start(place, node_count=0)
    assert "kube-scheduler-that-is-not-there" in (place.logs / "kube-scheduler.log").read_text()


def test_a_space_that_ended_says_so(place: Place) -> None:
    """Whoever holds on to a cluster that went gets an error, not a hang."""
    gone = cluster.start(place, node_count=0)
    cluster.stop(place)
    with pytest.raises(spaces.SpaceError, match="the space has ended"):
        gone.control.components()
    with pytest.raises(kubectl.KubectlError):
        gone.kubectl("get", "nodes")
