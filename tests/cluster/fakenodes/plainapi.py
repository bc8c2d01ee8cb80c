"""The API server for code that waits: single requests and watches with a deadline, over the standard library."""

import json
import pathlib
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Set
from typing import Any

from cluster.fakenodes import kubeconfig

REQUEST_S = 30.0


class PlainApi:
    """One API server, by a kubeconfig."""

    def __init__(self, path: pathlib.Path) -> None:
        self._access = kubeconfig.read(path)

    def ask(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> dict[str, Any]:
        """The object that the server answers with. Raises urllib.error.HTTPError with the server's text."""
        with self._open(method, path, body, content, REQUEST_S) as reply:
            return json.loads(reply.read())

    def until(
        self,
        path: str,
        meets: Callable[[dict[str, Any]], bool],
        *,
        timeout_s: float,
        kinds: Set[str] = frozenset({"ADDED", "MODIFIED"}),
        **query: str,
    ) -> dict[str, Any]:
        """The first object in a collection of which `meets` is true, by a watch for events of these kinds.

        Without a resourceVersion in the query it begins with the objects that are there. Raises TimeoutError with the last
        event seen.
        """
        deadline_s = time.monotonic() + timeout_s
        last = None
        while (left_s := deadline_s - time.monotonic()) > 0:
            parameters = urllib.parse.urlencode({"watch": "true", "timeoutSeconds": str(int(left_s) + 1), **query})
            try:
                with self._open("GET", f"{path}?{parameters}", None, "", left_s) as events:
                    for line in events:
                        last = json.loads(line)
                        if last["type"] in kinds and meets(last["object"]):
                            return last["object"]
            except TimeoutError:
                break
        raise TimeoutError(
            f"{path} {query}: nothing that was waited for in {timeout_s:.0f} s; last: {str(last)[:1500]}"
        )

    def _open(self, method: str, path: str, body: Any, content: str, timeout_s: float) -> Any:
        headers = {"Content-Type": content} | (
            {"Authorization": f"Bearer {token}"} if (token := self._access.token) else {}
        )
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._access.server + path, data=data, headers=headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=timeout_s, context=self._access.tls)
        except urllib.error.HTTPError as error:
            error.add_note(f"{method} {path}: {error.read()[:1000].decode(errors='replace')}")
            raise
