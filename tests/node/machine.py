"""A machine of its own for each test: PID, mount, IPC and cgroup namespaces, so that a test reaches only what it made.

Inside, `/proc` shows the machine's processes alone, `/dev`, `/dev/shm`, `/run`, `/tmp`, `/var/lib`, the home directory and
`/proc/driver` are its own, and the cgroup paths in `/proc/PID/cgroup` are exactly those that the test made. The program runs in
it unchanged. Whatever becomes of the test, a guardian outside takes the whole machine away (`programs/guardian.py`).
"""

import contextlib
import json
import os
import secrets
import select
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from gpusim import building, gpusim
from node.processes import Processes
from node.result import Result
from node.running import Running

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
START_DEADLINE_S = 20.0
DRIVER_DIRECTORY = "/usr/local/nvidia/lib64"  # where container runtimes of the large clouds put the real one
_REAL_DRIVERS = ("usr/lib/*/libnvidia-ml.so*", "usr/lib/libnvidia-ml.so*", "usr/lib64/libnvidia-ml.so*")
_MS_BIND = 0x1000
_OWN = ("/run", "/var/lib", "/tmp")


class Machine(Processes):
    """A machine; a context manager. `gpus`: simulated ones (gpusim.gpus(n)), or None for a machine without a driver.

    `init` is its PID 1: "tini", "bash", "python" (another program, which collects children) or "careless" (collects
    none). Pids are the machine's own everywhere. Start-up takes about 0.1 s.
    """

    def __init__(self, *, init: str = "tini", gpus: Sequence[Any] | None = None) -> None:
        self._init = init
        self._gpus = gpus
        self._lock = threading.Lock()
        self.name = f"cleanslate-test-{secrets.token_hex(6)}"
        self.driver: Any = None

    def __enter__(self) -> Self:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(self._control.close)
            self._guardian = _start_guardian(self._spec(), theirs.fileno())
            undo.callback(self.close)
            self.first_pid_outside = self._await_start()
            self._hide_real_driver()
            if self._gpus is not None:
                self._install_driver(self._gpus)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the machine away. Raises RuntimeError if anything of it is left, or if it ended by itself."""
        self._control.close()
        _, said = self._guardian.communicate()
        if self._guardian.returncode != 0:
            raise RuntimeError(f"machine {self.name}: did not end well: {said}")

    def run(
        self,
        *argv: str,
        input: str | None = None,  # noqa: A002 - as subprocess.run calls it
        timeout: float = 60,
        **how: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end, as subprocess.run does. `how`: see `popen`. Raises TimeoutError, the program killed."""
        with self.popen(*argv, stdin=input is not None, **how) as running:
            out, err = running.communicate(input, timeout)
            return subprocess.CompletedProcess(argv, running.wait(timeout), out, err)

    def popen(
        self,
        *argv: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        cgroup: str | None = None,
        user: int | None = None,
        new_session: bool = False,
        container: bool = False,
        inside: int | None = None,
        pid: int | None = None,
        stdin: bool = False,
    ) -> Running:
        """Starts a program in the machine. Raises OSError if it cannot be started.

        `env` adds to the environment; `cgroup` is a path that `cgroup()` has made, or makes it; `user` a uid without any right.
        `container` gives it PID, mount and IPC namespaces of its own, with PID 1, `/proc` and `/dev/shm`; `inside` joins those of
        a pid. `pid` forces the pid (the next free one from there). Without `stdin`, standard input is empty.
        """
        request = {
            "argv": [os.fspath(word) for word in argv],
            "env": self.environment(measured=user is None) | dict(env or {}),
            "cwd": cwd or os.getcwd(),
            "cgroups": self.cgroup(cgroup) if cgroup else [],
            "user": user,
            "session": new_session,
            "container": container,
            "inside": inside,
            "pid": pid,
        }
        return Running.start(self, request, stdin=stdin)

    def container(self, *argv: str, cgroup: str, **how: Any) -> Running:
        """Starts a program as the first process of a container: see `popen`."""
        return self.popen(*argv, cgroup=cgroup, container=True, **how)

    def python(self, *argv: str, **how: Any) -> Running:
        """Starts a program of `programs/` under the tests' Python."""
        return self.popen(sys.executable, str(PROGRAMS / argv[0]), *argv[1:], **how)

    def cleanslate(self, *arguments: str, under: Sequence[str] = (), **how: Any) -> Result:
        """Runs the program for its report, which is checked against the schema. `under`: a command that starts it."""
        return Result.of(self.run(*under, *program(*arguments), **how))

    def start_cleanslate(self, *arguments: str, **how: Any) -> Running:
        """Starts the program and does not wait for it; `Result.of(running.completed())` reads its report."""
        return self.popen(*program(*arguments), **how)

    def path(self, path: str | os.PathLike[str]) -> Path:
        """The machine's file `path` as a path of the test's own."""
        return Path(f"/proc/{self.first_pid_outside}/root/{os.fspath(path).lstrip('/')}")

    def names(self, directory: str = "/dev/shm") -> set[str]:
        """The names in a directory of the machine."""
        return set(os.listdir(self.path(directory)))

    def signal(self, pid: int, number: int) -> None:
        """Sends a signal."""
        self.ask("signal", pid=pid, signal=number)

    def mount(self, source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
        """mount(2) in the machine."""
        self.ask("mount", arguments=[source, target, kind, flags, data])

    def cgroup(self, path: str) -> list[str]:
        """Makes the cgroup `path`, as it then reads in /proc/PID/cgroup; returns its directories inside the machine.

        A prefix `pids:`, `systemd:` or `unified:` makes it in that hierarchy alone, as on a host with only one version.
        """
        only, _, path = ("", "", path) if path.startswith("/") else path.partition(":")
        names = [only] if only else sorted(self.names("/sys/fs/cgroup") - {"freezer"})
        directories = [f"/sys/fs/cgroup/{name}{path}" for name in names]
        for directory in directories:
            self.path(directory).mkdir(parents=True, exist_ok=True)
        return directories

    @contextlib.contextmanager
    def frozen(self, *pids: int) -> Iterator[None]:
        """Holds processes in uninterruptible sleep (D), in which SIGKILL has to wait, until the end of the block."""
        state = self.freeze(*pids)
        try:
            yield
        finally:
            state.write_text("THAWED")

    def freeze(self, *pids: int) -> Path:
        """Puts processes into uninterruptible sleep by version 1's freezer: they wake by "THAWED" in the file returned."""
        group = f"/sys/fs/cgroup/freezer/frozen-{secrets.token_hex(4)}"
        self.path(group).mkdir()
        for pid in pids:
            self.ask("write", path=f"{group}/cgroup.procs", text=str(pid))
        state = self.path(group) / "freezer.state"
        state.write_text("FROZEN")
        self.wait_until(lambda: "FROZEN" in state.read_text(), f"{pids} to stand still")
        self.wait_until(lambda: {self.state(pid) for pid in pids} == {"D"}, f"D state of {pids}")
        return state

    def freezable(self) -> bool:
        """Whether the host has version 1's freezer, which `frozen` needs."""
        return self.path("/sys/fs/cgroup/freezer").exists()

    def environment(self, *, measured: bool = True) -> dict[str, str]:
        """What programs in the machine start with: the test's own environment without Clean Slate's and pytest's settings.

        Unless `measured`, also without those of pytest-cov: a user without rights cannot write what was covered.
        """
        aside = ("CLEANSLATE_", "PYTEST_") if measured else ("CLEANSLATE_", "PYTEST_", "COV_")
        return {key: text for key, text in os.environ.items() if not key.startswith(aside)}

    def _spec(self) -> dict[str, Any]:
        kept = {str(ROOT), os.getcwd(), sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))}
        tini = str(building.build_program(PROGRAMS / "tini.c"))
        return {"name": self.name, "init": self._init, "tini": tini, "own": [*_OWN, "/root"], "keep": sorted(kept)}

    def _await_start(self) -> int:
        """The host's pid of PID 1, once the guardian has told it and PID 1 has said that it is ready."""
        said, stream = b"", self._guardian.stdout.fileno()
        while said.count(b"\n") < 2:
            ready, _, _ = select.select([stream], [], [], START_DEADLINE_S)
            chunk = os.read(stream, 256) if ready else b""
            if not chunk:
                raise RuntimeError(f"machine {self.name}: cannot start")
            said += chunk
        return int(next(filter(bytes.isdigit, said.split())))

    def _hide_real_driver(self) -> None:
        """Takes the host's own NVML out of the machine's sight, on a host that has one: an overlay with whiteouts."""
        found = {path.parent.resolve() / path.name for pattern in _REAL_DRIVERS for path in Path("/").glob(pattern)}
        for number, folder in enumerate(sorted({path.parent for path in found})):
            upper = f"/run/hidden/{number}/upper"
            self.path(upper).mkdir(parents=True)
            self.path(f"/run/hidden/{number}/work").mkdir()
            for path in found:
                if path.parent == folder:
                    os.mknod(self.path(f"{upper}/{path.name}"), stat.S_IFCHR, os.makedev(0, 0))
            layers = f"lowerdir={folder},upperdir={upper},workdir=/run/hidden/{number}/work"
            self.mount("overlay", str(folder), "overlay", 0, layers)

    def _install_driver(self, gpus: Sequence[Any]) -> None:
        """The simulated driver where the program finds it by itself: library, device nodes, /proc/driver, /proc/devices."""
        self.ask("cover", directory="/usr/local", keep=[f"/usr/local/{name}" for name in os.listdir("/usr/local")])
        library = self.path(DRIVER_DIRECTORY)
        library.mkdir(parents=True)
        self.driver = gpusim.Driver.install(library, self.path("/dev"), gpus)
        self.driver.proc_driver(self.path("/proc/driver/nvidia"))
        self.path("/run/devices").write_text(self.driver.proc_devices())
        self.mount("/run/devices", "/proc/devices", None, _MS_BIND)

    def ask(self, do: str, descriptors: Sequence[int] = (), **request: Any) -> Any:
        """One request to the agent inside (`programs/agent.py`). Raises the OSError that it met."""
        with self._lock:
            socket.send_fds(self._control, [json.dumps({"do": do, **request}).encode()], list(descriptors))
            answer = json.loads(self._control.recv(1 << 16) or b'{"error": "the machine has ended"}')
        if "error" in answer:
            raise OSError(answer.get("errno"), answer["error"])
        return answer["value"]


def program(*arguments: str) -> tuple[str, ...]:
    """The program's command line, for a report as JSON."""
    return (sys.executable, "-m", "cleanslate", *arguments, "--output", "json")


def _start_guardian(spec: dict[str, Any], control: int) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-S", "-E", "-s", str(PROGRAMS / "guardian.py"), json.dumps(spec), str(control)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(argv, pass_fds=[control], start_new_session=True, text=True, **pipes)
