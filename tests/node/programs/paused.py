"""Runs the program with a stop before one of its calls, so that the world can change at exactly that moment.

`paused.py MODULE.FUNCTION PID ARGUMENTS…`: before the first call of that function of the standard library that is about the
process PID (given as pid or as pidfd; 0: any call) it makes /run/paused and waits for the FIFO /run/go to be written.
Nothing else about the program is different.
"""

import importlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

REACHED, GO = "/run/paused", "/run/go"


def main() -> None:
    """Replaces the function by one that stops once, and starts the program."""
    where, pid, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    module_name, _, name = where.rpartition(".")
    module = importlib.import_module(module_name)
    setattr(module, name, _stopping(getattr(module, name), pid))
    sys.argv = ["cleanslate", *arguments]
    runpy.run_module("cleanslate", run_name="__main__", alter_sys=True)


def _stopping(function: Callable[..., Any], pid: int) -> Callable[..., Any]:
    waiting = True

    def stop_once(*arguments: Any, **named: Any) -> Any:
        nonlocal waiting
        if waiting and (pid == 0 or pid in {arguments[0], _pid_of(arguments[0])}):
            waiting = False
            open(REACHED, "w").close()
            with open(GO) as go:
                go.read()
        return function(*arguments, **named)

    return stop_once


def _pid_of(pidfd: Any) -> int | None:
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith("Pid:")), None)
    except OSError:
        return None


if __name__ == "__main__":
    main()
