"""The cluster's components: which there are, with which flags, and the addresses they use inside the cluster's network."""

from dataclasses import dataclass
from pathlib import Path

from cluster import binaries, pki
from cluster.places import CONFIG

CONTROL_IP = "10.98.0.1"
NODE_NETWORK = 24
SERVICES = "10.96.0.0/16"
SERVICE_IP = "10.96.0.1"  # the API server's own Service: the first address of SERVICES
API_PORT = 6443
SERVER = f"https://{CONTROL_IP}:{API_PORT}"
_NAMES = (
    "localhost",
    *(f"kubernetes{rest}" for rest in ("", ".default", ".default.svc", ".default.svc.cluster.local")),
)
_ADDRESSES = ("127.0.0.1", CONTROL_IP, SERVICE_IP)
_SERVER_NAMES = ",".join([f"IP:{ip}" for ip in _ADDRESSES] + [f"DNS:{name}" for name in _NAMES])
# At the default 20 requests a second the tokens for all controllers alone take 5 s.
_QUICK = ("--kube-api-qps=500", "--kube-api-burst=1000", "--leader-elect=false")

# Memory is there; collecting it less often gives a third of the time of thousands of registrations back.
ENVIRONMENT = {"GOGC": "300", "GOMEMLIMIT": "3GiB"}

CONTROL_CERTIFICATES = {
    "apiserver": ("/CN=kube-apiserver", _SERVER_NAMES),
    "kubelet-client": ("/O=system:masters/CN=kube-apiserver-kubelet-client", ""),
    "admin": ("/O=system:masters/CN=admin", ""),
    "kube-controller-manager": ("/CN=system:kube-controller-manager", ""),
    "kube-scheduler": ("/CN=system:kube-scheduler", ""),
    "kube-proxy": ("/CN=system:kube-proxy", ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What makes one real node another than the next; `number` starts at 1."""

    number: int

    @property
    def name(self) -> str:
        """The node's name, and its host name."""
        return f"node-{self.number}"

    @property
    def ip(self) -> str:
        """Its address in the cluster's network."""
        return f"10.98.0.{10 + self.number}"

    @property
    def pods(self) -> str:
        """The addresses of its pods."""
        return f"10.244.{self.number}.0/24"

    @property
    def certificate(self) -> tuple[str, str]:
        """Subject and alternative names of the kubelet's client certificate."""
        return (f"/O=system:nodes/CN=system:node:{self.name}", "")


def control_plane(folder: Path, disk: Path, *, silence_s: int) -> dict[str, list[str]]:
    """Name to command line, in the order of their start; `silence_s`: how long a node may be silent before it is NotReady."""
    built = binaries.kubernetes()
    lines = {
        "etcd": [
            f"--data-dir={disk}/etcd",
            "--unsafe-no-fsync",
            "--log-level=warn",
            "--quota-backend-bytes=4294967296",
        ],
        "kube-apiserver": _api_server(folder, audit_log(disk)),
        "kube-controller-manager": [
            f"--kubeconfig={folder}/kube-controller-manager.kubeconfig",
            *_QUICK,
            "--use-service-account-credentials",
            f"--root-ca-file={folder}/ca.crt",
            f"--service-account-private-key-file={folder}/sa.key",
            f"--node-monitor-grace-period={silence_s}s",
            "--node-monitor-period=2s",
            "--controllers=*,-ttl-controller",  # writes an annotation to every node that no kubelet here reads
        ],
        "kube-scheduler": [f"--kubeconfig={folder}/kube-scheduler.kubeconfig", *_QUICK],
    }
    return {name: [str(built / name), *flags] for name, flags in lines.items()}


def audit_log(disk: Path) -> Path:
    """What the operator's ServiceAccount has asked of the API server: an Event of audit.k8s.io a line."""
    return disk / "audit.log"


def _api_server(folder: Path, log: Path) -> list[str]:
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        f"--advertise-address={CONTROL_IP}",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--client-ca-file={folder}/ca.crt",
        f"--tls-cert-file={folder}/apiserver.crt",
        f"--tls-private-key-file={folder}/apiserver.key",
        f"--kubelet-client-certificate={folder}/kubelet-client.crt",
        f"--kubelet-client-key={folder}/kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--delete-collection-workers=8",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder}/sa.key",
        f"--service-account-signing-key-file={folder}/sa.key",
        f"--audit-policy-file={CONFIG}/audit.yaml",
        f"--audit-log-path={log}",
    ]


def kubelet(node: NodeFacts) -> list[str]:
    """The kubelet's command line; it finds its files below /etc/kubernetes."""
    return [
        str(binaries.kubernetes() / "kubelet"),
        "--config=/etc/kubernetes/kubelet.yaml",
        "--kubeconfig=/etc/kubernetes/kubelet.kubeconfig",
        f"--hostname-override={node.name}",
        f"--node-ip={node.ip}",
        "--node-labels=nvidia.com/gpu.present=true",
    ]


def kube_proxy(node: NodeFacts) -> list[str]:
    """kube-proxy's command line."""
    config = "--config=/etc/kubernetes/kube-proxy.yaml"
    return [str(binaries.kubernetes() / "kube-proxy"), config, f"--hostname-override={node.name}"]


def make_certificates(authority: pki.Authority, nodes: tuple[NodeFacts, ...]) -> None:
    """Everything that the components need below the authority's folder, kubeconfigs included."""
    authority.make()
    authority.issue_all(CONTROL_CERTIFICATES | {node.name: node.certificate for node in nodes})
    for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy", *(node.name for node in nodes)):
        pki.write(authority.folder / f"{name}.kubeconfig", authority.kubeconfig(name, SERVER))
