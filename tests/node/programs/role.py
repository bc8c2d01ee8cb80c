"""One process that calls itself something and may hold simulated GPUs: a worker, an impostor, a program that never dies.

Prints its pid (of its PID namespace) when it is what it was told to be, and stays until a signal ends it.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import namespaces
import setproctitle

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gpusim import holder


def main() -> None:
    """Becomes what the options say."""
    options = _parse()
    if options.title:
        setproctitle.setproctitle(options.title)
    if options.comm:
        namespaces.set_comm(options.comm)
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    amounts = dict.fromkeys(options.gpu, options.gpu_bytes)
    held = holder.hold(Path(options.driver), Path("/dev"), amounts) if amounts else None
    print(os.getpid(), flush=True)
    _storm(options.storm)
    _stay(held)


def _stay(_: object) -> None:
    while True:
        signal.pause()


def _storm(width: int) -> None:
    """Forks without a pause until it has so many children, and replaces each that dies, for ever."""
    children: set[int] = set()
    while width:
        if len(children) >= width:
            children.discard(os.wait()[0])
        child = os.fork()
        if child == 0:
            _stay(None)
        children.add(child)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--title")
    parser.add_argument("--comm")
    parser.add_argument("--driver", default="")
    parser.add_argument("--gpu", type=int, action="append", default=[])
    parser.add_argument("--gpu-bytes", type=int, default=1 << 30)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--storm", type=int, default=0, help="fork, and keep so many children alive")
    return parser.parse_args()


if __name__ == "__main__":
    main()
