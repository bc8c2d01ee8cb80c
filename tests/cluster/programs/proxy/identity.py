"""The client certificate in a kubeconfig, as the proxy's own identity towards the API server."""

import base64
import binascii
import re
import ssl
import tempfile
from pathlib import Path


def load(context: ssl.SSLContext, kubeconfig: Path) -> None:
    """Makes the context present the kubeconfig's client certificate.

    Raises ValueError if the file has none, or several. The file may be YAML or JSON: the two fields look alike in both.
    """
    text = kubeconfig.read_text()
    with tempfile.TemporaryDirectory() as folder:  # ssl takes files only; the folder is the user's own, mode 0700
        certificate, key = (
            _as_file(text, kubeconfig, f"client-{part}", Path(folder)) for part in ("certificate", "key")
        )
        context.load_cert_chain(certificate, key)


def _as_file(text: str, kubeconfig: Path, field: str, folder: Path) -> Path:
    found: list[tuple[str, str]] = re.findall(rf"""["']?\b{field}(-data)?["']?\s*:\s*["']?([^\s"',}}]+)""", text)
    if len(found) != 1:
        raise ValueError(
            f"{kubeconfig}: cannot take an identity: {len(found)} users with {field}; give a file with one"
        )
    inline, value = found[0]
    if not inline:
        return kubeconfig.parent / value  # relative paths are relative to the kubeconfig
    path = folder / field
    try:
        path.write_bytes(base64.b64decode(value, validate=True))
    except binascii.Error as error:
        raise ValueError(f"{kubeconfig}: cannot read {field}-data: {error}; write it again") from error
    return path
