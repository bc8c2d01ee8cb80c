"""Owners from the text of /proc/PID/cgroup: every form that engines, batch systems and systemd write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleanslate import owners
from cleanslate.model import Owner, OwnerKind
from unit.examples import CONTAINER, OTHER_CONTAINER, OTHER_POD, POD, STATIC_POD

DASHED, UNDERSCORED = POD, POD.replace("-", "_")
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice"
GUARANTEED = f"/kubepods.slice/kubepods-pod{UNDERSCORED}.slice"
SCOPE = f"cri-containerd-{CONTAINER}.scope"
KIND = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice"
CGROUPFS = f"/kubepods/burstable/pod{DASHED}/{CONTAINER}"

POD_CONTAINERS = {
    "v2, systemd driver, containerd, burstable": f"0::{BURSTABLE}/{SCOPE}",
    "v2, systemd driver, containerd, best effort": (
        f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDERSCORED}.slice/{SCOPE}"
    ),
    "v2, systemd driver, containerd, guaranteed": f"0::{GUARANTEED}/{SCOPE}",
    "v2, systemd driver, CRI-O": f"0::{BURSTABLE}/crio-{CONTAINER}.scope",
    "v2, systemd driver, CRI-O with a cgroup for the container": f"0::{BURSTABLE}/crio-{CONTAINER}.scope/container",
    "v2, systemd driver, docker": f"0::{GUARANTEED}/docker-{CONTAINER}.scope",
    "v2, cgroupfs driver, burstable": f"0::{CGROUPFS}",
    "v2, cgroupfs driver, best effort": f"0::/kubepods/besteffort/pod{DASHED}/{CONTAINER}",
    "v2, cgroupfs driver, guaranteed": f"0::/kubepods/pod{DASHED}/{CONTAINER}",
    "v2, cgroupfs driver, CRI-O": f"0::/kubepods/burstable/pod{DASHED}/crio-{CONTAINER}",
    "v1, every controller": (
        f"12:memory:{CGROUPFS}\n11:pids:{CGROUPFS}\n4:cpu,cpuacct:{CGROUPFS}\n1:name=systemd:{CGROUPFS}"
    ),
    "v1, some controllers at the root": f"12:rdma:/\n11:memory:{BURSTABLE}/{SCOPE}\n1:name=systemd:{BURSTABLE}/{SCOPE}",
    "hybrid, the unified hierarchy at the root": f"11:memory:{CGROUPFS}\n1:name=systemd:{CGROUPFS}\n0::/",
    "hybrid, the unified hierarchy with the engine": (
        f"11:memory:{CGROUPFS}\n1:name=systemd:{CGROUPFS}\n0::/system.slice/containerd.service"
    ),
    "old containerd below its service": (
        f"11:memory:/system.slice/containerd.service/kubepods-burstable-pod{UNDERSCORED}.slice:cri-containerd:{CONTAINER}"
    ),
    "old containerd, v2": f"0::/kubepods-pod{UNDERSCORED}.slice:cri-containerd:{CONTAINER}",
    "kind, systemd driver": f"0::{KIND}/kubelet-kubepods-burstable-pod{UNDERSCORED}.slice/{SCOPE}",
    "kind, cgroupfs driver": f"0::/kubelet/kubepods/burstable/pod{DASHED}/{CONTAINER}",
    "kind in docker, the node's container above": (
        f"0::/docker/{OTHER_CONTAINER}{KIND}/kubelet-kubepods-burstable-pod{UNDERSCORED}.slice/{SCOPE}"
    ),
    "kind in docker with systemd": f"0::/system.slice/docker-{OTHER_CONTAINER}.scope/kubelet{CGROUPFS}",
    "k3s below its service": f"0::/system.slice/k3s.service{CGROUPFS}",
    "k3s in an LXC container": f"0::/lxc.payload.node1{BURSTABLE}/{SCOPE}",
    "rootless Kubernetes in a login": f"0::/user.slice/user-1000.slice/user@1000.service/k3s.scope{CGROUPFS}",
    "systemd in the container": f"0::{BURSTABLE}/{SCOPE}/init.scope",
    "a service of the systemd in the container": f"0::{BURSTABLE}/{SCOPE}/system.slice/nginx.service",
    "docker in the container": f"0::{CGROUPFS}/docker/{OTHER_CONTAINER}",
    "podman in the container": f"0::{CGROUPFS}/libpod_parent/libpod-{OTHER_CONTAINER}",
    "podman's monitor in the container": f"0::{CGROUPFS}/libpod_parent/libpod-conmon-{OTHER_CONTAINER}",
    "another cluster in the container": f"0::{CGROUPFS}/kubepods/pod{OTHER_POD}/{OTHER_CONTAINER}",
    "a Slurm job in the container": f"0::{CGROUPFS}/slurm/uid_1000/job_42",
    "seen from a private cgroup namespace": f"0::/../..{BURSTABLE}/{SCOPE}",
}

OTHERS = {
    "docker, cgroupfs": (f"0::/docker/{CONTAINER}", OwnerKind.CONTAINER, CONTAINER),
    "docker, systemd": (f"0::/system.slice/docker-{CONTAINER}.scope", OwnerKind.CONTAINER, CONTAINER),
    "docker, v1": (f"9:pids:/docker/{CONTAINER}\n1:name=systemd:/docker/{CONTAINER}", OwnerKind.CONTAINER, CONTAINER),
    "docker below a cgroup parent": (f"0::/gpu.slice/docker-{CONTAINER}.scope", OwnerKind.CONTAINER, CONTAINER),
    "nerdctl": (f"0::/system.slice/nerdctl-{CONTAINER}.scope", OwnerKind.CONTAINER, CONTAINER),
    "containerd without Kubernetes": (f"0::/default/{CONTAINER}", OwnerKind.CONTAINER, CONTAINER),
    "podman": (f"0::/machine.slice/libpod-{CONTAINER}.scope/container", OwnerKind.CONTAINER, CONTAINER),
    "podman, cgroupfs": (f"0::/libpod_parent/libpod-{CONTAINER}", OwnerKind.CONTAINER, CONTAINER),
    "rootless podman is no login": (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{CONTAINER}.scope/container",
        OwnerKind.CONTAINER,
        CONTAINER,
    ),
    "rootless docker is no login": (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{CONTAINER}.scope",
        OwnerKind.CONTAINER,
        CONTAINER,
    ),
    "a neighbour in a private cgroup namespace": (f"0::/../{SCOPE}", OwnerKind.CONTAINER, CONTAINER),
    "LXC": ("0::/lxc/web", OwnerKind.CONTAINER, "web"),
    "LXC, payload": ("0::/lxc.payload.web/init.scope", OwnerKind.CONTAINER, "web"),
    "LXC, payload as a folder": ("0::/lxc.payload/web", OwnerKind.CONTAINER, "web"),
    "systemd-nspawn": (
        "0::/machine.slice/systemd-nspawn@web.service/payload",
        OwnerKind.CONTAINER,
        "systemd-nspawn@web.service",
    ),
    "Slurm, v1": ("4:memory:/slurm/uid_1000/job_42/step_0/task_0", OwnerKind.BATCH, "job_42"),
    "Slurm, v1, node name": ("4:memory:/slurm_node01/uid_1000/job_42/step_batch", OwnerKind.BATCH, "job_42"),
    "Slurm, v1, daemon's service in systemd's hierarchy": (
        "4:memory:/slurm/uid_1000/job_42/step_0\n1:name=systemd:/system.slice/slurmd.service",
        OwnerKind.BATCH,
        "job_42",
    ),
    "Slurm, v2": ("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", OwnerKind.BATCH, "job_42"),
    "Slurm, v2, node name": (
        "0::/system.slice/node01_slurmstepd.scope/job_42/step_extern/user/task_special",
        OwnerKind.BATCH,
        "job_42",
    ),
    "a container in a Slurm job is the job's": (
        f"0::/system.slice/slurmstepd.scope/job_42/step_0/user/libpod-{CONTAINER}.scope",
        OwnerKind.BATCH,
        "job_42",
    ),
    "PBS": ("0::/pbs_jobs.service/jobid/123.server", OwnerKind.BATCH, "123.server"),
    "PBS, array job, v1": ("7:cpuset:/pbspro.service/jobid/123[4].server", OwnerKind.BATCH, "123[4].server"),
    "Torque": ("7:cpuset:/torque/123.server", OwnerKind.BATCH, "123.server"),
    "LSF": ("7:memory:/lsf/cluster1/job.123.4567.1690000000", OwnerKind.BATCH, "job.123.4567.1690000000"),
    "HTCondor": (
        "0::/htcondor/condor_var_lib_condor_execute_slot1_1",
        OwnerKind.BATCH,
        "condor_var_lib_condor_execute_slot1_1",
    ),
    "Grid Engine": ("0::/UGE/123.1", OwnerKind.BATCH, "123.1"),
    "Slurm's daemon": ("0::/system.slice/slurmd.service", OwnerKind.SERVICE, "slurmd.service"),
    "the kubelet": ("0::/system.slice/kubelet.service", OwnerKind.SERVICE, "kubelet.service"),
    "a service": ("0::/system.slice/vllm.service", OwnerKind.SERVICE, "vllm.service"),
    "a service from a template": (
        "0::/system.slice/system-vllm.slice/vllm@a.service",
        OwnerKind.SERVICE,
        "vllm@a.service",
    ),
    "a service, v1": ("9:pids:/system.slice/vllm.service\n1:name=systemd:/", OwnerKind.SERVICE, "vllm.service"),
    "a service with cgroups below": ("0::/system.slice/vllm.service/payload", OwnerKind.SERVICE, "vllm.service"),
    "a session": ("0::/user.slice/user-1000.slice/session-3.scope", OwnerKind.LOGIN, "uid 1000"),
    "a user's service manager": (
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service",
        OwnerKind.LOGIN,
        "uid 1000",
    ),
    "a login by ssh without PAM": ("0::/system.slice/ssh.service", OwnerKind.LOGIN, "uid 1000"),
    "a login by sshd without PAM": ("0::/system.slice/sshd.service", OwnerKind.LOGIN, "uid 1000"),
    "a login by socket-activated ssh": (
        "0::/system.slice/system-ssh.slice/ssh@3-10.0.0.1:22-10.0.0.2:4711.service",
        OwnerKind.LOGIN,
        "uid 1000",
    ),
    "PID 1's scope": ("0::/init.scope", OwnerKind.HOST, "uid 1000"),
    "the root": ("0::/", OwnerKind.HOST, "uid 1000"),
    "the roots of v1": ("9:pids:/\n4:memory:/\n1:name=systemd:/", OwnerKind.HOST, "uid 1000"),
    "an administrator's own cgroup": ("0::/gpu-people/alice", OwnerKind.UNKNOWN, ""),
    "outside of a private cgroup namespace": ("0::/../..", OwnerKind.UNKNOWN, ""),
    "a pod's name without Kubernetes above it": (f"0::/pod{DASHED}", OwnerKind.UNKNOWN, ""),
    "nothing": ("", OwnerKind.UNKNOWN, ""),
    "no cgroup line": ("garbage", OwnerKind.UNKNOWN, ""),
    "a line without a path": ("0::", OwnerKind.UNKNOWN, ""),
    "only line feeds": ("\n\n\n", OwnerKind.UNKNOWN, ""),
}

any_text = st.text(max_size=300)
one_line = st.text(st.characters(exclude_characters="\n"), max_size=60).filter(lambda text: "kubepods" not in text)


def named(found: Owner) -> tuple[OwnerKind, str, str | None]:
    """What an owner says apart from its evidence."""
    return found.kind, found.name, found.container


@pytest.mark.parametrize("text", POD_CONTAINERS.values(), ids=POD_CONTAINERS.keys())
def test_a_pods_process_belongs_to_its_pod_and_container(text: str) -> None:
    """Whatever engine, driver and prefix: the pod's UID as the API writes it, and the container directly in the pod."""
    found = owners.owner_of(text + "\n", uid=1000)
    assert named(found) == (OwnerKind.POD, POD, CONTAINER)
    assert found.evidence.startswith("cgroup /")


@pytest.mark.parametrize(("text", "kind", "name"), OTHERS.values(), ids=OTHERS.keys())
def test_any_other_process_belongs_to_what_its_cgroup_says(text: str, kind: OwnerKind, name: str) -> None:
    """Containers, jobs, services, logins and the host are told apart; what is none of them is unknown."""
    assert named(owners.owner_of(text, uid=1000)) == (kind, name, None)


@pytest.mark.parametrize("driver", ["systemd", "cgroupfs"])
def test_a_static_pods_uid_is_its_hash(driver: str) -> None:
    """A static pod's cgroup carries 32 digits without dashes."""
    above = (
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" if driver == "systemd" else "/kubepods/pod"
    )
    below = f".slice/{SCOPE}" if driver == "systemd" else f"/{CONTAINER}"
    found = owners.owner_of(f"0::{above}{STATIC_POD}{below}")
    assert named(found) == (OwnerKind.POD, STATIC_POD, CONTAINER)


@pytest.mark.parametrize(
    "text",
    [
        f"0::{BURSTABLE}/crio-conmon-{CONTAINER}.scope",
        f"0::/kubepods/burstable/pod{DASHED}/crio-conmon-{CONTAINER}",
        f"0::{BURSTABLE}",
    ],
    ids=["CRI-O's monitor, systemd", "CRI-O's monitor, cgroupfs", "the pod's own cgroup"],
)
def test_what_is_in_the_pod_but_in_no_container_names_none(text: str) -> None:
    """CRI-O's monitor is not in the container that it watches."""
    assert named(owners.owner_of(text)) == (OwnerKind.POD, POD, None)


@pytest.mark.parametrize(
    ("known", "kind", "name"),
    [
        ({"login_uid": 1000}, OwnerKind.LOGIN, "uid 1000"),
        ({"login_uid": 0}, OwnerKind.LOGIN, "uid 0"),
        ({"login_uid": owners.UNSET_LOGIN_UID}, OwnerKind.HOST, "uid 0"),
        ({"login_uid": None}, OwnerKind.HOST, "uid 0"),
        ({"foreign_pid_namespace": False}, OwnerKind.HOST, "uid 0"),
        ({"foreign_pid_namespace": True}, OwnerKind.CONTAINER, "in a PID namespace of its own"),
        ({"foreign_pid_namespace": True, "login_uid": 1000}, OwnerKind.CONTAINER, "in a PID namespace of its own"),
    ],
    ids=str,
)
def test_in_the_root_cgroup_login_and_namespace_decide(
    known: dict[str, int | None], kind: OwnerKind, name: str
) -> None:
    """Without systemd everything is in the root cgroup: audit's login uid and the PID namespace still tell."""
    found = owners.owner_of("0::/\n", uid=0, **known)  # type: ignore[arg-type]
    assert (found.kind, found.name) == (kind, name)
    assert found.evidence


@pytest.mark.parametrize("unit", ["cron.service", "atd.service"])
def test_a_service_stays_one_although_it_set_a_login_uid(unit: str) -> None:
    """Cron gives its jobs a login uid; they are the service's all the same, and so kept unless it is named."""
    found = owners.owner_of(f"0::/system.slice/{unit}", uid=1000, login_uid=1000)
    assert (found.kind, found.name) == (OwnerKind.SERVICE, unit)


def test_a_cgroup_shared_with_this_program_is_the_sides_it_was_started_on() -> None:
    """In a machine whose own root is a nameless cgroup, what shares it is the host's; what does not stays unknown."""
    own = "0::/nested/machine\n"
    assert owners.owner_of(own, uid=0, own_cgroup=own).kind is OwnerKind.HOST
    assert owners.owner_of(own, uid=0, login_uid=1000, own_cgroup=own).kind is OwnerKind.LOGIN
    assert owners.owner_of(own, uid=0, foreign_pid_namespace=True, own_cgroup=own).kind is OwnerKind.CONTAINER
    assert owners.owner_of("0::/nested/other\n", uid=0, own_cgroup=own).kind is OwnerKind.UNKNOWN
    assert owners.owner_of("", uid=0, own_cgroup="").kind is OwnerKind.UNKNOWN


def test_sharing_a_pods_cgroup_with_this_program_changes_no_owner() -> None:
    """A reset pod's own cgroup is a pod's: what is in there is that pod's."""
    text = f"0::{BURSTABLE}/{SCOPE}\n"
    assert named(owners.owner_of(text, own_cgroup=text)) == (OwnerKind.POD, POD, CONTAINER)


@given(any_text, st.none() | st.integers(0, 2**32), st.none() | st.booleans(), any_text)
def test_arbitrary_text_gives_an_owner_and_never_an_error(
    text: str, login_uid: int | None, foreign: bool | None, own: str
) -> None:
    """/proc is read as it is: anything is an answer, unknown at worst, and its evidence is bounded."""
    found = owners.owner_of(text, uid=0, login_uid=login_uid, foreign_pid_namespace=foreign, own_cgroup=own)
    assert found.kind in OwnerKind
    assert 0 < len(found.evidence) <= 300


@given(
    one_line, st.sampled_from(["", "/"]).flatmap(lambda slash: st.just("") if not slash else one_line.map("/".__add__))
)
def test_prefix_and_suffix_change_no_pod(prefix: str, suffix: str) -> None:
    """Whatever stands above a pod's cgroup, and whatever its container makes below, it is that pod's container."""
    for path in (f"{BURSTABLE}/{SCOPE}", CGROUPFS):
        found = owners.owner_of(f"0::{prefix}{path}{suffix}\n")
        assert named(found) == (OwnerKind.POD, POD, CONTAINER)


@given(st.permutations(["12:memory:", "1:name=systemd:", "0::", "4:cpu,cpuacct:"]), st.integers(1, 4))
def test_any_hierarchy_that_names_the_pod_is_enough(controllers: list[str], named_by: int) -> None:
    """Lines come in any order, and only some may carry the pod's path."""
    lines = [f"{one}{CGROUPFS if at < named_by else '/'}" for at, one in enumerate(controllers)]
    assert named(owners.owner_of("\n".join(lines))) == (OwnerKind.POD, POD, CONTAINER)
