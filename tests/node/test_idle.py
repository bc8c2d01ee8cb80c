"""`cleanslate idle`: what a reset pod's main container does while its results are read."""

import signal
import sys

import pytest

from node.machine import Machine

MARGIN_KB = 4096


def resident_kb(machine: Machine, pid: int) -> int:
    status = machine.run("cat", f"/proc/{pid}/status").stdout
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


def await_waiting(machine: Machine, pid: int) -> None:
    """Until it stands in the kernel's sigtimedwait."""
    machine.wait_until(lambda: "sigtimedwait" in machine.run("cat", f"/proc/{pid}/wchan").stdout, "its waiting")


@pytest.mark.parametrize("first_of_a_container", [False, True], ids=["by hand", "in a pod"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_ends_at_a_signal_with_success(machine: Machine, number: int, first_of_a_container: bool) -> None:
    """A pod that is deleted goes at once, also where the program is PID 1, to which SIGTERM means nothing by itself."""
    command = (sys.executable, "-m", "cleanslate", "idle")
    with machine.popen(*command, container=first_of_a_container) as idle:
        await_waiting(machine, idle.pid)
        idle.kill(number)
        assert idle.wait(5) == 0


def test_idle_is_hardly_more_than_an_interpreter(machine: Machine) -> None:
    """It waits for days on every node that is being reset, and loads nothing to do so."""
    with machine.popen(sys.executable, "-c", "import signal; signal.pause()") as bare:
        with machine.popen(sys.executable, "-m", "cleanslate", "idle") as idle:
            await_waiting(machine, idle.pid)
            assert resident_kb(machine, idle.pid) < resident_kb(machine, bare.pid) + MARGIN_KB
            idle.kill(signal.SIGTERM)
            idle.wait(5)
        bare.kill(signal.SIGTERM)
