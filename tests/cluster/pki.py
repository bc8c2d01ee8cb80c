"""The cluster's keys and certificates, and the kubeconfigs made of them, by the openssl command."""

import base64
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DAYS = "30"
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def certificate(self) -> Path:
        """Its own certificate, which clients trust."""
        return self.folder / "ca.crt"

    def make(self) -> None:
        """Makes the authority, and the key that signs service accounts' tokens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        # RSA: the API server verifies the client's certificate at every request, which takes an eighth of its time with EC.
        own = ("-subj", "/CN=test-ca", "-keyout", "ca.key", "-out", "ca.crt")
        self._openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", DAYS, *own)
        self._openssl("genrsa", "-out", "sa.key", "2048")

    def issue(self, name: str, subject: str, alternatives: str = "") -> None:
        """Makes NAME.key and NAME.crt for client and server use; `alternatives` as in openssl's subjectAltName."""
        extensions = self.folder / f"{name}.ext"
        lines = ["extendedKeyUsage=clientAuth,serverAuth"] + (
            [f"subjectAltName={alternatives}"] if alternatives else []
        )
        extensions.write_text("\n".join(lines))
        self._openssl("req", "-new", *_EC, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAserial", f"{name}.srl", "-CAcreateserial")
        signed = ("-days", DAYS, "-out", f"{name}.crt", "-extfile", extensions.name)
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signer, *signed)
        for rest in (".csr", ".ext", ".srl"):
            (self.folder / f"{name}{rest}").unlink()

    def issue_all(self, certificates: dict[str, tuple[str, str]]) -> None:
        """`issue` for several at once: (subject, alternatives) by name."""
        with ThreadPoolExecutor(4) as workers:
            list(workers.map(lambda name: self.issue(name, *certificates[name]), certificates))

    def kubeconfig(self, name: str, server: str) -> dict[str, Any]:
        """A self-contained kubeconfig of the client NAME."""
        cluster = {"server": server, "certificate-authority-data": self._data("ca.crt")}
        user = {"client-certificate-data": self._data(f"{name}.crt"), "client-key-data": self._data(f"{name}.key")}
        return kubeconfig(cluster, user)

    def _data(self, name: str) -> str:
        return base64.b64encode((self.folder / name).read_bytes()).decode()

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


def kubeconfig(cluster: dict[str, Any], user: dict[str, Any], *, context: str = "cleanslate-test") -> dict[str, Any]:
    """A kubeconfig with one cluster, one user and one context."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [{"name": context, "cluster": cluster}],
        "users": [{"name": context, "user": user}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
    }


def write(path: Path, config: dict[str, Any]) -> Path:
    """Writes a kubeconfig for its owner alone: JSON, which is YAML."""
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path
