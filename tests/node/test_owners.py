"""Every form of cgroup leads to the right owner, and the plan decides what of a pod lives. With real cgroups."""

import contextlib
import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence

import pytest

from gpusim import gpusim
from node import servers
from node.eight_gpus import CLEAN, verdict
from node.machine import Machine
from node.result import Result

UID = "5e1c6a7e-0b1f-4c3e-9a55-2f1d3c4b5a69"
UNDERSCORED = UID.replace("-", "_")
OTHER_UID = "77777777-0b1f-4c3e-9a55-2f1d3c4b5a69"
STATIC = "9c0e4fa6b2d84f0d8e5b1c3a7f6d2e10"
BOX, OTHER_BOX = "3f" * 32, "4a" * 32
BURSTABLE = f"kubepods-burstable-pod{UNDERSCORED}.slice"
NOW = ("--timeout", "15s", "--shm-min-age", "0s")

# Case: the cgroup that a process is in ("systemd:" and so on: in that hierarchy alone), and its owner.
FORMS = {
    "cgroupfs, besteffort": (f"/kubepods/besteffort/pod{UID}/{BOX}", ("pod", UID)),
    "cgroupfs, guaranteed": (f"/kubepods/pod{UID}/{BOX}", ("pod", UID)),
    "cgroupfs, version 1 alone": (f"pids:/kubepods/burstable/pod{UID}/{BOX}", ("pod", UID)),
    "cgroupfs, systemd's hierarchy alone": (f"systemd:/kubepods/burstable/pod{UID}/{BOX}", ("pod", UID)),
    "cgroupfs, version 2 alone": (f"unified:/kubepods/burstable/pod{UID}/{BOX}", ("pod", UID)),
    "cgroupfs, CRI-O": (f"/kubepods/burstable/pod{UID}/crio-{BOX}", ("pod", UID)),
    "systemd, containerd": (f"/kubepods.slice/kubepods-burstable.slice/{BURSTABLE}/cri-containerd-{BOX}.scope", ("pod", UID)),
    "systemd, CRI-O": (f"/kubepods.slice/kubepods-burstable.slice/{BURSTABLE}/crio-{BOX}.scope", ("pod", UID)),
    "systemd, guaranteed": (f"/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/cri-containerd-{BOX}.scope", ("pod", UID)),
    "systemd, docker": (f"/kubepods.slice/kubepods-burstable.slice/{BURSTABLE}/docker-{BOX}.scope", ("pod", UID)),
    "systemd, version 2 alone": (f"unified:/kubepods.slice/{BURSTABLE}/cri-containerd-{BOX}.scope", ("pod", UID)),
    "containerd without a driver": (f"/system.slice/containerd.service/{BURSTABLE}:cri-containerd:{BOX}", ("pod", UID)),
    "nested by kind": (f"/kubelet.slice/kubelet-kubepods.slice/kubelet-{BURSTABLE}/cri-containerd-{BOX}.scope", ("pod", UID)),
    "nested in a container": (f"/docker/{OTHER_BOX}/kubelet/kubepods/besteffort/pod{UID}/{BOX}", ("pod", UID)),
    "below the container's scope": (f"/kubepods/besteffort/pod{UID}/{BOX}/init.scope", ("pod", UID)),
    "static pod, cgroupfs": (f"/kubepods/burstable/pod{STATIC}/{BOX}", ("pod", STATIC)),
    "static pod, systemd": (f"/kubepods.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{BOX}.scope", ("pod", STATIC)),
    "docker, cgroupfs": (f"/docker/{BOX}", ("container", BOX)),
    "docker, systemd": (f"/system.slice/docker-{BOX}.scope", ("container", BOX)),
    "podman": (f"/machine.slice/libpod-{BOX}.scope/container", ("container", BOX)),
    "Slurm, version 1": ("/slurm/uid_1000/job_4711/step_0/task_0", ("batch", "job_4711")),
    "Slurm, version 2": ("unified:/system.slice/slurmstepd.scope/job_4712/step_0/user/task_0", ("batch", "job_4712")),
    "a systemd service": ("/system.slice/vllm.service", ("service", "vllm.service")),
    "a login": ("/user.slice/user-1000.slice/session-3.scope", ("login", "uid 0")),
    "a user's own service": ("/user.slice/user-1000.slice/user@1000.service/app.slice/run-u1.scope", ("login", "uid 0")),
    "no form that is known": ("/some/where/else", ("unknown", None)),
    "none at all": ("/", ("host", "uid 0")),
}  # fmt: skip


@pytest.fixture(scope="module")
def owners() -> Iterator[Mapping[str, Mapping[str, object]]]:
    """What one inspection says of one GPU holder in each form of cgroup."""
    with Machine(gpus=gpusim.gpus(1)) as machine, contextlib.ExitStack() as holders:
        pids = {
            form: holders.enter_context(servers.role(machine, gpus=[0], cgroup=cgroup))
            for form, (cgroup, _) in FORMS.items()
        }
        processes = machine.cleanslate("inspect").processes
        yield {form: processes[pid] for form, pid in pids.items()}


@pytest.mark.parametrize("form", FORMS)
def test_the_owner_is_read_from_every_form_of_cgroup(owners: Mapping[str, Mapping[str, object]], form: str) -> None:
    """Versions, drivers, prefixes and static pods: each process belongs to whom its cgroup says."""
    cgroup, expected = FORMS[form]
    owner = owners[form]["owner"]
    assert isinstance(owner, dict)
    assert (owner["kind"], owner["name"]) == expected
    assert owners[form]["verdict"] == "Keep"
    assert cgroup[cgroup.index("/") :] in owner["evidence"]
    assert owner["container"] == (BOX if expected[0] == "pod" else None)


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with two GPUs."""
    with Machine(gpus=gpusim.gpus(2)) as one:
        yield one


def planned(
    machine: Machine,
    *,
    live: Mapping[str, Sequence[str]] | None = None,
    condemned: Sequence[str] = (),
    age_s: float = 0,
    margin_s: float = 0,
    **changes: object,
) -> str:
    """Writes a plan into the machine and returns its path there. Younger than any process, unless `age_s` says otherwise."""
    moment = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=2 - age_s)
    document = {
        "schema": "cleanslate.dev/plan/v1",
        "snapshotTime": moment.isoformat(),
        "livePods": {uid: list(boxes) for uid, boxes in (live or {}).items()},
        "condemnedPods": list(condemned),
        "marginSeconds": margin_s,
    }
    machine.path("/run/plan.json").write_text(json.dumps(document | changes))
    return "/run/plan.json"


def cgroup_of(uid: str, box: str = BOX) -> str:
    """The cgroup of a container of a pod."""
    return f"/kubepods/besteffort/pod{uid}/{box}"


def reset(machine: Machine, plan: str, *arguments: str) -> Result:
    """A reset by a plan."""
    return machine.cleanslate("reset", "--plan", plan, *NOW, *arguments)


def test_a_pod_that_is_gone_is_ended_and_a_live_one_kept(machine: Machine) -> None:
    """The plan's live pod keeps its server, the same server of a pod that the cluster no longer has goes."""
    with (
        servers.tree(machine, container=True, cgroup=cgroup_of(UID), gpus=[0], tensor_parallel=1) as live,
        servers.tree(machine, container=True, cgroup=cgroup_of(OTHER_UID), gpus=[1], tensor_parallel=1) as gone,
    ):
        result = reset(machine, planned(machine, live={UID: [BOX]}))
        assert verdict(result) == CLEAN, result.report
        assert live.intact()
        assert result.verdicts(live.engine, gone.engine) == ["Keep", "End"]
        assert not any(map(machine.alive, gone.pids))


def test_an_earlier_container_of_a_live_pod_is_ended(machine: Machine) -> None:
    """A container that is no longer running leaves nothing behind in its living pod."""
    with (
        servers.tree(machine, cgroup=cgroup_of(UID, BOX), gpus=[0]) as running,
        servers.tree(machine, cgroup=cgroup_of(UID, OTHER_BOX), gpus=[1]) as earlier,
    ):
        result = reset(machine, planned(machine, live={UID: [f"containerd://{BOX}"]}))
        assert verdict(result) == CLEAN, result.report
        assert running.intact()
        assert not any(map(machine.alive, earlier.pids))
        assert earlier.names_left() == frozenset()
        assert result.processes[earlier.engine]["owner"]["container"] == OTHER_BOX


def test_a_static_pod_lives_by_its_hash(machine: Machine) -> None:
    """A static pod's UID is the hash in its cgroup, which the plan names."""
    with servers.role(machine, gpus=[0], cgroup=cgroup_of(STATIC)) as pid:
        assert reset(machine, planned(machine, live={STATIC: [BOX]})).verdicts(pid) == ["Keep"]
        assert reset(machine, planned(machine)).verdicts(pid) == ["End"]


def test_a_condemned_pod_leaves_in_order(machine: Machine) -> None:
    """A server that lives but is to go gets SIGTERM at its front end, and takes its own shared memory away."""
    with servers.tree(machine, container=True, cgroup=cgroup_of(UID)) as server:
        result = machine.cleanslate(
            "reset", "--plan", planned(machine, live={UID: [BOX]}, condemned=[UID]), "--timeout", "15s"
        )
        assert verdict(result) == CLEAN, result.report
        assert result.outcomes(server.front_end, *server.orphans) == ["Ended"] * 4
        assert result.removed_names == set()
        assert not any(map(machine.alive, server.pids))


def test_what_started_after_the_snapshot_is_kept(machine: Machine) -> None:
    """A pod that the plan cannot know yet is not touched, even if condemned, nor is an orphan in it."""
    with servers.leak(machine, cgroup=cgroup_of(UID)) as leaked:
        for plan in (
            planned(machine, age_s=60),
            planned(machine, condemned=[UID], age_s=60),
            planned(machine, margin_s=600),
        ):
            result = reset(machine, plan)
            assert set(result.verdicts(*leaked.orphans)) == {"Keep"}
            assert all(map(machine.alive, leaked.orphans))
        assert verdict(reset(machine, planned(machine))) == CLEAN
        assert not any(map(machine.alive, leaked.pids))


def test_an_orphan_in_a_live_pod_is_ended(machine: Machine) -> None:
    """A live pod keeps its processes, and yet not an engine whose front end is gone."""
    with (
        machine.container("bash", "-c", "read line", cgroup=cgroup_of(UID), stdin=True) as box,
        servers.leak(machine, inside=box.pid, cgroup=cgroup_of(UID)) as leaked,
    ):
        result = reset(machine, planned(machine, live={UID: [BOX]}))
        assert verdict(result) == CLEAN, result.report
        assert not any(map(machine.alive, leaked.pids))
        assert machine.alive(box.pid)


def test_without_a_plan_a_pod_lives_while_its_first_process_does(machine: Machine) -> None:
    """By hand there is no plan: what is below a container's first process is live work."""
    with servers.tree(machine, container=True, cgroup=cgroup_of(UID)) as server:
        result = machine.cleanslate("reset", *NOW)
        assert set(result.verdicts(server.front_end, *server.workers)) <= {"Keep", None}
        assert "live pod" in result.processes[server.workers[0]]["reason"]
        assert server.intact()


def test_foreign_owners_are_kept_unless_named(machine: Machine) -> None:
    """With scope all a service, a batch job and another engine's container still stay, until they are named."""
    cgroups = {"service:vllm.service": "/system.slice/vllm.service", "batch:job_4711": "/slurm/uid_0/job_4711/step_0"}
    cgroups[f"container:{BOX}"] = f"/docker/{BOX}"
    with contextlib.ExitStack() as holders:
        pids = {
            name: holders.enter_context(servers.role(machine, gpus=[0], cgroup=cgroup))
            for name, cgroup in cgroups.items()
        }
        kept = machine.cleanslate("reset", "--scope", "all", "--timeout", "2s")
        assert kept.verdicts(*pids.values()) == ["Keep"] * 3
        for name, pid in pids.items():
            assert machine.alive(pid)
            machine.cleanslate("reset", "--scope", "all", "--end-owner", name, *NOW)
            assert not machine.alive(pid)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "cleanslate.dev/plan/v2"},
        {"snapshotTime": "2026-01-31T12:00:00Z"},
        {"snapshotTime": "yesterday"},
        {"livePods": [UID]},
        {"livePods": {"no-uid": []}},
        {"livePods": {UID: ["short"]}},
        {"condemnedPods": "all"},
        {"marginSeconds": -1},
        {"surprise": True},
    ],
    ids=lambda changes: f"{next(iter(changes))}-{str(next(iter(changes.values())))[:24]}",
)
def test_a_plan_that_is_not_right_is_refused_and_nothing_touched(machine: Machine, changes: dict[str, object]) -> None:
    """Another schema, stale, or malformed in any part: exit 5, one line, and every leftover still there."""
    with servers.role(machine, "--title", "VLLM::Worker_TP0", gpus=[0], under=servers.SHELL) as orphan:
        machine.path("/dev/shm/psm_0badcafe").touch()
        result = reset(machine, planned(machine, **changes))
        assert verdict(result) == ("Refused", 5)
        assert result.stderr.count("\n") == 1
        assert "/run/plan.json" in result.stderr
        assert machine.alive(orphan)
        assert machine.names() == {"psm_0badcafe"}
