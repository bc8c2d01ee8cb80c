"""A client that sees what HTTP shows, and nothing made nicer: no retries, no connection kept."""

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Answer:
    """One answer."""

    code: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body's object."""
        return dict(json.loads(self.body))


@dataclass(frozen=True)
class Client:
    """Asks the server at `url`, which an authority's certificate must prove."""

    url: str
    ca: Path
    token: str | None = None

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """The whole answer; whatever goes wrong is raised as http.client raises it."""
        with self.stream(path, method, body, **headers) as response:
            return Answer(response.status, response.headers, response.read())

    @contextmanager
    def stream(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer as it comes; the connection ends with the block. Underscores in names of headers are hyphens."""
        place = urlsplit(self.url)
        context = ssl.create_default_context(cafile=str(self.ca))
        connection = http.client.HTTPSConnection(place.netloc, context=context, timeout=_DEADLINE_S)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token is not None:
            sent["Authorization"] = f"Bearer {self.token}"
        try:
            connection.request(method, path, body=body, headers=sent)
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()
