"""`make demo`: a server dies in a pod and leaves its GPUs in use; `kubectl apply -f reset.yaml` makes the node clean.

Every command that does something is shown before it runs. What it shows is what they print.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from typing import Any

import clusters
from cluster import installed
from cluster.binaries import BuildError
from cluster.cluster import ClusterError
from cluster.kubectl import KubectlError
from cluster.own import RefusedError
from clusters import Ground
from node_demo import bold, say, step

SPACE = "cleanslate-demo"
DEAD, LIVE = "dead-server", "live-server"
# No reset ends what began since the cluster was last sure about the node: 5 s, and up to 10 s between a kubelet's signs of life.
OLD_ENOUGH_S = 16.0
END_S = 120.0
ENDED = ("Complete", "Failed")
PROCESSES = ("pid", "title", "owner", "verdict", "outcome", "reason")
GPUS = ("index", "uuid", "result", "usedBytes")
WIDTH = 60
Object = dict[str, Any]


class DemoError(RuntimeError):
    """A command that did not do what the story needs."""


def show(place: Ground, program: str, *arguments: str, lines: slice = slice(None)) -> str:
    """Shows a command, runs it, shows these lines of what it prints, returns all of it. Raises DemoError."""
    shown = shlex.join((program, *place.context(program), *arguments))
    say(f"   $ {shown}")
    done = place.run(program, *arguments)
    if done.returncode != 0:
        raise DemoError(f"{shown}: exit {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    for line in done.stdout.splitlines()[lines]:
        say(f"   {line}"[: columns()])
    return done.stdout


def columns() -> int:
    """The terminal's width; lines are cut there, since wrapped tables can't be read."""
    return os.get_terminal_size().columns if sys.stdout.isatty() else 200


def tabulate(head: tuple[str, ...], rows: list[Object]) -> None:
    """Fields of a status as a table."""
    cells = [[name.upper() for name in head]]
    cells += [[cut(row.get(name, "-"), WIDTH) for name in head] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        words = (word.ljust(width) for word, width in zip(row, widths, strict=True))
        say(f"   {'  '.join(words)}".rstrip()[: columns()])


def cut(value: object, width: int) -> str:
    """As text, at most so wide."""
    text = str(value) or "-"
    return text if len(text) <= width else f"{text[: width - 1]}…"


def start_servers(place: Ground) -> Object:
    """Two alike; what the one says of itself that will die."""
    step(
        1,
        f"Two vLLM-shaped servers on {place.node}, with two GPUs each: a front end, an engine, two workers, shared memory.",
    )
    place.run("kubectl", "delete", "namespace", SPACE, "--ignore-not-found")
    show(place, "kubectl", "apply", "-f", "build/demo/servers.yaml")
    show(
        place, "kubectl", "wait", "--for=condition=Ready", "pods", "--all", "-n", SPACE, "--timeout=60s", lines=slice(0)
    )
    told = place.kubectl.within(SPACE).first_line("logs", DEAD, "--follow")
    place.kubectl.within(SPACE).first_line("logs", LIVE, "--follow")
    say(f"   {DEAD} says: {told}")
    return dict(json.loads(told))


def kill_front_end(place: Ground, front_end: int) -> None:
    """As the kernel does when memory runs out. Kubernetes sees nothing of it."""
    step(
        2,
        f"The front end of {DEAD} is killed, as when memory runs out. The rest lives on, and Kubernetes sees nothing of it.",
    )
    show(place, "kubectl", "exec", "-n", SPACE, DEAD, "--", "kill", "-KILL", str(front_end))
    show(place, "kubectl", "get", "pods", "-n", SPACE, "-o", "wide")
    show(place, "kubectl", "exec", "-n", SPACE, DEAD, "--", "ls", "/dev/shm")


def install(place: Ground) -> None:
    """The chart, with the images that are on the nodes."""
    step(3, "Clean Slate is installed: its CRD and two replicas of its operator.")
    values = ("--values", "build/demo/values.yaml")
    show(place, "helm", "upgrade", "--install", "cleanslate", "charts/cleanslate", "--wait", *values, lines=slice(4))
    show(place, "kubectl", "get", "pods", "-n", "cleanslate-system")


def await_age(since: float) -> None:
    """Until the leftovers are old enough to be somebody's who is dead."""
    left_s = since + OLD_ENOUGH_S - time.monotonic()
    if left_s > 0:
        say(f"   (what is younger than about {OLD_ENOUGH_S:.0f} s is nobody's leftover: {left_s:.0f} s to wait)")
        time.sleep(left_s)


def reset(place: Ground) -> str:
    """Applies the reset and follows it to its end; its last phase."""
    step(4, "The reset: one object that names the node.")
    place.run("kubectl", "delete", "gnr", place.node, "--ignore-not-found")
    begun = time.monotonic()
    show(place, "kubectl", "apply", "-f", clusters.reset_file(place))
    phase = follow(place, begun)
    show(place, "kubectl", "get", "gnr", place.node, "-o", "wide")
    if phase not in ENDED:
        logs = "kubectl logs -n cleanslate-system -l app.kubernetes.io/component=operator"
        raise DemoError(f"gnr {place.node}: has not ended in {END_S:.0f} s; {logs}")
    return phase


def follow(place: Ground, begun: float) -> str:
    """`kubectl get --watch` until the reset has ended; each line with the seconds since it was applied."""
    argv = ("get", "gnr", place.node, "--watch")
    say(f"   $ {shlex.join(('kubectl', *place.context('kubectl'), *argv))}")
    phase = ""
    with subprocess.Popen(
        place.command("kubectl", *argv), env=place.environment, stdout=subprocess.PIPE, text=True
    ) as watch:
        limit = threading.Timer(END_S, watch.kill)
        limit.start()
        for line in watch.stdout or ():
            words = line.split()
            say(
                f"   {time.monotonic() - begun:4.1f} s  {line.rstrip()}"
                if words[0] != "NAME"
                else f"           {line.rstrip()}"
            )
            phase = words[1] if len(words) > 1 else phase
            if phase in ENDED:
                break
        limit.cancel()
        watch.kill()
    return phase


def show_result(place: Ground) -> Object:
    """What the status says of the node; the result itself."""
    step(5, "What became of the node: what was ended and why, what was kept and why, and every GPU as measured.")
    say(f"   status.results of `kubectl get gnr {place.node} -o yaml`, as tables:")
    found = place.kubectl.get("gnr", place.node)["status"]["results"][0]
    head = f"{found['node']}: {found['result']} in {found.get('durationSeconds', '?')} s: {found.get('message', '')}"
    say(f"   {head}"[: columns()])
    show(place, "kubectl", "get", "pods", "-n", SPACE, "-o", "custom-columns=NAME:.metadata.name,UID:.metadata.uid")
    tabulate(PROCESSES, found.get("processes", []))
    tabulate(GPUS, found.get("gpus", []))
    say(f"   shared memory: {json.dumps(found.get('sharedMemory', {}))}")
    described = place.run("kubectl", "describe", "gnr", place.node).stdout
    say(f"   $ kubectl describe gnr {place.node}   (its end)")
    for line in described[described.find("Events:") :].splitlines():
        say(f"   {line}"[: columns()])
    return dict(found)


def look_again(place: Ground) -> tuple[str, str, int]:
    """What lies in the shared memory of the two, and how often the live server was restarted."""
    step(6, f"And now? {DEAD} holds nothing any more, and {LIVE} has noticed nothing.")
    dead, live = (show(place, "kubectl", "exec", "-n", SPACE, name, "--", "ls", "/dev/shm") for name in (DEAD, LIVE))
    show(place, "kubectl", "get", "pods", "-n", SPACE)
    status = place.kubectl.within(SPACE).get("pod", LIVE)["status"]
    return dead.strip(), live.strip(), sum(one["restartCount"] for one in status["containerStatuses"])


def tell(place: Ground) -> list[str]:
    """The whole story; what went otherwise than it should."""
    server = start_servers(place)
    begun = time.monotonic()
    kill_front_end(place, server["front_end"])
    install(place)
    await_age(begun)
    phase = reset(place)
    found = show_result(place)
    dead, live, restarts = look_again(place)
    ended = [one for one in found.get("processes", []) if one["outcome"] == "Ended"]
    wrong = (
        (phase != "Complete", f"the reset ended {phase or 'never'}: {found.get('message')}"),
        (not ended, "no process was ended"),
        (bool(dead), f"{DEAD} still has {dead.split()}"),
        (not live, f"{LIVE} has lost its shared memory"),
        (restarts != 0, f"{LIVE} was restarted {restarts} times"),
    )
    return [text for is_so, text in wrong if is_so]


def leave(place: Ground) -> None:
    """One's own cluster is as it was; the embedded one stays to be looked at."""
    if place.stays:
        say("Look around with these commands, and more; `make cluster-down` ends it, `make clean` removes all:")
        say(
            f"   export KUBECONFIG={place.kubectl.kubeconfig} PATH={place.kubectl.program.parent}:{place.helm.parent}:$PATH"
        )
        say("   kubectl explain gnr.spec; kubectl get gnr -o wide; kubectl describe gnr")
        return
    place.run("kubectl", "delete", "gnr", "--all", "--timeout=60s")  # an error where the CRD was never installed
    show(place, "helm", "uninstall", "cleanslate", "--ignore-not-found", "--wait")
    place.kubectl.delete("crd", *installed.CRDS)
    place.kubectl.delete("namespace", SPACE)
    say(f"context {place.kubectl.context}: all that was made there is removed")


def run(name: str) -> list[str]:
    """The demonstration from its beginning to its end."""
    say(bold("Clean Slate, a demonstration"))
    say("The cluster starts (seconds; up to ten minutes where Kubernetes has to be built first) …")
    with clusters.ground(name) as place:
        say(f"{place.title}.")
        clusters.write_files(place)
        show(place, "kubectl", "get", "nodes")
        try:
            return tell(place)
        finally:
            say()
            leave(place)


def main() -> int:
    """Exit 0 if the leak was found and removed, and nothing else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="main", help="of several embedded clusters of this checkout (default main)")
    begun = time.monotonic()
    os.chdir(clusters.ROOT)
    try:
        wrong = run(parser.parse_args().name)
    except (RuntimeError, ClusterError, BuildError, KubectlError, RefusedError) as error:
        say(f"demo: cannot go on: {error}")
        return 1
    if wrong:
        say(bold("demo: FAILED: " + "; ".join(wrong)))
        return 1
    took_s = time.monotonic() - begun
    say(
        bold(f"demo: PASSED in {took_s:.0f} s: the dead server's rest was ended, the live one kept, every GPU measured")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
