"""Runs the program with a stop at one of its calls, so that the world can change at exactly that moment.

`paused.py MODULE.FUNCTION COUNT ARGUMENTS…`: before the COUNTth call of that function of the standard library it makes
/run/paused and waits until something is written to the FIFO /run/go. Nothing else about the program is different.
"""

import importlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

REACHED, GO = "/run/paused", "/run/go"


def main() -> None:
    """Replaces the function by one that stops once, and starts the program."""
    where, count, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    module_name, _, name = where.rpartition(".")
    module = importlib.import_module(module_name)
    setattr(module, name, _stopping(getattr(module, name), count))
    sys.argv = ["cleanslate", *arguments]
    runpy.run_module("cleanslate", run_name="__main__", alter_sys=True)


def _stopping(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    calls = 0

    def stop_once(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            open(REACHED, "w").close()
            with open(GO) as go:
                go.read()
        return function(*arguments, **named)

    return stop_once


if __name__ == "__main__":
    main()
