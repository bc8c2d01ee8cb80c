"""`make bench`: every benchmark in a place of its own, and one table of the ratios, kept in bench/results/."""

import argparse
import compileall
import datetime as dt
import json
import os
import pathlib
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable

import psutil
import pynvml

from figures import Figure

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent

EVERYWHERE = ("survey", "shared_memory", "gate")
REAL_ONLY = ("reset",)
ON_CLUSTER = ("cluster_reset", "cluster_calls")  # which makes its own nodes, GPUs and namespaces
DEFAULT = "(default: those that need no cluster)"
DRIVER_VERSION = pathlib.Path("/proc/driver/nvidia/version")
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'initcontainer'}:{ROOT / 'operator'}:{ROOT / 'tests'}"}
PRIVATE_SHM = 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "$@"'
LIMIT_S = 900


def in_simulated_machine(script: str) -> tuple[int, str, str]:
    """Runs a benchmark in a machine of tests/node with two simulated GPUs."""
    sys.path.insert(0, str(ROOT / "tests"))
    from gpusim import hardware
    from node import machine  # the harness is needed here only

    with machine.Machine(gpus=hardware.gpus(2)) as place:
        done = place.run(sys.executable, str(HERE / script), env=ENVIRONMENT, timeout=LIMIT_S)
    return done.returncode, done.stdout, done.stderr


def on_real_machine(script: str) -> tuple[int, str, str]:
    """Runs a benchmark on this machine's GPUs, with a /dev/shm of its own."""
    argv = ["unshare", "--mount", "sh", "-c", PRIVATE_SHM, "sh", sys.executable, str(HERE / script)]
    done = subprocess.run(
        argv, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    return done.returncode, done.stdout, done.stderr


def on_cluster(script: str) -> tuple[int, str, str]:
    """Runs a benchmark that starts a test cluster of its own, which touches nothing of this machine."""
    argv = [sys.executable, str(HERE / script)]
    done = subprocess.run(
        argv, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    return done.returncode, done.stdout, done.stderr


def runner(name: str, *, real: bool) -> Callable[[str], tuple[int, str, str]]:
    """Where a benchmark runs."""
    if name in ON_CLUSTER:
        return on_cluster
    return on_real_machine if real else in_simulated_machine


def measure(name: str, *, real: bool) -> list[Figure]:
    """The figures of one benchmark; an unfinished one says so in its line."""
    print(f"bench: {name} …", file=sys.stderr, flush=True)
    code, out, err = runner(name, real=real)(f"{name}.py")
    figures = [Figure(**json.loads(line)) for line in out.splitlines() if line.startswith("{")]
    if code != 0:
        print(err[-8000:], file=sys.stderr)
        reason = (err.strip().splitlines() or ["no message"])[-1]
        figures.append(Figure(what=f"{name}: not finished", ours="-", met=False, note=reason[:400]))
    return figures


def heading(*, real: bool) -> str:
    """Date, machine and driver."""
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    driver = gpu_names() if real else "GPUs: SIMULATED (tests/gpusim)"
    system = f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    system += f", load {os.getloadavg()[0]:.1f}"
    return f"Clean Slate, benchmarks of {now}\n{system}\n{driver}\n"


def gpu_names() -> str:
    """What nvidia-smi says of the GPUs."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return "GPUs: " + "; ".join(subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines())


def table(figures: list[Figure]) -> str:
    """A block of lines for each figure, wide ones wrapped."""
    blocks = []
    for figure in figures:
        verdict = {True: "met", False: "NOT MET", None: "-"}[figure.met]
        rows = [figure.what, f"    ours    {figure.ours}"]
        rows += [f"    theirs  {figure.theirs}: {figure.against}"] if figure.theirs != "-" else []
        rows += [f"    ratio   {figure.ratio}"] if figure.ratio != "-" else []
        rows += [f"    goal    {figure.goal}: {verdict}"]
        rows += textwrap.wrap(figure.note, 112, initial_indent="    note    ", subsequent_indent="            ")
        blocks.append("\n".join(rows))
    return "\n".join(blocks) + "\n"


def compile_all() -> None:
    """Bytecode of the program and of what it imports, as pip leaves it: some machines have Python write none."""
    compileall.compile_dir(ROOT / "initcontainer" / "cleanslate", quiet=1)
    for module in (pynvml, psutil):
        compileall.compile_dir(pathlib.Path(module.__file__).parent, maxlevels=0, quiet=1)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "benchmarks", nargs="*", help=f"some of {', '.join(EVERYWHERE + REAL_ONLY + ON_CLUSTER)} {DEFAULT}"
    )
    parser.add_argument(
        "--i-own-this-machine",
        action="store_true",
        help="run on the real GPUs: they must be idle, and every leftover on this machine may be removed",
    )
    return parser.parse_args()


def main() -> int:
    """Exit 0 when everything could be measured, met or not."""
    asked = parse()
    on_cluster_alone = bool(asked.benchmarks) and set(asked.benchmarks) <= set(ON_CLUSTER)
    real = DRIVER_VERSION.exists() and not on_cluster_alone
    if real and not asked.i_own_this_machine:
        print(
            "bench: cannot run: this machine has real GPUs, and the benchmark resets them; give --i-own-this-machine",
            file=sys.stderr,
        )
        return 2
    compile_all()
    names = asked.benchmarks or [*EVERYWHERE, *(REAL_ONLY if real else ())]
    figures = [figure for name in names for figure in measure(name, real=real)]
    text = heading(real=real) + "\n" + table(figures)
    print(text)
    kind = "cluster" if on_cluster_alone else "gpu" if real else "simulated"
    path = HERE / "results" / f"{dt.datetime.now(dt.UTC):%Y-%m-%d-%H%M}-{kind}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    unfinished = [figure for figure in figures if figure.ours == "-"]
    missed = sum(figure.met is False for figure in figures)
    print(f"bench: {len(figures)} figures, {missed} below their goal; kept in {path.relative_to(ROOT)}")
    return 1 if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
