"""Runs the program in a world that is always faster: before each look at /proc a certain process is there again.

`overtaken.py TITLE ARGUMENTS…`: every `os.listdir("/proc")` first waits until the command line of some process starts with
TITLE. Nothing else about the program is different.
"""

import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 10.0
_POLL_S = 0.001


def main() -> None:
    """Replaces os.listdir and starts the program."""
    title = sys.argv[1].encode()
    os.listdir = _after(title, os.listdir)
    sys.argv = ["cleanslate", *sys.argv[2:]]
    runpy.run_module("cleanslate", run_name="__main__", alter_sys=True)


def _after(title: bytes, listdir: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def listdir_after(path: Any = ".") -> list[Any]:
        deadline = time.monotonic() + DEADLINE_S
        while path == "/proc" and not any(_command_line(pid).startswith(title) for pid in listdir("/proc")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no process {title!r}")
            time.sleep(_POLL_S)
        return listdir(path)

    return listdir_after


def _command_line(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
