"""`python -m cluster.fakenodes`: simulated nodes against a real API server, until SIGINT, SIGTERM or the end of stdin."""

import argparse
import asyncio
import json
import pathlib
import signal
import sys

from cluster.fakenodes import behaviours, control, fleets, kubeconfig, leases

CLEANUP_S = 120.0


def main() -> int:
    """Runs the fleet that the arguments describe. 0: everything was removed again, or --keep."""
    arguments = _parser().parse_args()
    settings = fleets.FleetSettings(
        count=arguments.count,
        prefix=arguments.prefix,
        labels=dict(_pair(text) for text in arguments.label),
        subsets=_subsets(arguments.subset),
        rules=behaviours.from_data(json.loads(arguments.rules.read_text(encoding="utf-8"))) if arguments.rules else (),
        renew_s=arguments.renew_s or leases.interval_s(arguments.count),
        connections=arguments.connections,
    )
    return asyncio.run(_run(arguments, settings))


async def _run(arguments: argparse.Namespace, settings: fleets.FleetSettings) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with fleets.running(kubeconfig.read(arguments.kubeconfig), settings) as fleet:
        work = asyncio.create_task(control.serve(fleet) if arguments.control else _report(fleet))
        await asyncio.wait({work, asyncio.create_task(ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if arguments.keep:
            return 0
        try:
            async with asyncio.timeout(CLEANUP_S):
                await fleet.remove_all()
        except TimeoutError:
            return _complain(
                f"fleet {settings.prefix}: cannot remove all: not done in {CLEANUP_S:.0f} s; {fleet.data()}"
            )
    return 0


async def _report(fleet: fleets.Fleet) -> None:
    """For a person: when the nodes are registered, with the figures; then nothing until a signal comes."""
    took_s = await fleet.wait_registered()
    print(f"{len(fleet.nodes)} nodes registered and usable after {took_s:.1f} s", flush=True)
    print(json.dumps(fleet.data(), indent=2), flush=True)
    await asyncio.Event().wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.fakenodes", description=__doc__)
    add = parser.add_argument
    add("--kubeconfig", type=pathlib.Path, required=True, help="of a cluster administrator; one cluster, one user")
    add("--count", type=int, default=100, help="how many nodes (default: 100)")
    add("--prefix", default="sim", help="nodes are called PREFIX-0000 and so on (default: sim)")
    add("--label", action="append", default=[], metavar="KEY=VALUE", help="a label of every node; may be repeated")
    add(
        "--subset",
        action="append",
        default=[],
        metavar="PATTERN:KEY=VALUE",
        help="a label of the nodes whose name matches, for example 'sim-0*:pool=a'; may be repeated",
    )
    add(
        "--rules",
        type=pathlib.Path,
        metavar="FILE",
        help="JSON: rules as cluster.fakenodes.behaviours.to_data writes them",
    )
    add("--renew-s", type=float, help="interval of lease renewals (default: 5 s up to 250 nodes, 30 s from 1,500 on)")
    add("--connections", type=int, default=fleets.CONNECTIONS, help=f"requests at once (default: {fleets.CONNECTIONS})")
    add("--keep", action="store_true", help="leave nodes and leases in the API at the end")
    add("--control", action="store_true", help="answer questions on stdin (see cluster.fakenodes.control)")
    return parser


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"--label '{text}': cannot parse: no '='; write for example pool=a")
    return key, value


def _subsets(texts: list[str]) -> dict[str, dict[str, str]]:
    subsets: dict[str, dict[str, str]] = {}
    for text in texts:
        pattern, _, label = text.partition(":")
        key, value = _pair(label)
        subsets.setdefault(pattern, {})[key] = value
    return subsets


def _complain(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
