"""A client, the fault proxy and a little API server, joined: what the proxy's own tests play in."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cluster import pki
from cluster.faultproxy import FaultProxy
from cluster.littleapi import LittleApi
from cluster.plainclient import Client

_LOCAL = "IP:127.0.0.1"


def make_authority(folder: Path) -> pki.Authority:
    """An authority with certificates for `server`, `proxy` and the client `admin`."""
    authority = pki.Authority(folder)
    authority.make()
    names = {"server": ("/CN=server", _LOCAL), "proxy": ("/CN=proxy", _LOCAL), "admin": ("/CN=admin", "")}
    authority.issue_all(names)
    return authority


@dataclass(frozen=True)
class World:
    """All three, and where the proxy's files are."""

    api: LittleApi
    proxy: FaultProxy
    client: Client
    folder: Path

    def client_with(self, token: str) -> Client:
        """Another client of the proxy."""
        return Client(self.proxy.url, self.client.ca, token)

    def afresh(self) -> Self:
        """The same for the next test: without objects, and without a request that was asked."""
        self.api.await_watchers(0)
        self.api.forget()
        self.proxy.forget_requests()
        return self


def proxy_to(api: LittleApi, authority: pki.Authority, folder: Path, **settings: object) -> FaultProxy:
    """A proxy, not started, to the API server; as admin unless the settings say otherwise."""
    admin = pki.write(folder / "admin.kubeconfig", authority.kubeconfig("admin", api.url))
    keys = authority.folder
    chosen = {
        "upstream": api.url,
        "ca": authority.certificate,
        "certificate": keys / "proxy.crt",
        "key": keys / "proxy.key",
    }
    return FaultProxy(**{**chosen, "folder": folder, "identity": admin, **settings})  # type: ignore[arg-type]


@contextmanager
def world(authority: pki.Authority, folder: Path) -> Iterator[World]:
    """A running world; it ends with the block."""
    with LittleApi(authority) as api, proxy_to(api, authority, folder) as proxy:
        yield World(api, proxy, Client(proxy.url, authority.certificate), folder)
