"""A kubeconfig of one cluster and one user, read without a YAML library: the address and the TLS context."""

import base64
import pathlib
import re
import ssl
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach an API server: its base URL, the TLS context with the client's certificate, and a token or None."""

    server: str
    tls: ssl.SSLContext
    token: str | None


def read(path: pathlib.Path) -> Access:
    """Access from the file, in YAML or JSON. Raises ValueError if it has no or several clusters or users, OSError."""
    text = path.read_text(encoding="utf-8")
    server = _value(text, "server", path)
    if server is None:
        raise ValueError(f"{path}: cannot read: no server; give a kubeconfig with one cluster")
    authority = _material(text, "certificate-authority", path)
    tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
    certificate, key = (_material(text, name, path) for name in ("client-certificate", "client-key"))
    if certificate and key:
        _load(tls, certificate, key)
    return Access(server=server.rstrip("/"), tls=tls, token=_value(text, "token", path))


def _value(text: str, key: str, path: pathlib.Path) -> str | None:
    found = re.findall(rf"""(?<![\w-])"?{key}"?\s*:\s*["']?([^\s"',}}]+)""", text)
    if len(found) > 1:
        raise ValueError(
            f"{path}: cannot read: {len(found)} times {key}; write one context with kubectl config view --minify --flatten"
        )
    return found[0] if found else None


def _material(text: str, key: str, path: pathlib.Path) -> bytes | None:
    """A certificate or key: inline, or in the file that is named, relative to the kubeconfig."""
    inline = _value(text, f"{key}-data", path)
    if inline is not None:
        return base64.b64decode(inline)
    name = _value(text, key, path)
    return (path.parent / name).read_bytes() if name is not None else None


def _load(tls: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    with tempfile.NamedTemporaryFile() as pair:  # the ssl module takes files only
        pair.write(certificate + b"\n" + key)
        pair.flush()
        tls.load_cert_chain(pair.name)
