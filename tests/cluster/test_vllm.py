"""A real vLLM server in a pod: it leaks there as its shaped double does, and a reset pod ends what is left."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest

from cluster.kubectl import Object
from cluster.nodes import Node
from cluster.tenants import Tenant, as_reset_pod, container, messages, pod
from vllm import install, servers

pytestmark = [pytest.mark.cluster, pytest.mark.vllm, pytest.mark.timeout(600)]

START_DEADLINE_S = 200.0
# The only child of the container's PID 1, which outlives it, is the server's front end.
KILL_FRONT_END = """
import os, signal
children = [int(pid) for pid in open("/proc/1/task/1/children").read().split()]
assert len(children) == 1, children
os.kill(children[0], signal.SIGKILL)
"""
TITLES = """
import glob
print(*{open(path).read().replace(chr(0), " ").strip() for path in glob.glob("/proc/[0-9]*/cmdline")}, sep=chr(10))
"""


def server(tenant: Tenant, environment: Path) -> Object:
    """vLLM from the machine's folder: 6 GB, which no image needs to hold. Its shared memory is an emptyDir, as in its charts.

    The C++ library and the like are the machine's too, which is a Debian as the image is.
    """
    setup = 'mkdir -p /tmp/model && echo "$CONFIG" >/tmp/model/config.json && exec /opt/server/outlive "$@"'
    words = [str(environment / "bin/python"), str(environment / "bin/vllm"), "serve", servers.MODEL, *servers.OPTIONS]
    variables = servers.ENVIRONMENT | {
        "CONFIG": json.dumps(servers.CONFIG),
        "LD_LIBRARY_PATH": f"{sys.base_prefix}/lib:/libraries",
    }
    folders = {"shm": "/dev/shm", "vllm": str(environment), "interpreter": sys.base_prefix, "libraries": "/libraries"}
    folders["lscpu"] = "/usr/bin/lscpu"  # which vLLM asks for the processors
    return container(
        "vllm",
        tenant.images("server"),
        command=["sh", "-c", setup, "sh", *words],
        env=[{"name": name, "value": value} for name, value in variables.items()],
        readinessProbe={"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        volumeMounts=[{"name": name, "mountPath": path} for name, path in folders.items()],
    )


def volumes(environment: Path) -> list[Object]:
    return [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}},
        {"name": "vllm", "hostPath": {"path": str(environment)}},
        {"name": "interpreter", "hostPath": {"path": os.path.realpath(sys.base_prefix)}},
        {"name": "libraries", "hostPath": {"path": f"/usr/lib/{platform.machine()}-linux-gnu"}},
        {"name": "lscpu", "hostPath": {"path": "/usr/bin/lscpu"}},
    ]


def test_what_a_dead_vllm_leaves_in_its_pod_is_ended_by_a_reset_pod(tenant: Tenant, node: Node) -> None:
    """Engine, worker and shared memory outlive the front end; after the reset none is there, and the container is the same."""
    environment = install.environment()
    tenant.kubectl.create(pod("vllm", server(tenant, environment), node=node.name, volumes=volumes(environment)))
    tenant.kubectl.wait("condition=Ready", "pod/vllm", timeout_s=START_DEADLINE_S)
    uid = tenant.kubectl.get("pod", "vllm")["metadata"]["uid"]
    shm = node.space.path(f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/shm")
    tenant.kubectl.execute("vllm", "/usr/bin/python3", "-c", KILL_FRONT_END)
    left = tenant.kubectl.execute("vllm", "/usr/bin/python3", "-c", TITLES)
    assert "VLLM::EngineCore" in left
    assert "VLLM::Worker" in left
    assert [name for name in os.listdir(shm) if name.startswith("psm_")]

    reset = container("reset", tenant.images("node-program"), "reset", "--host-root", "/host")
    reset["args"] += ["--shm-min-age", "0s", "--termination-message", "/dev/termination-log"]
    tenant.kubectl.create(as_reset_pod(pod("reset", reset, node=node.name)))
    done = tenant.await_phase("reset", "Succeeded")
    assert messages(done)["reset"]["result"] == "Clean"
    assert "VLLM::" not in tenant.kubectl.execute("vllm", "/usr/bin/python3", "-c", TITLES)
    assert os.listdir(shm) == []
    assert tenant.kubectl.get("pod", "vllm")["status"]["containerStatuses"][0]["restartCount"] == 0
