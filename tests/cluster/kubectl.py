"""kubectl as a test uses it: objects are dictionaries, and an error carries what kubectl said."""

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]
_MORTAL = ("setpriv", "--pdeathsig=KILL")  # whoever waits for it may be killed, and then nobody would


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
                [*_MORTAL, *self.command(*arguments)],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
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

    def watch(self, kind: str, name: str, *, timeout_s: float = 60.0) -> Iterator[Object]:
        """An object as it is, then as it changes. Raises KubectlError when the time is over or the watch ends.

        As a list of one: of a single object kubectl hides what changes between its first look and its watch.
        """
        deadline, what = time.monotonic() + timeout_s, (kind, f"--field-selector=metadata.name={name}")
        argv = self.command("get", *what, "--watch", "-o", "json")
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                yield from _objects(process.stdout.fileno(), deadline)
            finally:
                process.kill()
            said = process.stderr.read().decode().strip()
        raise KubectlError(
            f"kubectl get {' '.join(what)} --watch: {said or f'nothing came of it in {timeout_s:.0f} s'}"
        )

    def first_line(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """The first line that a command prints, which may go on for ever. Raises KubectlError if none comes in time."""
        deadline, line = time.monotonic() + timeout_s, b""
        with subprocess.Popen(self.command(*arguments), stdout=subprocess.PIPE) as process:
            stream = process.stdout.fileno()
            while not line.endswith(b"\n") and select.select([stream], [], [], max(0, deadline - time.monotonic()))[0]:
                byte = os.read(stream, 1)
                if not byte:
                    break
                line += byte
            process.kill()
        if not line.endswith(b"\n"):
            raise KubectlError(f"kubectl {' '.join(arguments)}: printed no line in {timeout_s:.0f} s, but {line!r}")
        return line.decode().rstrip("\n")

    def until(self, kind: str, name: str, is_so: Callable[[Object], bool], *, timeout_s: float = 60.0) -> Object:
        """The first object seen of which `is_so` holds. Raises KubectlError with the last one seen when the time is over."""
        last: Object = {}
        try:
            for last in self.watch(kind, name, timeout_s=timeout_s):
                if is_so(last):
                    return last
        except KubectlError as error:
            raise KubectlError(f"{error}; last seen: {json.dumps(last.get('status', last))[:2000]}") from error
        raise KubectlError(f"{kind} {name}: the watch ended")

    def delete(self, *what: str, timeout_s: float = 60.0) -> None:
        """Deletes and waits until it is gone; what is not there is no error."""
        self("delete", "--ignore-not-found", f"--timeout={timeout_s:.0f}s", *what, timeout_s=timeout_s + 10)

    def execute(self, pod: str, *command: str, container: str = "") -> str:
        """Runs a command in a pod's container. Raises KubectlError."""
        where: Sequence[str] = ("-c", container) if container else ()
        return self("exec", pod, *where, "--", *command)


def _objects(stream: int, deadline: float) -> Iterator[Object]:
    """JSON objects from a pipe, each as soon as it is whole, until the pipe or the time ends."""
    decoder, text = json.JSONDecoder(), ""
    while select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(stream, 1 << 20)
        if not chunk:
            return
        text += chunk.decode()
        while text := text.lstrip():
            try:
                found, end = decoder.raw_decode(text)
            except ValueError:
                break  # the rest of it is still to come
            yield found
            text = text[end:]
