"""Builds the simulated library from the C files beside this one."""

import hashlib
import platform
import secrets
import shutil
import subprocess
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"


def build(*, memory_v2: bool = True) -> Path:
    """Compile the library once for these sources and return its path; `memory_v2=False`: one older than R510.

    Kept below ~/.cache/cleanslate/gpusim by the hash of what it is made of. Raises RuntimeError without a C compiler.
    """
    here = Path(__file__).resolve().parent
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    flags += ["-Wl,--version-script=exports.map"] + ([] if memory_v2 else ["-DNO_MEMORY_V2"])
    sources = sorted(path for path in here.iterdir() if path.suffix in {".c", ".h", ".map"})
    key = hashlib.sha256(repr((platform.machine(), platform.libc_ver(), flags)).encode())
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    built = Path.home() / ".cache" / "cleanslate" / "gpusim" / key.hexdigest()[:32] / LIBRARY
    if not built.exists():
        _compile(here, flags, [path.name for path in sources if path.suffix == ".c"], built)
    return built


def build_program(source: Path, *, library: bool = False) -> Path:
    """Compile one C file, kept below ~/.cache/cleanslate/programs by its hash; `library`: to a shared one. Raises as `build`."""
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"] + (["-shared", "-fPIC"] if library else [])
    key = hashlib.sha256(repr((platform.machine(), platform.libc_ver(), flags)).encode() + source.read_bytes())
    built = Path.home() / ".cache" / "cleanslate" / "programs" / key.hexdigest()[:32] / source.stem
    if not built.exists():
        _compile(source.parent, flags, [source.name], built)
    return built


def _compile(here: Path, flags: list[str], sources: list[str], built: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError(f"gpusim: cannot build {built.name}: no C compiler 'cc'; install one, as gcc")
    built.parent.mkdir(parents=True, exist_ok=True)
    draft = built.with_name(f".{secrets.token_hex(8)}.so")
    done = subprocess.run([compiler, *flags, "-o", draft, *sources], cwd=here, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"gpusim: cannot build {built.name}: {done.stderr}")
    draft.rename(built)
