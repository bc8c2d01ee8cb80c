"""The roles of LLM servers' processes and which parents are lawful: one table. Pure.

A role is never proof by itself, since anyone may set a title. A worker is *orphaned* only together with a parent that never
makes workers, as the kernel shows it.
"""

import os.path
import re
from dataclasses import dataclass

from cleanslate.model import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One kind of worker.

    `comm`: how the title begins in the kernel's 15 characters, all there is where the title is lost.
    `lawful_parents`: base names of executables that make such workers; empty means any program but NEVER_MAKE_WORKERS.
    `needs_gpu`: too common a form to count unless the process holds a GPU.
    """

    program: str
    title: re.Pattern[str]
    comm: re.Pattern[str] | None = None
    lawful_parents: frozenset[str] = frozenset()
    needs_gpu: bool = False


# vLLM's prefix can be changed (VLLM_PROCESS_NAME_PREFIX), and vLLM-Omni and ATOM have their own: the names after it count.
ROLES = (
    Role(
        program="vLLM",
        title=re.compile(
            r"[\w.-]{1,64}::(?:EngineCore(?:Proc)?|Worker(?:Proc)?|APIServer|DPCoordinator)(?:_\w+)?(?:\s.*)?"
        ),
        comm=re.compile(r"[\w.-]+::(?:EngineCor|Worker|APIServer|DPCoord)"),
    ),
    Role(
        program="SGLang",
        title=re.compile(
            r"(?:sglang|sgl_diffusion)::(?:scheduler|detokenizer|tokenizer_worker|data_parallel_controller)[\w:]*(?:\s.*)?"
        ),
        comm=re.compile(r"(?:sglang|sgl_diffusion)::"),
    ),
    Role(
        program="Ray",
        title=re.compile(r"ray::\S.*"),
        comm=re.compile(r"ray::"),
        lawful_parents=frozenset({"raylet"}),
    ),
    Role(
        program="Python multiprocessing",
        title=re.compile(r".*\bfrom multiprocessing\.(?:spawn|forkserver) import .*", re.DOTALL),
        needs_gpu=True,
    ),
    Role(program="TensorRT-LLM", title=re.compile(r".*\bmpi4py\.futures\.server\b.*", re.DOTALL), needs_gpu=True),
)
_TITLES = tuple(role for role in ROLES if not role.needs_gpu)
_COMMAND_LINES = tuple(role for role in ROLES if role.needs_gpu)

_TRACKER = re.compile(r"\bresource_tracker import main\b")
_TRACKER_FD = re.compile(r"\bmain\((\d{1,7})\)")

# Inits, shells, container shims, session keepers: what the kernel re-parents orphans to, and none of which makes workers.
NEVER_MAKE_WORKERS = frozenset(
    {
        "init",
        "systemd",
        "tini",
        "tini-static",
        "dumb-init",
        "docker-init",
        "podman-init",
        "catatonit",
        "s6-svscan",
        "s6-supervise",
        "runsv",
        "runsvdir",
        "pause",
        "sh",
        "bash",
        "dash",
        "zsh",
        "ash",
        "ksh",
        "fish",
        "busybox",
        "nohup",
        "setsid",
        "conmon",
        "conmonrs",
        "runc",
        "crun",
        "youki",
        "dockerd",
        "containerd",
        "crio",
        "kubelet",
        "sshd",
        "sshd-session",
        "login",
        "su",
        "sudo",
        "tmux",
        "screen",
        "slurmstepd",
        "slurmd",
    }
)
_SHIM = re.compile(r"containerd-shim[\w.-]*")


def worker_role(process: Process, *, holds_gpu: bool) -> Role | None:
    """The worker's role that the process's title or command line shows, if any."""
    title = process.argv[0] if process.argv else ""
    for role in _TITLES:
        if role.title.fullmatch(title):
            return role
    for role in _TITLES:
        if role.comm and role.comm.match(process.comm):
            return role
    if not holds_gpu:
        return None
    command_line = " ".join(process.argv[:8])
    return next((role for role in _COMMAND_LINES if role.title.fullmatch(command_line)), None)


def is_resource_tracker(process: Process) -> bool:
    """Whether this is Python's helper that unlinks its family's shared memory when all of it is gone."""
    return any(_TRACKER.search(argument) for argument in process.argv[1:8])


def tracker_descriptor(process: Process) -> int | None:
    """The descriptor on which a resource tracker waits for its family's end, from its command line."""
    found = next((match for argument in process.argv[1:8] if (match := _TRACKER_FD.search(argument))), None)
    return int(found[1]) if found else None


def never_makes_workers(parent: Process, *, host_init: bool) -> str | None:
    """Why `parent` can't have made a worker, or None if it may have.

    `host_init`: its /proc is that of the initial PID namespace, whose PID 1 makes nothing, whatever it is called.
    """
    name = executable_name(parent)
    if parent.pid == 1 and host_init:
        return "PID 1 of the host"
    if name in NEVER_MAKE_WORKERS or _SHIM.fullmatch(name):
        return f"{name} (pid {parent.pid})"
    return None


def is_container_shim(process: Process) -> bool:
    """Whether this is what a container engine leaves above a container's first process."""
    name = executable_name(process)
    return bool(_SHIM.fullmatch(name)) or name in {"conmon", "conmonrs"}


def executable_name(process: Process) -> str:
    """Base name of the executable as the kernel knows it; empty if unknown."""
    return os.path.basename((process.executable or "").removesuffix(" (deleted)"))
