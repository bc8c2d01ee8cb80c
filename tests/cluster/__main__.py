"""`python -m cluster up | down | build | images`: what `make` calls; `images` prints each reference and its archive."""

import argparse
import os
import sys
import time

from cluster import binaries, cluster, images, packages, places, taking_down
from cluster.places import Place


def main() -> int:
    """Returns the exit code."""
    asked = _parse()
    place = Place(name=asked.name)
    if asked.verb == "down" and not taking_down.exists(place):
        return 0
    if os.geteuid() != 0:
        print("test cluster: cannot make namespaces: not root; run it with sudo", file=sys.stderr)
        return 1
    try:
        return {"up": _up, "down": _down, "build": _build, "images": _images}[asked.verb](place, asked.nodes)
    except cluster.ClusterError as error:
        print(f"{error}; `make cluster-down` removes it", file=sys.stderr)
    except (binaries.BuildError, packages.MissingError, taking_down.StuckError, RuntimeError) as error:
        print(error, file=sys.stderr)
    return 1


def _build(_: Place, nodes: int) -> int:
    cluster.build(nodes)
    return 0


def _images(*_: object) -> int:
    for name in images.NAMES:
        print(images.reference(name), images.archive(name))
    return 0


def _up(place: Place, nodes: int) -> int:
    started = time.monotonic()
    running = cluster.start(place, nodes)
    took = time.monotonic() - started
    names = ", ".join(running.nodes) or "no nodes"
    print(f"test cluster: {names}: ready in {took:.1f} s; `make cluster-down` ends it", file=sys.stderr)
    print(f"export KUBECONFIG={running.kubeconfig} PATH={running.kubectl.program.parent}:$PATH")
    return 0


def _down(place: Place, _: int) -> int:
    cluster.stop(place)
    print(f"test cluster: down; what was built stays in {places.build_cache()}", file=sys.stderr)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster", description="The test cluster of this checkout.")
    parser.add_argument("verb", choices=["build", "up", "down", "images"])
    parser.add_argument("--name", default="main", help="one of several clusters of this checkout (default main)")
    parser.add_argument("--nodes", type=int, default=cluster.NODES, help="real nodes (default %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
