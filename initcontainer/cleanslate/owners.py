"""What a process belongs to: decided from the text of /proc/PID/cgroup and a few numbers. Pure; never by a name.

The forms are those of cgroup v1 and v2, of the systemd and cgroupfs drivers, of every container engine we know, and below
any prefix (kind, k3s, nested cgroups): patterns search, they do not anchor.
"""

import re

from cleanslate.model import ContainerId, Owner, OwnerKind

UNSET_LOGIN_UID = 4294967295  # audit's (uid_t)-1: no login made this process
_EVIDENCE_LIMIT = 240

_HEX64 = r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])"
# A pod's UID, with the dashes that systemd's driver turns into underscores; a static pod's is a 32-digit hash.
_POD = re.compile(
    r"kubepods.*?pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])"
)
_CONTAINER = re.compile(_HEX64)
_MONITOR = "conmon-"  # CRI-O's monitor of a container is not in the container
_BATCH = (
    re.compile(r"/[^/]*slurm[^/]*/(?:[^/]+/)*?(job_\w+)"),
    re.compile(r"/(?:pbs\w*|torque)(?:\.service|\.slice)?/(?:jobid/)?([\w.\[\]-]+)"),
    re.compile(r"/lsf/[^/]+/(job\.[\w.]+)"),
    re.compile(r"/(?:UGE|AGE|SGE)/([\w.]+)"),
    re.compile(r"/htcondor/(condor_\w+)"),
    re.compile(r"/flux(?:\.service|-[\w]+)?/(?:[^/]+/)*?(job-?\w+)"),
)
_OTHER_CONTAINER = re.compile(r"/(?:lxc(?:\.payload)?[./]|machine\.slice/|garden/|docker/|libpod_parent/)([^/]+)")
_LOGIN = re.compile(r"/user\.slice(?:/|$)|/session-\w+\.scope|/(?:ssh|sshd)(?:@[^/]*)?\.service")
_SERVICE = re.compile(r"/([^/]+\.service)(?:/|$)")
_HOST = re.compile(r"/(?:init\.scope)?")


def owner_of(
    cgroup: str,
    *,
    uid: int | None = None,
    login_uid: int | None = None,
    foreign_pid_namespace: bool | None = None,
    own_cgroup: str = "",
) -> Owner:
    """The owner by the whole text of /proc/PID/cgroup. `login_uid` as /proc/PID/loginuid says it.

    `own_cgroup`: that of this program; where no cgroup names an owner, what shares it belongs to the side that it was
    started on. Unknown is an answer: an empty text, or cgroups of no known form, give OwnerKind.UNKNOWN.
    """
    paths = cgroup_paths(cgroup)
    for rule in (_pod, _batch, _container, _login, _service):
        for path in paths:
            if owner := rule(path, uid):
                return owner
    at_home = bool(_HOST.fullmatch(_leading_path(cgroup))) or cgroup == own_cgroup
    return _by_session(paths if at_home else (), cgroup, uid, login_uid, foreign_pid_namespace)


def cgroup_paths(cgroup: str) -> tuple[str, ...]:
    """The distinct paths of /proc/PID/cgroup: the unified hierarchy first, then systemd's own, then the controllers."""
    lines = [line.split(":", 2) for line in cgroup.split("\n") if line.count(":") >= 2]
    order = {"": 0, "name=systemd": 1}
    lines.sort(key=lambda parts: order.get(parts[1], 2))
    return tuple(dict.fromkeys(parts[2] for parts in lines))


def _owner(kind: OwnerKind, name: str, path: str, container: str | None = None) -> Owner:
    cut = path if len(path) <= _EVIDENCE_LIMIT else path[:_EVIDENCE_LIMIT] + "…"
    return Owner(
        kind=kind, name=name, container=ContainerId(container) if container else None, evidence=f"cgroup {cut}"
    )


def _pod(path: str, _: int | None) -> Owner | None:
    # The outermost pod: a pod's own cgroups below it (docker or kind in a pod) are the pod's affair.
    found = _POD.search(path)
    if not found:
        return None
    rest = path[found.end() :]
    container = _CONTAINER.search(rest)
    if container and rest[: container.start()].endswith(_MONITOR):
        container = None
    return _owner(OwnerKind.POD, found[1].replace("_", "-"), path, container[1] if container else None)


def _batch(path: str, _: int | None) -> Owner | None:
    found = next((match for pattern in _BATCH if (match := pattern.search(path))), None)
    return _owner(OwnerKind.BATCH, found[1], path) if found else None


def _container(path: str, _: int | None) -> Owner | None:
    found = _CONTAINER.search(path) or _OTHER_CONTAINER.search(path)
    return _owner(OwnerKind.CONTAINER, found[1], path) if found else None


def _login(path: str, uid: int | None) -> Owner | None:
    return _owner(OwnerKind.LOGIN, _user(uid), path) if _LOGIN.search(path) else None


def _service(path: str, _: int | None) -> Owner | None:
    found = _SERVICE.search(path)
    return _owner(OwnerKind.SERVICE, found[1], path) if found else None


def _by_session(
    home: tuple[str, ...], cgroup: str, uid: int | None, login_uid: int | None, foreign: bool | None
) -> Owner:
    """Where cgroups name no one: the root cgroup is the plain host's, if the PID namespace agrees."""
    if not home:
        return _owner(OwnerKind.UNKNOWN, "", next(iter(cgroup_paths(cgroup)), "is unreadable"))
    if foreign:
        return _owner(OwnerKind.CONTAINER, "in a PID namespace of its own", home[0])
    if login_uid is not None and login_uid != UNSET_LOGIN_UID:
        return Owner(kind=OwnerKind.LOGIN, name=_user(login_uid), evidence=f"login uid {login_uid}")
    return _owner(OwnerKind.HOST, _user(uid), home[0])


def _leading_path(cgroup: str) -> str:
    """The path that speaks for the whole: systemd's hierarchy where there is one, else the unified one, else any."""
    by_name = {parts[1]: parts[2] for line in cgroup.split("\n") if len(parts := line.split(":", 2)) == 3}
    return by_name.get("name=systemd", by_name.get("", next(iter(by_name.values()), "")))


def _user(uid: int | None) -> str:
    return "" if uid is None else f"uid {uid}"
