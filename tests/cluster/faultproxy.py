"""A proxy between a client (the operator, kubectl) and the API server that makes faults on demand.

Requests pass unchanged but for the faults, which are context managers:

    with FaultProxy(upstream=..., ca=..., certificate=..., key=..., identity=admin, folder=tmp_path) as proxy:
        environment["KUBECONFIG"] = str(proxy.kubeconfig())
        with proxy.answering(429, verb="patch", resource="gpunoderesets/status", retry_after_s=1, times=3) as fault:
            fault.wait(hits=3)

A fault is active until its block ends; of several that match a request, the one that began first counts. Requests are chosen
by `verb`, `group`, `resource`, `namespace`, `name`, `path` and `user_agent`, each a pattern (fnmatch) or a tuple of patterns,
in the API server's words: `resource="pods"` is pods without subresources, "pods/*" their subresources, group "" the core.
"""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from cluster import pki
from cluster.programs.proxy.apirequest import ApiRequest
from cluster.programs.proxy.faults import Fault, Kind, Which
from cluster.programs.proxy.settings import Settings
from cluster.proxyprocess import ProxyProcess

_DEADLINE_S = 10.0


class Selection(TypedDict, total=False):
    """Which requests; all for none given."""

    verb: str | tuple[str, ...]
    group: str | tuple[str, ...]
    resource: str | tuple[str, ...]
    namespace: str | tuple[str, ...]
    name: str | tuple[str, ...]
    path: str | tuple[str, ...]
    user_agent: str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest(ApiRequest):
    """A request that the proxy got: when, in seconds of the epoch, and the code that the client saw, None for no answer."""

    time_s: float
    code: int | None


class ActiveFault:
    """A fault; a context manager that keeps it active. Made by FaultProxy's methods."""

    def __init__(self, process: ProxyProcess, fault: Fault) -> None:
        self._process = process
        self._fault = fault
        self._number: int | None = None
        self._final_hits = 0

    def __enter__(self) -> Self:
        self._number = self._process.ask("begin", fault=self._fault.to_json())["number"]
        return self

    def __exit__(self, *_: object) -> None:
        number, self._number = self._number, None
        self._final_hits = self._process.ask("end", number=number)["hits"]

    @property
    def hits(self) -> int:
        """How many requests or watch streams (for `down`: connections) it has hit; stays readable after the block."""
        return self._ask_hits(0, 0.0)

    def wait(self, hits: int = 1, *, deadline_s: float = _DEADLINE_S) -> None:
        """Blocks until it has hit that often. Raises TimeoutError."""
        found = self._ask_hits(hits, deadline_s)
        if found < hits:
            wanted = f"{hits} hits within {deadline_s:.0f} s, {found} came"
            raise TimeoutError(
                f"fault {self._fault.kind} on {self._fault.which.patterns}: {wanted}; see proxy.requests()"
            )

    def _ask_hits(self, at_least: int, deadline_s: float) -> int:
        if self._number is None:
            return self._final_hits
        asked = {"number": self._number, "at_least": at_least, "deadline_s": deadline_s}
        return int(self._process.ask("hits", patience_s=deadline_s, **asked)["hits"])


class FaultProxy:
    """A running proxy; a context manager that ends it.

    `certificate` and `key` are shown to the clients, `ca` has to have signed them and the API server's. `listen_in` and
    `connect_in` are network namespaces, each given by a process in it or by a file; None is the caller's own. `folder` gets
    the kubeconfigs and the log. The proxy ends with this process, however that ends. Needs root for namespaces only.

    A client's bearer token passes through. A client certificate cannot pass: with `identity`, a kubeconfig that has
    one, whoever brings no token is that user to the API server.
    """

    def __init__(
        self,
        *,
        upstream: str,
        ca: Path,
        certificate: Path,
        key: Path,
        folder: Path,
        identity: Path | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
        listen_in: int | Path | None = None,
        connect_in: int | Path | None = None,
    ) -> None:
        self._ca = ca
        self._folder = folder
        # kubectl asks at the terminal for a password if it has no credential at all; the proxy asks for no certificate
        self._unused = {"client-certificate": str(certificate.absolute()), "client-key": str(key.absolute())}
        settings = Settings(
            upstream=upstream,
            ca=str(ca.absolute()),
            certificate=str(certificate.absolute()),
            key=str(key.absolute()),
            identity="" if identity is None else str(identity.absolute()),
            address=address,
            port=port,
            listen_in=_namespace(listen_in),
            connect_in=_namespace(connect_in),
        )
        self._process = ProxyProcess(settings, folder / "faultproxy.log")

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    @property
    def pid(self) -> int:
        """The process of the proxy."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Where it listens."""
        address, port = self._process.address
        host = f"[{address}]" if ":" in address else address
        return f"https://{host}:{port}"

    def kubeconfig(self, *, token: str | None = None) -> Path:
        """Writes a kubeconfig, JSON and so YAML, that leads to the proxy; without a token the client is `identity`."""
        cluster = {"server": self.url, "certificate-authority": str(self._ca.absolute())}
        descriptor, path = tempfile.mkstemp(prefix="proxy-", suffix=".kubeconfig", dir=self._folder)
        os.close(descriptor)
        return pki.write(Path(path), pki.kubeconfig(cluster, self._unused if token is None else {"token": token}))

    def requests(self, *, since_s: float = 0.0, **which: Unpack[Selection]) -> tuple[LoggedRequest, ...]:
        """What has come in later than `since_s` (seconds of the epoch), in order."""
        return self._requests(since_s, 0, 0.0, which)

    def wait_for_requests(
        self, count: int = 1, *, since_s: float = 0.0, deadline_s: float = _DEADLINE_S, **which: Unpack[Selection]
    ) -> tuple[LoggedRequest, ...]:
        """The same, once `count` of them have an answer; a watch has it as soon as it runs. Raises TimeoutError."""
        began = time.monotonic()
        found = self._requests(since_s, count, deadline_s, which)
        if sum(one.code is not None for one in found) < count:
            took = f"{time.monotonic() - began:.0f} s"
            raise TimeoutError(f"proxy: {len(found)} requests like {which} in {took}, {count} answered were expected")
        return found

    def forget_requests(self) -> None:
        """Starts the log afresh; requests that are under way no longer show."""
        self._process.ask("forget")

    def answering(
        self,
        code: int,
        *,
        reason: str = "",
        message: str = "",
        retry_after_s: int | None = None,
        upstream_first: bool = False,
        times: int | None = None,
        skip: int = 0,
        every: int = 1,
        **which: Unpack[Selection],
    ) -> ActiveFault:
        """Answers a Status with this code in the API server's place; `reason` "" is the one that goes with the code.

        With `upstream_first` the API server does what was asked, and only then the client is told otherwise. The first `skip`
        requests pass, and from there on the first of `every` so many is hit.
        """
        return self._fault(
            Kind.ANSWER,
            which,
            code=code,
            reason=reason,
            message=message,
            retry_after_s=retry_after_s,
            upstream_first=upstream_first,
            times=times,
            skip=skip,
            every=every,
        )

    def killing(
        self, pid: int, *, upstream_first: bool = False, skip: int = 0, **which: Unpack[Selection]
    ) -> ActiveFault:
        """Ends the client by SIGKILL at its request after `skip` others, once: before or, `upstream_first`, after it is done.

        `pid` has to be the only client of this proxy that makes such requests, or another process is killed for its sake.
        """
        return self._fault(Kind.KILL, which, pid=pid, upstream_first=upstream_first, skip=skip, times=1)

    def silencing(self, *, times: int | None = None, skip: int = 0, **which: Unpack[Selection]) -> ActiveFault:
        """Takes new requests and never answers: their connections are cut when the block ends; the API server is not asked."""
        return self._fault(Kind.SILENCE, which, times=times, skip=skip)

    def delaying(self, seconds: float, *, times: int | None = None, **which: Unpack[Selection]) -> ActiveFault:
        """Passes requests on later, at the block's end at the latest."""
        return self._fault(Kind.DELAY, which, seconds=seconds, times=times)

    def holding(self, *, times: int | None = None, **which: Unpack[Selection]) -> ActiveFault:
        """Lets new requests hang, and passes them on when the block ends. Running watches go on: see stalling_watches."""
        return self._fault(Kind.HOLD, which, times=times)

    def resetting(
        self, *, after_headers: bool = False, times: int | None = None, **which: Unpack[Selection]
    ) -> ActiveFault:
        """Resets the connection: at once, without asking the API server, or after the headers of its answer."""
        return self._fault(Kind.HEADERS_ONLY if after_headers else Kind.RESET, which, times=times)

    def losing_answers(self, *, times: int | None = None, **which: Unpack[Selection]) -> ActiveFault:
        """The API server does what is asked, and the client's connection is reset before the answer. Not for watches."""
        return self._fault(Kind.LOSE, which, times=times)

    def truncating(
        self, *, after_bytes: int | None = None, times: int | None = None, **which: Unpack[Selection]
    ) -> ActiveFault:
        """Ends the connection within the answer's body, after half of it for None. Not for watches."""
        return self._fault(Kind.TRUNCATE, which, after_bytes=after_bytes, times=times)

    def cutting_watches(
        self,
        *,
        now: bool = True,
        after_events: int | None = None,
        after_s: float | None = None,
        cleanly: bool = False,
        times: int | None = None,
        **which: Unpack[Selection],
    ) -> ActiveFault:
        """Ends watches: those that run `now`, and each new one after so many events (bookmarks count) or seconds.

        By a reset, or after events by an early end of file, so that they do arrive; `cleanly` as the API server ends a
        stream at its timeout.
        """
        limits = {"now": now, "after_events": after_events, "after_s": after_s}
        return self._fault(Kind.CUT_WATCHES, _of_watches(which), cleanly=cleanly, times=times, **limits)

    def watches_gone(self, *, now: bool = True, times: int | None = None, **which: Unpack[Selection]) -> ActiveFault:
        """Ends watches by an ERROR event with code 410: those that run `now`, and each new one as its first event.

        A running stream that is not JSON is cut instead. A client that obeys lists again and watches: see `times`.
        """
        return self._fault(Kind.WATCHES_GONE, _of_watches(which), now=now, times=times)

    def stalling_watches(self, **which: Unpack[Selection]) -> ActiveFault:
        """Keeps watches open and silent, running and new ones; what was withheld comes when the block ends.

        A hit is a stream from which an event was withheld.
        """
        return self._fault(Kind.STALL_WATCHES, _of_watches(which))

    def down(self) -> ActiveFault:
        """Refuses connections, and resets those that there are."""
        return self._fault(Kind.DOWN, {})

    def _fault(self, kind: Kind, which: Selection, **settings: Any) -> ActiveFault:
        return ActiveFault(self._process, Fault(kind=kind, which=Which.of(**which), **settings))

    def _requests(
        self, since_s: float, answered: int, deadline_s: float, which: Selection
    ) -> tuple[LoggedRequest, ...]:
        asked = {
            "which": Which.of(**which).patterns,
            "since_s": since_s,
            "answered": answered,
            "deadline_s": deadline_s,
        }
        found = self._process.ask("requests", patience_s=deadline_s, **asked)["requests"]
        return tuple(LoggedRequest(**one) for one in found)


def _of_watches(which: Selection) -> Selection:
    return {"verb": "watch", **which}


def _namespace(place: int | Path | None) -> str:
    if place is None:
        return ""
    return f"/proc/{place}/ns/net" if isinstance(place, int) else str(place.absolute())
