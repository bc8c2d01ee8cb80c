"""What kopf is asked to deliver: events about GPUNodeResets and about their pods. Each only says which reset to look at."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import kopf

from cleanslate_operator import connection, names

REQUEST_S = 30.0
CONNECT_S = 10.0
_LONGEST_PAUSE_S = 30.0
_OURS = {names.RESET_UID: kopf.PRESENT, names.RESET_NAME: kopf.PRESENT}
_random = random.SystemRandom()


class Pauses:
    """Between tries of a request, in seconds: longer each time, never quite the same, without end.

    kopf gives up, and with it the process, when its pauses are used up; an API server may be away for hours.
    """

    def __iter__(self) -> Iterator[float]:
        return (min(_LONGEST_PAUSE_S, 2.0 ** min(tries, 8)) * _random.uniform(0.5, 1.0) for tries in itertools.count())


def registry(enqueue: Callable[[str], None], configuration: connection.Configuration) -> kopf.OperatorRegistry:
    """kopf's handlers. `enqueue` is called with the name of a GPUNodeReset to look at, in kopf's thread."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await credentials(configuration)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=made)
    async def reset_changed(name: str, **_: Any) -> None:
        enqueue(name)

    @kopf.on.event("", "v1", "pods", labels=_OURS, registry=made)
    async def pod_changed(labels: kopf.Labels, **_: Any) -> None:
        enqueue(labels[names.RESET_NAME])

    return made


def settings() -> kopf.OperatorSettings:
    """kopf as an event source and no more: it writes nothing, posts nothing and asks for no rights beyond its watches."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.peering.standalone = True
    made.scanning.disabled = True  # no right to list CRDs and namespaces is needed
    made.watching.label_selectors["", "v1", "pods"] = names.RESET_UID
    made.networking.error_backoffs = Pauses()
    made.networking.request_timeout = REQUEST_S
    made.networking.connect_timeout = CONNECT_S
    made.networking.trust_env = True  # as the other client does: a proxy in the environment counts for both
    made.persistence.finalizer = f"{names.GROUP}/kopf"  # never set, since no handler asks for one
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"kopf.{names.GROUP}", v1=False)
    made.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=f"kopf.{names.GROUP}", v1=False)
    return made


async def credentials(configuration: connection.Configuration) -> kopf.ConnectionInfo:
    """The same way to the API server as the other client's; asked for again whenever the server refuses the last one."""
    scheme, _, token = (await connection.authorization(configuration) or "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        ca_data=configuration.ca_cert_data,
        insecure=not configuration.verify_ssl,
        scheme=scheme if token else None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
        trust_env=True,
    )
