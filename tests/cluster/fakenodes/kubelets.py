"""All kubelets of the fleet: one list and watch of the bound pods, and a life for each pod on a node of ours."""

import asyncio
from collections.abc import Mapping, Set
from typing import Any

from cluster.fakenodes import api, pods
from cluster.fakenodes.behaviours import Behaviour, Rule, choose
from cluster.fakenodes.lives import Life
from cluster.fakenodes.nodes import Node

PODS = "/api/v1/pods"
BOUND = "spec.nodeName!="
REWATCH_PAUSE_S = 0.5


class Kubelets:
    """The pods of `nodes` (by name). `run` is the task that follows them; the rest may be called at any time."""

    def __init__(self, server: api.Api, nodes: Mapping[str, Node], rules: tuple[Rule, ...]) -> None:
        self._api = server
        self._nodes = nodes
        self._rules = rules
        self._lives: dict[str, Life] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """Pods that are being played."""
        return len(self._lives)

    def behave(self, rules: tuple[Rule, ...]) -> None:
        """New rules: also for the pods that are there, from the state that each is in."""
        self._rules = rules
        for life in self._lives.values():
            life.behave(self._behaviour(life.pod))

    def tell_again(self, nodes: Set[Node]) -> None:
        """Writes the status of all pods of these nodes."""
        for life in self._lives.values():
            if life.node in nodes:
                life.tell_again()

    async def run(self) -> None:
        """Follows the pods until it is cancelled."""
        while True:
            version = await self._list()
            try:
                await self._follow(version)
            except api.GoneError:
                self._api.figures.watches["lists after 410"] += 1

    async def close(self) -> None:
        """Ends all lives without a word to the API."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def remove_all(self) -> None:
        """Removes all pods that are there at once, as if their nodes were gone."""
        found = [life.pod for life in self._lives.values()]
        await self.close()
        options = {"gracePeriodSeconds": 0}
        await asyncio.gather(
            *(self._api.call("pod delete", "DELETE", pod.path, options, accept=api.ONLY_METADATA) for pod in found)
        )

    async def _list(self) -> str:
        """Takes in all pods there are; those that are no longer there have vanished."""
        data = await self._api.listed(PODS, fieldSelector=BOUND)
        there = set()
        for item in data["items"]:
            there.add(item["metadata"]["uid"])
            self._take("ADDED", item)
        for uid in self._lives.keys() - there:
            self._lives[uid].vanish()
        return data["metadata"]["resourceVersion"]

    async def _follow(self, version: str) -> None:
        """Watches from one version on, again and again. Raises GoneError."""
        while True:
            self._api.figures.watches["begun"] += 1
            async for event in self._api.watch(PODS, version, fieldSelector=BOUND):
                version = event["object"].get("metadata", {}).get("resourceVersion", version)
                self._take(event["type"], event["object"])
            await asyncio.sleep(REWATCH_PAUSE_S)

    def _take(self, kind: str, item: dict[str, Any]) -> None:
        """One pod as it is now. An odd one is reported, and is no reason to stop."""
        try:
            if kind != "BOOKMARK" and item["spec"]["nodeName"] in self._nodes:
                self._know(kind, item)
        except (KeyError, TypeError, AttributeError) as error:
            self._api.figures.trouble(f"pod {str(item)[:200]}: cannot read: {type(error).__name__} {error}; ignored")

    def _know(self, kind: str, item: dict[str, Any]) -> None:
        uid = item["metadata"]["uid"]
        life = self._lives.get(uid)
        if kind == "DELETED":
            if life:
                life.vanish()
            return
        if life is None and not pods.is_finished(item):
            life = self._begin(pods.parse(item))
        if life and pods.is_deleting(item):
            life.delete()

    def _begin(self, pod: pods.Pod) -> Life:
        life = Life(pod, self._nodes[pod.node], self._behaviour(pod), self._api)
        self._lives[pod.uid] = life
        task = asyncio.create_task(self._lead(life))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return life

    async def _lead(self, life: Life) -> None:
        try:
            await life.lead()
        except Exception as error:
            name = f"{life.pod.namespace}/{life.pod.name}"
            self._api.figures.trouble(f"pod {name}: cannot play: {type(error).__name__} {error}; left as it is")
        finally:
            self._lives.pop(life.pod.uid, None)

    def _behaviour(self, pod: pods.Pod) -> Behaviour:
        return choose(self._rules, node=pod.node, namespace=pod.namespace, pod=pod.name, labels=pod.labels)
