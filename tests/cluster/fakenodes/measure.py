"""`python -m cluster.fakenodes.measure`: how long registration, a DaemonSet and removal take; one JSON object at the end.

The floor for the figures of whatever works on such a cluster: no operator takes part.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

from cluster.fakenodes import behaviours
from cluster.fakenodes.behaviours import Behaviour
from cluster.fakenodes.handle import FakeNodes
from cluster.fakenodes.plainapi import PlainApi

REGISTRATION_LIMIT_S = 120.0
DAEMONSET_LIMIT_S = 60.0
POOL = "tests.cleanslate.dev/pool"
NAME = "fakenodes-measure"
DAEMONSETS = f"/apis/apps/v1/namespaces/{NAME}/daemonsets"


def main() -> int:
    """0: both within the limits that issue 4 sets; 1: not."""
    arguments = _parser().parse_args()
    api = PlainApi(arguments.kubeconfig)
    behaviour = Behaviour() if arguments.init_s == 0 else behaviours.init_says("clean", after_s=arguments.init_s)
    nodes = FakeNodes(
        arguments.kubeconfig,
        count=arguments.count,
        subsets={"sim-*[05]": {POOL: "chosen"}},
        behaviour=behaviour,
    )
    figures: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    with nodes:
        figures["registration_s"] = nodes.wait_registered(600)
        print(f"registered after {figures['registration_s']:.1f} s", file=sys.stderr)
        wanted = len(range(0, arguments.count, 5))
        try:
            figures["daemonset_s"] = daemonset_ready(api, wanted=wanted, timeout_s=600)
            if arguments.idle_s:
                figures["idle"] = _idle(nodes, arguments.idle_s)
            figures["daemonset_gone_s"] = daemonset_gone(api, timeout_s=600)
        finally:
            api.ask("DELETE", f"/api/v1/namespaces/{NAME}")
        figures["fakenodes"] = nodes.figures
        begun_s = time.monotonic()
    figures |= {"removal_s": time.monotonic() - begun_s, "load_after": os.getloadavg()[0]}
    print(json.dumps(figures, indent=1))
    return int(figures["registration_s"] > REGISTRATION_LIMIT_S or figures["daemonset_s"] > DAEMONSET_LIMIT_S)


def daemonset_ready(api: PlainApi, *, wanted: int, timeout_s: float) -> float:
    """Makes a namespace and a DaemonSet over the chosen nodes; the seconds until all its pods are ready."""
    api.ask("POST", "/api/v1/namespaces", {"metadata": {"name": NAME}})
    # Pods are refused until the namespace's service account exists.
    api.until(f"/api/v1/namespaces/{NAME}/serviceaccounts", lambda one: True, timeout_s=60)
    begun_s = time.monotonic()
    api.ask("POST", DAEMONSETS, daemonset())
    api.until(DAEMONSETS, lambda one: one["status"].get("numberReady", 0) >= wanted, timeout_s=timeout_s)
    return time.monotonic() - begun_s


def daemonset_gone(api: PlainApi, *, timeout_s: float) -> float:
    """Deletes the DaemonSet in the foreground; the seconds until it and thereby all its pods are gone."""
    begun_s = time.monotonic()
    last = api.ask("DELETE", f"{DAEMONSETS}/{NAME}", {"propagationPolicy": "Foreground"})
    version = last["metadata"]["resourceVersion"]
    api.until(DAEMONSETS, lambda one: True, timeout_s=timeout_s, kinds={"DELETED"}, resourceVersion=version)
    return time.monotonic() - begun_s


def daemonset() -> dict[str, Any]:
    """A DaemonSet with an init container over the chosen nodes."""
    requirement = {"key": POOL, "operator": "In", "values": ["chosen"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}
    pod = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "initContainers": [{"name": "reset", "image": "localhost/reset:1"}],
        "containers": [{"name": "idle", "image": "localhost/pause:1"}],
        "automountServiceAccountToken": False,
    }
    template = {"metadata": {"labels": {"app": NAME}}, "spec": pod}
    return {
        "metadata": {"name": NAME},
        "spec": {"selector": {"matchLabels": {"app": NAME}}, "template": template},
    }


def _idle(nodes: FakeNodes, idle_s: float) -> dict[str, float]:
    """What doing nothing costs: the machine's and the process's CPU while only leases are renewed."""
    before_s, before = _machine_cpu_s(), nodes.figures
    time.sleep(idle_s)
    after_s, after = _machine_cpu_s(), nodes.figures
    return {
        "renewals_per_s": (after["calls"].get("lease", 0) - before["calls"].get("lease", 0)) / idle_s,
        "machine_cores": (after_s - before_s) / idle_s,
        "fakenodes_cores": (after["cpu_s"] - before["cpu_s"]) / idle_s,
    }


def _machine_cpu_s() -> float:
    """CPU time of everything on the machine (proc_stat(5)), idle and I/O wait left out."""
    ticks = [int(one) for one in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.fakenodes.measure", description=__doc__)
    parser.add_argument("--kubeconfig", type=pathlib.Path, required=True, help="of a cluster administrator")
    parser.add_argument(
        "--count", type=int, default=5000, help="nodes; the DaemonSet is for each fifth (default: 5000)"
    )
    parser.add_argument("--init-s", type=float, default=0.0, help="how long the init container runs (default: 0)")
    parser.add_argument(
        "--idle-s", type=float, default=0.0, help="measure the cost of doing nothing for so long (default: 0)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
