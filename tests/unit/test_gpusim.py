"""The simulated driver against the real pynvml: what the other tests rest on must itself hold."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusim import gpusim
from gpusim.gpusim import GIB, MIB, Driver, Gpu, Mig
from gpusim.running import SIMULATOR, ask, asking, held_nodes, holder, node_numbers, wait_for_state

UUIDS = [gpu.uuid for gpu in gpusim.gpus(8)]
GPU_IS_LOST, NOT_SUPPORTED, FUNCTION_NOT_FOUND, DRIVER_NOT_LOADED, UNINITIALIZED = 15, 3, 13, 9, 1

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the simulated driver needs root, to make device nodes")


def install(folder: Path, machine: tuple[Gpu, ...], **options: Any) -> Driver:
    """A driver whose nodes are below the test's own folder."""
    return Driver.install(folder / "driver", folder / "dev", machine, seen_dev=str(folder / "dev"), **options)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """Eight idle GPUs."""
    installed = install(tmp_path, gpusim.gpus(8))
    yield installed
    installed.remove()


def test_idle_gpus_use_nothing_by_version_two_and_their_reservation_by_version_one(driver: Driver) -> None:
    """The reservation of the driver counts as used in version 1 of the figures only."""
    answer = ask(driver)
    assert (answer["driver"], answer["count"]) == (gpusim.DRIVER_VERSION, 8)
    assert [gpu["uuid"] for gpu in answer["gpus"]] == UUIDS
    assert [gpu["index"] for gpu in answer["gpus"]] == [gpu["minor"] for gpu in answer["gpus"]] == list(range(8))
    for gpu in answer["gpus"]:
        assert gpu["v1"] == {"total": 141 * GIB, "free": 141 * GIB - 615 * MIB, "used": 615 * MIB}
        assert (gpu["v2"]["used"], gpu["v2"]["reserved"]) == (0, 615 * MIB)
        assert gpu["compute"] == gpu["graphics"] == gpu["mps"] == gpu["mig"] == []
        assert gpu["recovery_action"] == 0
        assert gpu["numa_node"] == {"error": NOT_SUPPORTED}
    assert answer["closed"] == {"error": UNINITIALIZED}


def test_the_real_bus_address_is_the_name_in_the_proc_tree(driver: Driver, tmp_path: Path) -> None:
    """A reader of /proc/driver/nvidia and a reader of NVML meet the same GPUs."""
    driver.proc_driver(tmp_path / "proc")
    for gpu in ask(driver)["gpus"]:
        text = (tmp_path / "proc/gpus" / gpu["pci"]["busIdLegacy"].lower() / "information").read_text()
        rows = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
        assert (rows["GPU UUID"], rows["Device Minor"]) == (gpu["uuid"], str(gpu["minor"]))


def test_proc_devices_keeps_every_real_line_and_names_no_terminal_as_nvidia(driver: Driver) -> None:
    """With the terminals' major as a GPU's, every login would hold a GPU."""
    lines = driver.proc_devices().splitlines()
    added = set(lines) - set(Path("/proc/devices").read_text().splitlines())
    assert {line.split()[1] for line in added} >= {"nvidia", "nvidiactl", "nvidia-uvm"}
    assert all("nvidia" in line and line.split()[0] != "4" for line in added)
    assert lines.index("195 nvidia") < lines.index("Block devices:")


def test_memory_of_a_holder_vanishes_with_its_death(driver: Driver) -> None:
    """The kernel frees it: nothing but SIGKILL happens, and the zombie, which nobody collected, holds nothing."""
    with holder(driver, "--gpu", f"7={20 * GIB}", "--gpu", "0=4096") as process:
        during = ask(driver)["gpus"]
        process.kill()
        wait_for_state(process, "Z")
        after = ask(driver)["gpus"]
    assert [gpu["v2"]["used"] for gpu in during] == [4096, 0, 0, 0, 0, 0, 0, 20 * GIB]
    assert during[7]["v1"]["used"] == 20 * GIB + 615 * MIB
    listed = [(gpu["index"], p["pid"], p["usedGpuMemory"]) for gpu in during for p in gpu["compute"]]
    assert listed == [(0, process.pid, 4096), (7, process.pid, 20 * GIB)]
    assert [gpu["v2"]["used"] for gpu in after] == [0] * 8
    assert [gpu["compute"] for gpu in after] == [[]] * 8


def test_a_holder_has_the_nodes_of_a_cuda_context_open(driver: Driver) -> None:
    """The scan of descriptors finds a holder without NVML's help."""
    with holder(driver, "--gpu", "3=1") as process:
        assert held_nodes(process.pid) == node_numbers(driver, "nvidiactl", "nvidia-uvm", "nvidia3")


def test_a_monitor_holds_nodes_and_no_memory(driver: Driver) -> None:
    """Neither uvm nor a place in the process lists."""
    with holder(driver, "--only-control") as process:
        every = [f"nvidia{minor}" for minor in range(8)]
        assert held_nodes(process.pid) == node_numbers(driver, "nvidiactl", *every)
        answer = ask(driver)["gpus"]
    assert [(gpu["v2"]["used"], gpu["compute"]) for gpu in answer] == [(0, [])] * 8


def test_a_user_of_nvml_holds_nodes_like_a_monitor(driver: Driver) -> None:
    """The program's own reader is a holder while it reads, as with the real library."""
    driver.update(0, hang=("nvmlDeviceGetUUID",))
    with asking(driver) as program:
        wait_for_state(program, "S")
        deadline = time.monotonic() + 10
        while len(held_nodes(program.pid)) < 9:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        program.kill()


@pytest.mark.parametrize(("kind", "listed"), [("C", "compute"), ("G", "graphics"), ("M", "mps")])
def test_each_kind_of_process_is_in_its_own_list(driver: Driver, kind: str, listed: str) -> None:
    """Compute, graphics and MPS clients are three lists."""
    with holder(driver, "--gpu", "1=4096", "--kind", kind) as process:
        gpu = ask(driver)["gpus"][1]
    found = {name: [p["pid"] for p in gpu[name]] for name in ("compute", "graphics", "mps")}
    assert found == {"compute": [], "graphics": [], "mps": []} | {listed: [process.pid]}


def test_memory_under_mps_is_used_by_nobody_in_particular(driver: Driver) -> None:
    """The figure counts, the process is listed without one."""
    with holder(driver, "--gpu", f"0={GIB}", "--kind", "M", "--unattributed"):
        gpu = ask(driver)["gpus"][0]
    assert gpu["v2"]["used"] == GIB
    assert [p["usedGpuMemory"] for p in gpu["mps"]] == [None]


def test_a_pid_is_the_readers_own(driver: Driver, tmp_path: Path) -> None:
    """A reader outside a holder's PID namespace sees its outer pid, one inside sees its inner pid."""
    os.mkfifo(tmp_path / "never")
    script = f"""
        exec 3<>{tmp_path}/never
        {sys.executable} -S {SIMULATOR}/holder.py hold --dir {driver.directory} --dev {driver.dev} --gpu 0=1 <&3 &
        read line; LD_LIBRARY_PATH={driver.directory} {sys.executable} {SIMULATOR}/ask.py; echo $!; read line
    """
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as namespace:
        assert namespace.stdin is not None
        assert namespace.stdout is not None
        assert namespace.stdout.readline() == "ready\n"
        namespace.stdin.write("\n")
        namespace.stdin.flush()
        inside = json.loads(namespace.stdout.readline())
        inner_pid = int(namespace.stdout.readline())
        [seen_outside] = [process["pid"] for process in ask(driver)["gpus"][0]["compute"]]
        namespaces = re.search(r"NSpid:(.*)", Path(f"/proc/{seen_outside}/status").read_text())
        namespace.kill()
    assert [process["pid"] for process in inside["gpus"][0]["compute"]] == [inner_pid]
    assert namespaces is not None
    assert [int(pid) for pid in namespaces[1].split()][-1] == inner_pid != seen_outside


def test_residual_memory_has_no_process(driver: Driver) -> None:
    """A driver leak: used bytes that nobody holds."""
    driver.update(2, residual_bytes=1204 * MIB)
    gpu = ask(driver)["gpus"][2]
    assert (gpu["v2"]["used"], gpu["compute"]) == (1204 * MIB, [])


def test_a_ghost_is_listed_though_it_is_dead(driver: Driver) -> None:
    """The driver may name a pid that /proc does not have."""
    driver.update(0, ghosts=(4_000_000,))
    assert [p["pid"] for p in ask(driver)["gpus"][0]["compute"]] == [4_000_000]


def test_an_error_stays_with_its_gpu(driver: Driver) -> None:
    """One lost GPU fails call by call, the others answer."""
    driver.update(5, errors={"nvmlDeviceGetMemoryInfo_v2": GPU_IS_LOST}, recovery_action=2)
    driver.update(6, errors={"nvmlDeviceGetHandleByIndex_v2": GPU_IS_LOST})
    gpus = ask(driver)["gpus"]
    assert gpus[5]["v2"] == {"error": GPU_IS_LOST}
    assert (gpus[5]["uuid"], gpus[5]["recovery_action"]) == (UUIDS[5], 2)
    assert gpus[6] == {"error": GPU_IS_LOST}
    assert [gpu["v2"]["used"] for gpu in (*gpus[:5], gpus[7])] == [0] * 6


def test_memory_that_is_not_supported_is_so_in_both_versions(driver: Driver) -> None:
    """As on unified memory."""
    driver.update(0, errors=gpusim.NO_MEMORY_INFO, numa_node=1)
    gpu = ask(driver)["gpus"][0]
    assert gpu["v1"] == gpu["v2"] == {"error": NOT_SUPPORTED}
    assert gpu["numa_node"] == 1


def test_a_missing_gpu_is_not_enumerated_and_the_others_move_up(driver: Driver, tmp_path: Path) -> None:
    """Its /proc entry stays, which is how a careful program notices."""
    driver.update(3, missing=True)
    driver.proc_driver(tmp_path / "proc")
    assert [gpu["minor"] for gpu in ask(driver)["gpus"]] == [0, 1, 2, 4, 5, 6, 7]
    assert len(list((tmp_path / "proc/gpus").iterdir())) == 8


def test_a_gpu_without_its_node_is_not_enumerated_and_the_others_move_up(driver: Driver) -> None:
    """A container that was given GPUs 2 and 5 has two, numbered 0 and 1: the library lists what it can open."""
    for minor in {*range(8)} - {2, 5}:
        (driver.dev / f"nvidia{minor}").unlink()
    seen = [(gpu["index"], gpu["minor"], gpu["uuid"]) for gpu in ask(driver)["gpus"]]
    assert seen == [(0, 2, UUIDS[2]), (1, 5, UUIDS[5])]


def test_a_gpu_whose_node_is_refused_is_not_enumerated(driver: Driver) -> None:
    """The node may be there and closed to this process, as to one in a container by the rules of its cgroup."""
    (driver.dev / "nvidia0").chmod(0)
    argv = ["setpriv", "--bounding-set=-dac_override", sys.executable, str(SIMULATOR / "ask.py")]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver.directory)}
    asked = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True, timeout=30)
    assert [gpu["minor"] for gpu in json.loads(asked.stdout)["gpus"]] == [1, 2, 3, 4, 5, 6, 7]
    assert ask(driver)["count"] == 8


def test_no_gpus_at_all_is_a_count_of_zero(tmp_path: Path) -> None:
    """A driver without a device starts, and says so."""
    driver = install(tmp_path, ())
    assert ask(driver)["count"] == 0
    driver.remove()


def test_an_unloaded_driver_refuses_to_start_until_it_is_loaded(driver: Driver) -> None:
    """The library alone is no driver."""
    driver.unload()
    assert ask(driver)["error"] == DRIVER_NOT_LOADED
    driver.system(errors={"nvmlInit_v2": 18})
    assert ask(driver)["error"] == 18
    driver.system(errors={})
    assert ask(driver)["count"] == 8


def test_a_library_older_than_version_two_lacks_the_function(tmp_path: Path) -> None:
    """Version 1 answers, version 2 is not found."""
    driver = install(tmp_path, gpusim.gpus(1), memory_v2=False)
    gpu = ask(driver)["gpus"][0]
    assert gpu["v1"]["used"] == 615 * MIB
    assert gpu["v2"] == {"error": FUNCTION_NOT_FOUND}
    driver.remove()


def test_flickering_figures_are_served_in_turn_and_the_last_one_stays(driver: Driver) -> None:
    """Across processes, and each reading of either version takes one."""
    driver.update(0, flicker=(5 * GIB, 0, GIB, 7, 9))
    figures = []
    for _ in range(3):
        gpu = ask(driver)["gpus"][0]
        figures += [gpu["v1"]["used"] - 615 * MIB, gpu["v2"]["used"]]
    assert figures == [5 * GIB, 0, GIB, 7, 9, 9]


def test_mig_instances_have_figures_and_processes_of_their_own(tmp_path: Path) -> None:
    """The parent counts them all, an instance only itself."""
    parts = (Mig(uuid="MIG-a"), Mig(uuid="MIG-b", residual_bytes=MIB, errors={"nvmlDeviceGetName": NOT_SUPPORTED}))
    whole, plain = gpusim.gpus(2)
    driver = install(tmp_path, (Gpu(uuid=whole.uuid, minor=0, mig=parts), plain))
    with holder(driver, "--gpu", "MIG-b=4096") as process:
        gpu, other = ask(driver)["gpus"]
    driver.remove()
    assert (gpu["mig_mode"], other["mig_mode"]) == ([1, 1], [0, 0])
    assert [part["uuid"] for part in gpu["mig"]] == ["MIG-a", "MIG-b"]
    assert [part["v2"]["used"] for part in gpu["mig"]] == [12 * MIB, 13 * MIB + 4096]
    assert gpu["v2"]["used"] == 25 * MIB + 4096
    assert [[p["pid"] for p in part["compute"]] for part in gpu["mig"]] == [[], [process.pid]]
    assert [(p["pid"], p["gpuInstanceId"]) for p in gpu["compute"]] == [(process.pid, 2)]
    assert {part["parent"] for part in gpu["mig"]} == {gpu["uuid"]}
    assert [part["name"] for part in gpu["mig"]] == ["NVIDIA H200 MIG 1g.18gb", {"error": NOT_SUPPORTED}]
    assert [part["is_mig"] for part in (gpu, *gpu["mig"])] == [0, 1, 1]
    assert other["mig"] == []


def test_a_slow_call_answers_late(driver: Driver) -> None:
    """Such as the first nvmlInit of a GPU without persistence mode."""
    driver.system(slow_ms={"nvmlInit_v2": 400})
    with asking(driver) as program:
        readable, _, _ = select.select([program.stdout], [], [], 0.3)
        output, _ = program.communicate(timeout=30)
    assert readable == []
    assert json.loads(output)["count"] == 8


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo_v2"])
def test_a_call_that_hangs_ends_by_sigkill_only(driver: Driver, function: str) -> None:
    """Nothing is answered, and the caller can still be killed."""
    if function == "nvmlDeviceGetMemoryInfo_v2":
        driver.update(1, hang=(function,))
    else:
        driver.system(hang=(function,))
    with asking(driver) as program:
        readable, _, _ = select.select([program.stdout], [], [], 1.0)
        program.kill()
        assert program.wait(10) == -signal.SIGKILL
    assert readable == []


def await_frozen(freezer: Path, pid: int) -> None:
    """Until the process is in the cgroup and all in it stands still: state D alone may be any wait for a disk."""
    deadline = time.monotonic() + 10
    while (
        str(pid) not in (freezer / "cgroup.procs").read_text().split()
        or "FROZEN" not in (freezer / "freezer.state").read_text()
    ):
        assert time.monotonic() < deadline, f"pid {pid}: not frozen"
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/sys/fs/cgroup/freezer").exists(), reason="needs the freezer of cgroup version 1")
def test_an_unkillable_call_survives_sigkill_until_it_is_thawed(driver: Driver) -> None:
    """Uninterruptible sleep as in the kernel's driver: SIGKILL has to wait."""
    with gpusim.frozen_cgroup() as freezer:
        driver.system(freezer=str(freezer))
        driver.update(0, unkillable=("nvmlDeviceGetMemoryInfo_v2",))
        program = asking(driver)
        await_frozen(freezer, program.pid)
        program.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.5)
        wait_for_state(program, "D")
    assert program.wait(10) == -signal.SIGKILL
    program.communicate()
    assert not freezer.exists()


READER = """
import sys, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
for _ in sys.stdin:
    try:
        used = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used
        print(used, pynvml.nvmlDeviceGetCount(), flush=True)
    except pynvml.NVMLError as error:
        print(error.value, flush=True)
"""


def test_changes_reach_a_program_that_already_runs(driver: Driver) -> None:
    """Memory and errors at the next call; the list of GPUs only with the next nvmlInit, as with the real library."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver.directory)}
    argv = [sys.executable, "-c", READER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, env=environment, **pipes) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        answers = []
        for change in ({}, {"residual_bytes": 5}, {"missing": True}, {"errors": {"nvmlDeviceGetMemoryInfo_v2": 15}}):
            driver.update(0, **change)
            reader.stdin.write("\n")
            reader.stdin.flush()
            answers.append(reader.stdout.readline().split())
    assert answers == [["0", "8"], ["5", "8"], ["5", "8"], ["15"]]


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ((Gpu(uuid="GPU-a", minor=0), Gpu(uuid="GPU-a", minor=1)), "one UUID"),
        ((Gpu(uuid="GPU-a", minor=99),), "minor numbers"),
        ((Gpu(uuid="GPU-a", minor=0, residual_bytes=200 * GIB),), "more memory"),
        ((Gpu(uuid="GPU-a", minor=0, errors={"nvmlDeviceGetMemory": 3}),), "not simulated"),
        ((Gpu(uuid="GPU-a", minor=0, unkillable=("nvmlDeviceGetUUID",)),), "freezer"),
    ],
    ids=["uuid twice", "minor out of range", "too much memory", "misspelt function", "unkillable without a freezer"],
)
def test_a_machine_that_cannot_exist_is_refused(tmp_path: Path, machine: tuple[Gpu, ...], message: str) -> None:
    """A test with a slip in it must fail, not pass on a fault that never happens."""
    with pytest.raises(ValueError, match=message):
        install(tmp_path, machine)


def test_every_simulated_function_is_one_that_the_library_has() -> None:
    """The list that faults are checked against is the library's own."""
    listing = subprocess.run(["nm", "-D", "--defined-only", gpusim.build()], capture_output=True, text=True, check=True)
    symbols = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert symbols - {"nvmlInitWithFlags", "nvmlErrorString"} == gpusim.FUNCTIONS


def test_removal_leaves_no_node_and_no_terminal_buffer(tmp_path: Path) -> None:
    """Opening a node allocates a virtual terminal; it is given back."""
    driver = install(tmp_path, (Gpu(uuid="GPU-last", minor=15),))  # a terminal that no other test opens
    terminal = Path(f"/sys/class/vc/vcs{gpusim.GPU_MINORS[15]}")
    with holder(driver, "--gpu", "0=1"):
        assert terminal.exists()
    driver.remove()
    assert not terminal.exists()
    assert list((tmp_path / "dev").iterdir()) == []
    assert not driver.directory.exists()
