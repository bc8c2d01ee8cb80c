"""How to reach the API server: `kubernetes.aio`'s own configuration, from the pod's service account or from a kubeconfig."""

import os

from kubernetes.aio import config
from kubernetes.aio.client import configuration

Configuration = configuration.Configuration


class ConnectError(Exception):
    """There is no usable way to the API server; the text says why and what to do."""


async def load(kubeconfig: str | None) -> Configuration:
    """The configuration in a kubeconfig, else of the pod, else in KUBECONFIG or its default place. Raises ConnectError."""
    made = Configuration()
    try:
        if kubeconfig is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=made)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, client_configuration=made, persist_config=False
            )
    except (config.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
        raise ConnectError(
            f"API server: cannot connect: {error}; give --kubeconfig, or run it in a pod with a service account's token"
        ) from error
    return made


async def authorization(made: Configuration) -> str | None:
    """The value of the Authorization header, or None where a certificate speaks for the client.

    A pod's token is read again once a minute, since the kubelet renews it. Raises ConnectError if it cannot be read.
    """
    try:
        settings = await made.auth_settings()
    except (config.ConfigException, OSError) as error:
        raise ConnectError(f"token: cannot read: {error}; look at the pod's service account") from error
    if "BearerToken" in settings:
        return settings["BearerToken"]["value"]
    return made.get_basic_auth_token() if made.username else None
