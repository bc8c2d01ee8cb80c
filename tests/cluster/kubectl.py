"""kubectl as a test uses it: objects are dictionaries, and an error carries what kubectl said."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]


class KubectlError(Exception):
    """kubectl ended with an error, or not in time."""


@dataclass(frozen=True, kw_only=True)
class Kubectl:
    """A kubectl, a kubeconfig, and the namespace used where a command names none."""

    program: Path
    kubeconfig: Path
    namespace: str = "default"
    context: str = ""

    def __call__(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
        """Runs kubectl and returns what it printed. Raises KubectlError."""
        try:
            done = subprocess.run(
                self.command(*arguments), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {' '.join(arguments)}: no end in {timeout_s:.0f} s") from error
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        """The command line, for a program that is to run beside the test."""
        context = [f"--context={self.context}"] if self.context else []
        flags = [f"--kubeconfig={self.kubeconfig}", *context, f"--namespace={self.namespace}"]
        return [os.fspath(self.program), *flags, *arguments]

    def within(self, namespace: str) -> "Kubectl":
        """The same in another namespace."""
        return Kubectl(program=self.program, kubeconfig=self.kubeconfig, namespace=namespace, context=self.context)

    def get(self, *arguments: str) -> Object:
        """An object, or a list object. Raises KubectlError where it is not found."""
        return dict(json.loads(self("get", "-o", "json", *arguments)))

    def items(self, *arguments: str) -> list[Object]:
        """The objects of a kind."""
        return list(self.get(*arguments)["items"])

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Server-side apply. Raises KubectlError."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self("apply", "--server-side", "-f", "-", stdin=json.dumps(document))

    def create(self, manifest: Mapping[str, Any]) -> Object:
        """Creates an object and returns it as the API server has it. Raises KubectlError."""
        return dict(json.loads(self("create", "-o", "json", "-f", "-", stdin=json.dumps(manifest))))

    def wait(self, condition: str, *what: str, timeout_s: float = 60.0) -> None:
        """`kubectl wait --for=CONDITION WHAT`. Raises KubectlError, also where it does not come in time."""
        flags = (f"--for={condition}", f"--timeout={timeout_s:.0f}s")
        self("wait", *flags, *what, timeout_s=timeout_s + 10)

    def delete(self, *what: str, timeout_s: float = 60.0) -> None:
        """Deletes and waits until it is gone; what is not there is no error."""
        self("delete", "--ignore-not-found", f"--timeout={timeout_s:.0f}s", *what, timeout_s=timeout_s + 10)

    def execute(self, pod: str, *command: str, container: str = "") -> str:
        """Runs a command in a pod's container. Raises KubectlError."""
        where: Sequence[str] = ("-c", container) if container else ()
        return self("exec", pod, *where, "--", *command)
