"""Builds a machine for one test and takes it away again when the test's end of the lifeline closes, however the test ended.

`guardian.py SPEC CONTROL`: SPEC is JSON with `name`, `init`, `own` (directories to cover with a tmpfs of the machine's own) and
`keep` (paths that stay visible there); CONTROL is the descriptor of the agent's socket. Standard input is the lifeline.
Prints the host's pid of the machine's PID 1 and, from inside, `ready`. Exits 0 only if nothing is left of it.
"""

import json
import os
import pathlib
import select
import signal
import socket
import sys
import time
import traceback

import agent
import cgroups
import namespaces

KILL_DEADLINE_S = 10.0
_THAW_AGAIN_MS = 50  # a process may be frozen between two looks


def main() -> int:
    """The guardian stays outside; its only child is the machine's PID 1."""
    spec, control = json.loads(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, whose end closes the lifeline
    groups = cgroups.Cgroups(spec["name"], cgroups.MACHINE)
    groups.make()
    try:
        namespaces.unshare(namespaces.NEWPID)
        first = os.fork()
        if first == 0:
            _first_process(spec, control, groups)
        os.close(control)
        os.write(1, b"%d\n" % first)
        os.close(1)
        return _watch(first, groups)
    finally:
        groups.remove()


def _watch(first: int, groups: cgroups.Cgroups) -> int:
    """Ends PID 1 when the lifeline closes. Returns 0, or 1 if PID 1 ended by itself before that."""
    pidfd = os.pidfd_open(first)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(0, select.POLLHUP)
    early = (pidfd, select.POLLIN) in poll.poll()
    deadline = time.monotonic() + KILL_DEADLINE_S
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # it is ours and not yet waited for: the pid is still its own
    poll.unregister(0)
    while not poll.poll(_THAW_AGAIN_MS):
        groups.thaw()
        if time.monotonic() > deadline:
            raise TimeoutError(f"pid {first}, first of a machine: still there {KILL_DEADLINE_S:.0f} s after SIGKILL")
    os.waitpid(first, 0)
    return int(early)


def _first_process(spec: dict, control: int, groups: cgroups.Cgroups) -> None:
    """PID 1: makes the machine around itself, starts the agent, then is the init that was asked for. Never returns."""
    try:
        namespaces.die_with_parent(signal.SIGKILL)
        groups.enter()
        namespaces.unshare(namespaces.NEWCGROUP | namespaces.NEWNS | namespaces.NEWIPC)
        _furnish(spec, groups.hierarchies)
        ready = os.dup(1)
        _leave_stdio()
        if os.fork() == 0:
            os.close(ready)
            os.setsid()
            agent.serve(socket.socket(fileno=control))
        os.close(control)
        os.write(ready, b"ready\n")
        os.close(ready)
        INITS[spec["init"]]()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _furnish(spec: dict, hierarchies: list[cgroups.Hierarchy]) -> None:
    namespaces.own_mounts()
    namespaces.mount("proc", "/proc", "proc", namespaces.NOSUID_NODEV_NOEXEC)
    tini = pathlib.Path(spec["tini"]).read_bytes()  # before its place is covered
    for directory in spec["own"]:
        namespaces.cover(directory, spec["keep"], mode="1777" if directory == "/tmp" else "755")
    pathlib.Path("/run/tini").write_bytes(tini)
    os.chmod("/run/tini", 0o755)
    namespaces.cover("/proc/driver", ())
    namespaces.own_devices()
    namespaces.cover("/sys/fs/cgroup", ())
    for one in hierarchies:
        os.mkdir(f"/sys/fs/cgroup/{one.name}")
        namespaces.mount(one.kind, f"/sys/fs/cgroup/{one.name}", one.kind, 0, one.options)


def _leave_stdio() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _python() -> None:
    """A program of any kind that collects every child. Without any it waits to be ended: the agent may go first."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()


def _careless() -> None:
    """An init that collects no child: a program that was never meant to be PID 1."""
    while True:
        signal.pause()


def _bash() -> None:
    """A shell as PID 1, busy with a `read` that never ends; it collects children sooner or later."""
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    os.set_inheritable(writer, True)
    os.execv("/bin/bash", ["/bin/bash", "-c", f"read -r line <&{reader}; exit"])


def _tini() -> None:
    """An init as the kernel shows it: an executable of that name."""
    os.execv("/run/tini", ["/run/tini"])


INITS = {"tini": _tini, "bash": _bash, "python": _python, "careless": _careless}

if __name__ == "__main__":
    sys.exit(main())
