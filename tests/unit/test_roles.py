"""Roles by title and command line: what each LLM server's processes are called, and what only looks like it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleanslate import roles
from cleanslate.model import Process
from unit.examples import SPAWN, TRACKER, process, titled

TITLES = {
    "VLLM::EngineCore": "vLLM",
    "VLLM::EngineCore_DP0": "vLLM",
    "VLLM::EngineCoreProc_0": "vLLM",
    "VLLM::Worker": "vLLM",
    "VLLM::Worker_TP1": "vLLM",
    "VLLM::Worker_DP0_PP1_PCP0_TP3_DCP0_EP7": "vLLM",
    "VLLM::Worker_TP0_DP0": "vLLM",
    "VLLM::WorkerProc": "vLLM",
    "VLLM::APIServer_0": "vLLM",
    "VLLM::DPCoordinator": "vLLM",
    "vLLM-Omni::Worker_TP0": "vLLM",
    "ATOM::EngineCore": "vLLM",
    "my.company-1::EngineCore_DP3": "vLLM",
    "sglang::scheduler": "SGLang",
    "sglang::scheduler_DP0_PP0_TP1_EP0": "SGLang",
    "sglang::detokenizer": "SGLang",
    "sglang::detokenizer_router": "SGLang",
    "sglang::tokenizer_worker:4711": "SGLang",
    "sglang::data_parallel_controller": "SGLang",
    "sgl_diffusion::scheduler_0": "SGLang",
    "ray::IDLE": "Ray",
    "ray::RayWorkerWrapper.execute_method": "Ray",
    "ray::MyActor.method": "Ray",
}

COMMS = {
    "VLLM::EngineCor": "vLLM",
    "VLLM::Worker_TP": "vLLM",
    "VLLM::APIServer": "vLLM",
    "VLLM::DPCoordin": "vLLM",
    "ATOM::EngineCor": "vLLM",
    "sglang::schedul": "SGLang",
    "sglang::detoken": "SGLang",
    "sgl_diffusion::": "SGLang",
    "ray::RayWorkerW": "Ray",
}

NO_ROLE = {
    "an editor of a file called so": ("vim", "VLLM::Worker.py"),
    "an editor of a server's source": ("vim", "vllm.py"),
    "a reader of a log": ("tail", "-f", "vllm.log"),
    "a shell with a comment": ("bash", "-c", "sleep 1000 # python3 vllm"),
    "a shell that mentions a title": ("bash", "-c", "pgrep VLLM::EngineCore"),
    "a search for a title": ("grep", "-r", "VLLM::Worker_TP0", "."),
    "vLLM's front end": ("python3", "/usr/local/bin/vllm", "serve", "some/model"),
    "vLLM's front end as a module": ("python3", "-m", "vllm.entrypoints.openai.api_server"),
    "SGLang's front end": ("python3", "-m", "sglang.launch_server"),
    "the raylet": ("/opt/ray/raylet/raylet", "--node_ip_address=10.0.0.1"),
    "a title that only begins so": ("VLLM::Workers of the world",),
    "a title with something before": ("watch VLLM::Worker_TP0",),
    "a C++ name": ("std::vector",),
    "an empty prefix": ("::Worker",),
    "a script about multiprocessing": ("python3", "multiprocessing/spawn.py"),
    "a program of another server": ("sglangx::scheduler",),
    "no command line": (),
}

COMM_LIMIT = 15  # the kernel cuts comm there: VLLM::EngineCor


def role_of(one: Process, *, holds_gpu: bool = False) -> str | None:
    """The program whose worker this is, if any."""
    found = roles.worker_role(one, holds_gpu=holds_gpu)
    return found.program if found else None


@pytest.mark.parametrize(("title", "program"), TITLES.items(), ids=TITLES.keys())
def test_a_title_shows_the_role(title: str, program: str) -> None:
    """A worker is known by the title that it gave itself, also without a GPU."""
    assert role_of(titled(title, comm="python3")) == program


@pytest.mark.parametrize(("comm", "program"), COMMS.items(), ids=COMMS.keys())
def test_fifteen_characters_of_comm_show_the_role(comm: str, program: str) -> None:
    """Where the title is lost, the kernel's cut copy of it is enough, and says whose worker it is."""
    assert len(comm) <= COMM_LIMIT
    assert role_of(process(comm=comm, argv=())) == program


@pytest.mark.parametrize("argv", NO_ROLE.values(), ids=NO_ROLE.keys())
@pytest.mark.parametrize("holds_gpu", [False, True], ids=["no GPU", "holds a GPU"])
def test_a_name_on_the_command_line_is_no_role(argv: tuple[str, ...], holds_gpu: bool) -> None:
    """Only what a process calls itself counts, never what it works on; and a front end is no worker."""
    assert role_of(process(argv=argv), holds_gpu=holds_gpu) is None


@pytest.mark.parametrize(
    "argv",
    [
        SPAWN,
        (*SPAWN, "--multiprocessing-fork"),
        ("python3", "-c", "from multiprocessing.forkserver import main; main(5, 6, ['__main__'])"),
        ("python3", "-R", "-m", "mpi4py.futures.server"),
    ],
    ids=["spawn", "spawn with its flag", "fork server", "TensorRT-LLM"],
)
def test_a_common_command_line_is_a_role_only_with_a_gpu(argv: tuple[str, ...]) -> None:
    """Every Python program may have multiprocessing children: without a GPU that says nothing."""
    assert role_of(process(argv=argv), holds_gpu=True) is not None
    assert role_of(process(argv=argv), holds_gpu=False) is None


@given(st.text(max_size=40), st.lists(st.text(max_size=40), max_size=9), st.booleans())
def test_arbitrary_titles_never_fail(comm: str, argv: list[str], holds_gpu: bool) -> None:
    """Anyone may set any title; only Ray's, SGLang's and vLLM's scheme has `::` or Python's own words in it."""
    one = process(comm=comm, argv=tuple(argv))
    role = role_of(one, holds_gpu=holds_gpu)
    assert (
        role is None or "::" in comm or "::" in argv[0] or "multiprocessing" in " ".join(argv) or "mpi4py" in str(argv)
    )
    assert roles.tracker_descriptor(one) is None or roles.is_resource_tracker(one)


def test_the_resource_tracker_is_known_by_its_command_line() -> None:
    """Python's helper has no title; the descriptor it waits on is in its command line."""
    assert roles.is_resource_tracker(process(argv=TRACKER))
    assert roles.tracker_descriptor(process(argv=TRACKER)) == 9
    with_flags = ("/usr/bin/python3", "-I", "-X", "dev", "-c", TRACKER[2])
    assert roles.tracker_descriptor(process(argv=with_flags)) == 9


@pytest.mark.parametrize(
    "argv",
    [(), (TRACKER[2],), ("vim", "resource_tracker.py"), ("python3", "-c", "import multiprocessing.resource_tracker")],
    ids=["nothing", "as a title", "an editor", "an import"],
)
def test_what_only_mentions_the_tracker_is_none(argv: tuple[str, ...]) -> None:
    """A spared process must be what it is spared for."""
    assert not roles.is_resource_tracker(process(argv=argv))


@pytest.mark.parametrize(
    "name",
    [
        "bash",
        "sh",
        "dash",
        "zsh",
        "tini",
        "dumb-init",
        "docker-init",
        "catatonit",
        "systemd",
        "containerd-shim",
        "containerd-shim-runc-v2",
        "containerd-shim-nvidia-v1",
        "conmon",
        "sshd",
        "tmux",
        "slurmstepd",
    ],
)
def test_inits_shells_and_shims_make_no_workers(name: str) -> None:
    """By the executable that runs, also when its file was replaced since."""
    for executable in (f"/usr/bin/{name}", f"/usr/bin/{name} (deleted)"):
        parent = process(50, 1, executable=executable, comm="python3")
        assert roles.never_makes_workers(parent, host_init=True) == f"{name} (pid 50)"


def test_pid_1_makes_no_workers_on_the_host_only() -> None:
    """In a container PID 1 may well be the front end itself."""
    front_end = process(1, 0)
    assert roles.never_makes_workers(front_end, host_init=True) == "PID 1 of the host"
    assert roles.never_makes_workers(front_end, host_init=False) is None


@pytest.mark.parametrize(
    "known",
    [
        {},
        {"comm": "bash"},
        {"argv": ("bash",), "comm": "bash"},
        {"executable": None, "comm": "bash"},
        {"executable": "/opt/bash/python3"},
        {"executable": "/usr/bin/my-containerd-shim"},
    ],
    ids=["python", "comm bash", "title bash", "unknown executable", "a folder called bash", "a longer name"],
)
def test_a_parent_that_is_only_called_a_shell_may_make_workers(known: dict[str, str]) -> None:
    """A name that anyone may set, and an executable that could not be read, prove nothing."""
    assert roles.never_makes_workers(process(50, 1, **known), host_init=True) is None


def test_container_shims_are_told_by_their_executable() -> None:
    """What stands above a container's first process."""
    assert roles.is_container_shim(process(executable="/usr/bin/containerd-shim-runc-v2"))
    assert roles.is_container_shim(process(executable="/usr/libexec/crio/conmon"))
    assert not roles.is_container_shim(process(executable="/bin/bash", comm="conmon"))
