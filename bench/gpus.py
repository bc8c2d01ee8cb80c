"""The GPUs of the machine that the benchmark runs in: simulated ones of tests/gpusim, or real ones through CUDA."""

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
SIMULATED = pathlib.Path("/usr/local/nvidia/lib64")  # where tests/node/machine.py puts the simulated driver
GIB = 1 << 30


def simulated() -> bool:
    """Whether this machine's driver is the simulated one."""
    return (SIMULATED / "gpusim.json").exists()


def library() -> str:
    """The NVML library, for the dynamic linker."""
    return str(SIMULATED / "libnvidia-ml.so.1") if simulated() else "libnvidia-ml.so.1"


def hold(gpu: int, size_bytes: int) -> object:
    """Holds memory in the calling process for as long as the result lives."""
    if simulated():
        from gpusim import holder  # only there; on a real GPU nothing of the tests is needed

        return holder.hold(SIMULATED, pathlib.Path("/dev"), {gpu: size_bytes})
    import cuda

    return cuda.hold(gpu, size_bytes)


@contextlib.contextmanager
def holding(gpu: int, size_bytes: int) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds memory on a GPU; killed at the end of the block."""
    if simulated():
        program = [str(HERE.parent / "tests" / "gpusim" / "holder.py"), "hold", "--dir", str(SIMULATED)]
        argv = [sys.executable, *program, "--gpu", f"{gpu}={size_bytes}"]
    else:
        argv = [sys.executable, str(HERE / "cuda.py"), str(gpu), str(size_bytes)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            if holder.stdout is None or holder.stdout.readline() != "ready\n":
                raise RuntimeError(
                    f"GPU {gpu}: cannot hold {size_bytes} bytes; is there a driver, and is the GPU free?"
                )
            yield holder
        finally:
            holder.kill()
