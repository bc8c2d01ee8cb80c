"""The fault proxy between kubectl and a real API server."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import IO

import pytest

from cluster import tenants
from cluster.faultproxy import FaultProxy
from cluster.kubectl import Kubectl, KubectlError
from cluster.tenants import Tenant

pytestmark = pytest.mark.cluster


@pytest.fixture
def through(proxy: FaultProxy, tenant: Tenant) -> Kubectl:
    """kubectl in the test's namespace, by way of the proxy."""
    return replace(tenant.kubectl, kubeconfig=proxy.kubeconfig(), context="")


def _config_map(name: str, value: str = "") -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"value": value}}


@contextmanager
def _output(kubectl: Kubectl, *arguments: str) -> Iterator[IO[str]]:
    """What a kubectl that does not end by itself prints."""
    with subprocess.Popen(kubectl.command(*arguments), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def test_kubectl_works_through_the_proxy(proxy: FaultProxy, through: Kubectl, tenant: Tenant) -> None:
    """Create, server-side apply, get and delete are the API server's; the log names them as RBAC does."""
    through.create(_config_map("one"))
    through.apply(_config_map("one", "applied") | {"data": {"other": "applied"}})
    assert tenant.kubectl.get("configmap", "one")["data"] == {"value": "", "other": "applied"}
    through.delete("configmap", "one")
    asked = proxy.requests(resource="configmaps", namespace=tenant.name, name="one", verb=("create", "patch", "delete"))
    assert [(one.verb, one.code) for one in asked] == [("create", 201), ("patch", 200), ("delete", 200)]
    assert asked[0].user_agent.startswith("kubectl/")


def test_token_decides_who_the_client_is(proxy: FaultProxy, through: Kubectl, tenant: Tenant) -> None:
    """A service account stays one, though the proxy could be the administrator."""
    token = through("create", "token", "default").strip()
    weak = replace(through, kubeconfig=proxy.kubeconfig(token=token))
    with pytest.raises(KubectlError, match=f"system:serviceaccount:{tenant.name}:default.* cannot list resource"):
        weak.items("secrets")
    assert "system:masters" in through("auth", "whoami", "-o", "json")


def test_kubectl_waits_as_429_tells_it(proxy: FaultProxy, through: Kubectl) -> None:
    """client-go tries again by itself after Retry-After; each try is in the log."""
    with proxy.answering(429, verb="create", resource="configmaps", retry_after_s=1, times=1) as fault:
        through.create(_config_map("one"))
        assert fault.hits == 1
    codes = [(one.time_s, one.code) for one in proxy.requests(verb="create", name="one")]
    assert [code for _, code in codes] == [429, 201]
    assert codes[1][0] - codes[0][0] >= 1.0


def test_lost_answer_leaves_the_object(proxy: FaultProxy, through: Kubectl, tenant: Tenant) -> None:
    """kubectl fails, and the object is there."""
    with proxy.losing_answers(verb="create", resource="configmaps"), pytest.raises(KubectlError, match=r"EOF|reset"):
        through.create(_config_map("one"))
    assert tenant.kubectl.get("configmap", "one")["metadata"]["name"] == "one"


def test_watch_comes_through_as_it_happens(proxy: FaultProxy, through: Kubectl, tenant: Tenant) -> None:
    """Each event when it happens; a stall withholds them; a cut ends kubectl's watch."""
    tenant.kubectl.create(_config_map("one"))
    with _output(through, "get", "configmap", "one", "--watch", "-o", "jsonpath={.data.value}{'\\n'}") as lines:
        assert lines.readline() == "\n"
        proxy.wait_for_requests(1, verb="watch", name="one")
        _set(tenant, "first")
        assert lines.readline() == "first\n"
        with ThreadPoolExecutor(1) as aside:
            with proxy.stalling_watches(name="one") as stall:
                _set(tenant, "second")
                stall.wait()
                line = aside.submit(lines.readline)
                assert not line.done()
            assert line.result(10) == "second\n"
        with proxy.cutting_watches(name="one") as cut:
            assert lines.read() == ""
            assert cut.hits == 1


def _set(tenant: Tenant, value: str) -> None:
    tenant.kubectl("patch", "configmap", "one", "-p", f'{{"data": {{"value": "{value}"}}}}')


def test_gone_is_what_the_api_server_says_of_an_old_version(
    proxy: FaultProxy, through: Kubectl, tenant: Tenant
) -> None:
    """The client takes the event for the API server's own."""
    tenant.kubectl.create(_config_map("one"))
    with proxy.watches_gone(resource="configmaps") as fault:
        printed = through("get", "configmaps", "--watch", "--output-watch-events")
        assert fault.hits == 1
    assert printed.splitlines()[-1].split(maxsplit=3) == [
        "ERROR",
        "Failure",
        "Expired",
        "too old resource version: 1 (2)",
    ]


def test_logs_and_exec_pass(proxy: FaultProxy, through: Kubectl, tenant: Tenant) -> None:
    """`logs -f` line by line, `exec` by WebSocket with its exit code."""
    script = "import time\nprint('began', flush=True)\ntime.sleep(3600)"
    one = tenants.container("main", tenant.images("python"), command=["python3", "-c", script])
    tenant.run(tenants.pod("p", one))
    with _output(through, "logs", "-f", "p") as lines:
        assert lines.readline() == "began\n"
    assert through("exec", "p", "--", "sh", "-c", "echo said") == "said\n"
    with pytest.raises(KubectlError, match="exit code 7"):
        through("exec", "p", "--", "sh", "-c", "exit 7")
    assert {one.code for one in proxy.requests(resource="pods/exec")} == {101}


def test_api_server_that_is_down_comes_back(proxy: FaultProxy, through: Kubectl) -> None:
    """Refused while it is down, served afterwards at the same address."""
    with proxy.down(), pytest.raises(KubectlError, match="refused"):
        through.items("configmaps")
    assert [one["metadata"]["name"] for one in through.items("configmaps")] == ["kube-root-ca.crt"]


# As an in-cluster client does it: the token and the authority of its service account.
_ASK = """
import os, ssl, urllib.error, urllib.request
folder = '/var/run/secrets/kubernetes.io/serviceaccount/'
trust = ssl.create_default_context(cafile=folder + 'ca.crt')
bearer = {'Authorization': 'Bearer ' + open(folder + 'token').read()}
for path in ('/version', '/api/v1/nodes'):
    try:
        print(urllib.request.urlopen(urllib.request.Request(os.environ['URL'] + path, headers=bearer), context=trust).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


def test_a_pod_meets_the_faults_with_its_own_identity(inner_proxy: FaultProxy, tenant: Tenant) -> None:
    """What is not answered by the proxy is answered by the API server, to the pod's service account and its rights."""
    main = tenants.python("main", tenant.images("python"), _ASK, env=[{"name": "URL", "value": inner_proxy.url}])
    with inner_proxy.answering(429, path="/version") as fault:
        tenant.run(tenants.pod("asks", main, automountServiceAccountToken=True), phase="Succeeded")
        assert fault.hits == 1
    assert tenant.logs("asks").split() == ["429", "403"]
