"""Simulated nodes for a test: `FakeNodes` starts them in a process of their own and talks to it."""

import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any, Self

from cluster.fakenodes import behaviours
from cluster.fakenodes.behaviours import Behaviour, Rule
from cluster.fakenodes.fleets import CONNECTIONS
from cluster.spaces import Space

TESTS = pathlib.Path(__file__).resolve().parents[2]
ANSWER_S = 60.0  # for what takes no time of its own
SAID_BYTES = 2000
END_S = 150.0  # more than the process's own CLEANUP_S


class FakeNodesError(RuntimeError):
    """The process refused something, or has ended; with what it said."""


class FakeNodes:
    """`count` simulated nodes, called `prefix`-0000 and so on, for as long as the context lasts.

    `subsets` gives labels to the nodes whose name matches a pattern. Pods behave as the first matching of `rules` says, else
    as `behaviour`. Wherever nodes are named, shell patterns may stand for many. At the end nodes, leases and the pods that are
    left on the nodes are removed, also if the test's process is killed, but not with `keep`, for a cluster that is taken down
    anyway. `renew_s`: see leases.interval_s. `within`: in whose network the kubeconfig's address is reached.
    """

    def __init__(
        self,
        kubeconfig: pathlib.Path,
        *,
        count: int,
        prefix: str = "sim",
        labels: Mapping[str, str] | None = None,
        subsets: Mapping[str, Mapping[str, str]] | None = None,
        behaviour: Behaviour | None = None,
        rules: Iterable[Rule] = (),
        renew_s: float | None = None,
        connections: int = CONNECTIONS,
        within: Space | None = None,
        keep: bool = False,
    ) -> None:
        self.count = count
        self.prefix = prefix
        self._rules = tuple(rules)
        self._behaviour = behaviour or Behaviour()
        program = (sys.executable, "-m", "cluster.fakenodes", "--control", f"--kubeconfig={kubeconfig}")
        self._argv = within.command(*program, namespaces="--net") if within else [*program]
        self._argv += ["--keep"] if keep else []
        self._argv += [f"--count={count}", f"--prefix={prefix}", f"--connections={connections}"]
        self._argv += [f"--renew-s={renew_s}"] if renew_s else []
        self._argv += [f"--label={key}={value}" for key, value in (labels or {}).items()]
        for pattern, more in (subsets or {}).items():
            self._argv += [f"--subset={pattern}:{key}={value}" for key, value in more.items()]

    def __enter__(self) -> Self:
        self._stderr = tempfile.TemporaryFile()
        # A session of its own: Ctrl-C reaches the test, which then ends this in order.
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            bufsize=0,
            start_new_session=True,
        )
        self._rest = b""
        try:
            self._send_rules()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        said = self._said()
        self._process.stdout.close()
        self._stderr.close()
        if code != 0:
            raise FakeNodesError(f"nodes {self.prefix}-*: cannot end in order: exit code {code}; {said}")

    @property
    def names(self) -> tuple[str, ...]:
        """Of all nodes."""
        return tuple(f"{self.prefix}-{index:04d}" for index in range(self.count))

    @property
    def figures(self) -> dict[str, Any]:
        """Counts and latencies so far: see Figures.data and Fleet.data."""
        return self._ask("figures")

    def wait_registered(self, timeout_s: float) -> float:
        """Until the API shows all nodes Ready and untainted; the seconds it took. Raises FakeNodesError at the deadline."""
        return self._ask("wait_registered", ANSWER_S + timeout_s, timeout_s=timeout_s)

    def set_behaviour(self, behaviour: Behaviour, *rules: Rule) -> None:
        """Replaces all rules and the default. Pods that are there go on from where they are in the new way."""
        self._behaviour, self._rules = behaviour, rules
        self._send_rules()

    def silence(self, *names: str) -> int:
        """These nodes say nothing any more. How many there are; that many also from the other methods."""
        return self._ask("silence", names=names)

    def wake(self, *names: str) -> int:
        """They answer again and report what happened to their pods."""
        return self._ask("wake", names=names)

    def set_ready(self, *names: str) -> int:
        """Their Ready condition is True."""
        return self._ask("set_ready", names=names, message="")

    def set_not_ready(self, *names: str, message: str = "container runtime is down") -> int:
        """Their Ready condition is False with this message; they go on answering."""
        return self._ask("set_ready", names=names, message=message)

    def skew(self, *names: str, seconds: float) -> int:
        """Their clocks are that many seconds ahead."""
        return self._ask("skew", names=names, skew_s=seconds)

    def remove(self, *names: str) -> int:
        """Deletes Node and Lease, as when machines are given back."""
        return self._ask("remove", names=names)

    def register(self, *names: str) -> int:
        """Registers removed nodes anew."""
        return self._ask("register", names=names)

    def _send_rules(self) -> None:
        rules = (*self._rules, Rule(behaviour=self._behaviour))
        self._ask("behave", rules=behaviours.to_data(rules))

    def _ask(self, what: str, deadline_s: float = ANSWER_S, /, **values: Any) -> Any:
        assert self._process.stdin
        question = json.dumps({"do": what, "with": values}).encode() + b"\n"
        try:
            self._process.stdin.write(question)
        except BrokenPipeError:
            raise FakeNodesError(
                f"nodes {self.prefix}-*: cannot {what}: the process has ended; {self._said()}"
            ) from None
        answer = json.loads(self._line(what, time.monotonic() + deadline_s))
        if "error" in answer:
            raise FakeNodesError(f"nodes {self.prefix}-*: cannot {what}: {answer['error']}")
        return answer["answer"]

    def _line(self, what: str, deadline_s: float) -> bytes:
        assert self._process.stdout
        stream = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([stream], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise FakeNodesError(f"nodes {self.prefix}-*: cannot {what}: no answer in time; {self._said()}")
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                raise FakeNodesError(f"nodes {self.prefix}-*: cannot {what}: the process has ended; {self._said()}")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _said(self) -> str:
        """The end of what the process wrote on stderr."""
        size = os.fstat(self._stderr.fileno()).st_size
        # pread, since the offset is the process's too
        return os.pread(self._stderr.fileno(), SAID_BYTES, max(0, size - SAID_BYTES)).decode(errors="replace")
