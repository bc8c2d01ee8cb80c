"""A pod as a node sees it: the few fields of the API's object that its life depends on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """A container to run; `sidecar` is an init container that stays."""

    name: str
    image: str
    sidecar: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod bound to a node."""

    uid: str
    namespace: str
    name: str
    node: str
    generation: int
    labels: Mapping[str, str]
    restart_policy: str
    host_network: bool
    init: tuple[ContainerSpec, ...]
    main: tuple[ContainerSpec, ...]

    @property
    def path(self) -> str:
        """Where it is in the API."""
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"


def parse(item: Mapping[str, Any]) -> Pod:
    """The pod in an object of the API. Raises KeyError or TypeError if it is not one that is bound."""
    metadata, spec = item["metadata"], item["spec"]
    return Pod(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        node=spec["nodeName"],
        generation=metadata.get("generation", 0),
        labels=metadata.get("labels") or {},
        restart_policy=spec.get("restartPolicy", "Always"),
        host_network=bool(spec.get("hostNetwork")),
        init=tuple(_container(one) for one in spec.get("initContainers") or ()),
        main=tuple(_container(one) for one in spec["containers"]),
    )


def is_deleting(item: Mapping[str, Any]) -> bool:
    """Whether somebody asked for its end."""
    return "deletionTimestamp" in item["metadata"]


def is_finished(item: Mapping[str, Any]) -> bool:
    """Whether its phase is one that it never leaves."""
    return item.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def _container(item: Mapping[str, Any]) -> ContainerSpec:
    return ContainerSpec(name=item["name"], image=item.get("image", ""), sidecar=item.get("restartPolicy") == "Always")
