"""A fleet of simulated nodes in one event loop: registers them, keeps them alive, changes them, removes them."""

import asyncio
import contextlib
import fnmatch
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.fakenodes import api, figures, kubeconfig
from cluster.fakenodes.behaviours import Rule
from cluster.fakenodes.kubelets import Kubelets
from cluster.fakenodes.leases import Leases
from cluster.fakenodes.nodes import FLEET_LABEL, LEASES, NODES, Node

CONNECTIONS = 16  # 8, 16 and 32 register equally fast on two cores; more only wait longer, inside the server
LAG_PROBE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Which nodes: `count` of them, named prefix-0000 and so on, all with `labels`.

    `subsets` gives more labels to the nodes whose name matches a shell pattern. `renew_s` is the interval of lease renewals
    (leases.interval_s), `connections` the number of requests under way at once.
    """

    count: int
    renew_s: float
    prefix: str = "sim"
    labels: Mapping[str, str] = field(default_factory=dict)
    subsets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    connections: int = CONNECTIONS

    def nodes(self) -> dict[str, Node]:
        """The nodes by name."""
        nodes = (Node(self.prefix, index, self.labels) for index in range(self.count))
        return {node.name: self._labelled(node) for node in nodes}

    def _labelled(self, node: Node) -> Node:
        for pattern, labels in self.subsets.items():
            if fnmatch.fnmatchcase(node.name, pattern):
                node.labels = {**node.labels, **labels}
        return node


class Fleet:
    """Nodes against one API server. Made by `running`, which also ends it."""

    def __init__(self, server: api.Api, settings: FleetSettings) -> None:
        self.figures = server.figures
        self.nodes = settings.nodes()
        self._api = server
        self._settings = settings
        self._kubelets = Kubelets(server, self.nodes, settings.rules)
        self._leases = Leases(server, settings.renew_s)
        self._registration_s: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to register the nodes and to play their pods."""
        self._registering = asyncio.create_task(self._guarded(self._register_all()))
        others = (self._kubelets.run(), self._leases.run(), self._measure_lag())
        self._tasks = [self._registering, *(asyncio.create_task(self._guarded(work)) for work in others)]

    async def wait_registered(self) -> float:
        """Until the API shows all nodes Ready and without the taints of a new one; the seconds since the start.

        Whoever wants a deadline cancels. Raises ValueError or PermissionError if the server refuses.
        """
        await asyncio.shield(self._registering)
        waiting = {name for name, node in self.nodes.items() if not node.is_gone}
        while waiting:
            data = await self._api.listed(NODES, labelSelector=self._selector)
            waiting -= {item["metadata"]["name"] for item in data["items"] if is_usable(item)}
            with contextlib.suppress(api.GoneError):
                await self._watch_usable(waiting, data["metadata"]["resourceVersion"])
        if self._registration_s is None:
            self._registration_s = time.monotonic() - self._begun_s
        return self._registration_s

    def behave(self, rules: tuple[Rule, ...]) -> None:
        """New rules for all pods, those that are there too."""
        self._kubelets.behave(rules)

    def silence(self, names: Iterable[str]) -> int:
        """These nodes (names or patterns) say nothing any more: no renewals, no pods. How many there are."""
        found = self._find(names)
        for node in found:
            node.awake.clear()
        return len(found)

    async def wake(self, names: Iterable[str]) -> int:
        """They answer again: lease, conditions, and all that happened to their pods meanwhile."""
        found = [node for node in self._find(names) if not node.awake.is_set()]
        for node in found:
            node.awake.set()
        await _all(self._wake(node) for node in found)
        self._kubelets.tell_again(set(found))
        return len(found)

    async def set_ready(self, names: Iterable[str], *, message: str) -> int:
        """Sets their Ready condition: False with this message, or True if the message is empty. They go on answering."""
        found = self._find(names)
        for node in found:
            node.not_ready = message
        await _all(self._tell(node) for node in found)
        return len(found)

    def skew(self, names: Iterable[str], skew_s: float) -> int:
        """Their clocks are that many seconds ahead, in all that they write from now on."""
        found = self._find(names)
        for node in found:
            node.skew_s = skew_s
        return len(found)

    async def remove(self, names: Iterable[str]) -> int:
        """Deletes these nodes and their leases, as when machines are given back. Their pods are the cluster's to remove."""
        found = self._find(names)
        for node in found:
            node.is_gone = True
            node.awake.clear()
        await _all(
            self._api.call("remove", "DELETE", path, accept=api.ONLY_METADATA)
            for node in found
            for path in (node.lease_path, node.path)
        )
        return len(found)

    async def register(self, names: Iterable[str]) -> int:
        """Registers nodes that were removed, as fresh machines of the same names."""
        found = [node for node in self._find(names, gone=True) if node.is_gone]
        for node in found:
            node.is_gone, node.lease_version = False, ""
            node.awake.set()
        await _all(self._register(node, first_s=self._settings.renew_s) for node in found)
        return len(found)

    def data(self) -> dict[str, Any]:
        """The figures as JSON can hold them."""
        nodes = self.nodes.values()
        return self.figures.data() | {
            "nodes": sum(bool(node.uid) and not node.is_gone for node in nodes),
            "silent": sum(not node.awake.is_set() and not node.is_gone for node in nodes),
            "pods": self._kubelets.count,
            "registration_s": self._registration_s,
        }

    async def remove_all(self) -> None:
        """Deletes every node and lease of the fleet, and the pods that are left on them."""
        await self.close()
        selector = {"labelSelector": self._selector}
        await asyncio.gather(
            *(
                self._api.call("remove all", "DELETE", path, accept=api.ONLY_METADATA, **selector)
                for path in (LEASES, NODES)
            )
        )
        await self._kubelets.remove_all()

    async def close(self) -> None:
        """Ends all tasks; the nodes stay in the API as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._leases.close()

    @property
    def _selector(self) -> str:
        return f"{FLEET_LABEL}={self._settings.prefix}"

    def _find(self, names: Iterable[str], *, gone: bool = False) -> list[Node]:
        patterns = tuple(names)
        exact = [self.nodes[name] for name in patterns if name in self.nodes]
        wild = [pattern for pattern in patterns if pattern not in self.nodes]
        matching = [node for node in self.nodes.values() if any(fnmatch.fnmatchcase(node.name, one) for one in wild)]
        found = [node for node in dict.fromkeys((*exact, *matching)) if gone or not node.is_gone]
        if not found:
            raise ValueError(
                f"nodes {', '.join(patterns)}: cannot find: the fleet has {next(iter(self.nodes))} and so on"
            )
        return found

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.figures.trouble(f"fleet: cannot go on with {work.__name__}: {type(error).__name__} {error}")
            raise

    async def _register_all(self) -> None:
        """Workers take node after node, so that as many requests are under way as there are connections."""
        self._begun_s = time.monotonic()
        version = await self._api.call("version", "GET", "/version")
        self._version = version.data()["gitVersion"]
        queue = iter(enumerate(self.nodes.values(), start=1))

        async def work() -> None:
            for number, node in queue:
                # The last quarter of the interval at the earliest, to have it behind the registration of the others.
                first_s = self._settings.renew_s * (0.75 + 0.25 * number / self._settings.count)
                await self._register(node, first_s=first_s)

        await asyncio.gather(*(work() for _ in range(self._settings.connections)))

    async def _register(self, node: Node, *, first_s: float) -> None:
        """Node first, since the lease names its UID as the owner's. A node left by an interrupted run is taken over."""
        answer = await self._api.call(
            "node create", "POST", NODES, node.object(self._version), accept=api.ONLY_METADATA
        )
        if answer.status == 409:
            answer = await self._api.call("node", "GET", node.path, accept=api.ONLY_METADATA)
            if answer.ok and answer.data()["metadata"].get("labels", {}).get(FLEET_LABEL) != node.fleet:
                raise ValueError(f"node {node.name}: cannot register: it exists and is not ours; choose another prefix")
            await self._tell(node)
        if not answer.ok:
            raise ValueError(f"node {node.name}: cannot register: {answer.describe()}")
        node.uid = answer.data()["metadata"]["uid"]
        await self._leases.create(node)
        self._leases.keep(node, first_s=first_s)

    async def _wake(self, node: Node) -> None:
        await self._leases.renew(node)
        await self._tell(node)
        self._leases.keep(node, first_s=self._settings.renew_s)

    async def _tell(self, node: Node) -> None:
        """Writes the node's conditions."""
        answer = await self._api.call(
            "node status",
            "PATCH",
            f"{node.path}/status",
            {"status": node.status()},
            content=api.STRATEGIC_PATCH,
            accept=api.ONLY_METADATA,
        )
        if not answer.ok:
            self.figures.trouble(f"node {node.name}: cannot write its conditions: {answer.describe()}")

    async def _watch_usable(self, waiting: set[str], version: str) -> None:
        if not waiting:
            return
        async for event in self._api.watch(NODES, version, labelSelector=self._selector):
            if is_usable(event["object"]):
                waiting.discard(event["object"]["metadata"]["name"])
            if not waiting:
                return

    async def _measure_lag(self) -> None:
        """How late the event loop is at its worst: if that is much, this process and not the control plane is the limit."""
        while True:
            begun_s = time.monotonic()
            await asyncio.sleep(LAG_PROBE_S)
            self.figures.loop_lag_s = max(self.figures.loop_lag_s, time.monotonic() - begun_s - LAG_PROBE_S)


def is_usable(node: Mapping[str, Any]) -> bool:
    """Whether a Node of the API is Ready and no taint keeps pods away."""
    conditions = node.get("status", {}).get("conditions", ())
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return is_ready and not node.get("spec", {}).get("taints")


async def _all(calls: Iterable[Coroutine[Any, Any, Any]]) -> None:
    await asyncio.gather(*calls)


@contextlib.asynccontextmanager
async def running(access: kubeconfig.Access, settings: FleetSettings) -> AsyncIterator[Fleet]:
    """A fleet at work. At the end its tasks stop; `Fleet.remove_all` before it removes its objects too."""
    async with api.Api(access, figures.Figures(), connections=settings.connections) as server:
        fleet = Fleet(server, settings)
        fleet.start()
        try:
            yield fleet
        finally:
            await fleet.close()
