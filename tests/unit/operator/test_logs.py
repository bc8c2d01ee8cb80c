"""The log: JSON, one object a line, with what matters and without what must not be in it."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from cleanslate_operator import logs

TOKEN = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJl"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the log goes for one test; the root logger is as it was after it."""
    root, into = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    logs.configure("info", into)
    yield into
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("kopf", "aiohttp", "asyncio"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """What was logged."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_time_level_logger_message_and_extras(stream: io.StringIO) -> None:
    """In UTC, and plain values only: what kopf hands over besides is not for the log."""
    logging.getLogger("some").warning(
        "node %s: done", "gpu-17", extra={"reset": "pool-a", "nodes": 2, "settings": object()}
    )
    (line,) = lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {"level": "warning", "logger": "some", "message": "node gpu-17: done", "reset": "pool-a", "nodes": 2}


def test_an_exception_is_one_field(stream: io.StringIO) -> None:
    """A traceback does not break the one-line rule."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("some").exception("look")
    (line,) = lines(stream)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].rstrip().endswith("two\nlines")


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {TOKEN}",
        "authorization: bearer 0123456789abcdef",
        "{'Authorization': 'Basic dXNlcjpwYXNzd29yZA=='}",
        f"a token alone: {TOKEN}",
    ],
)
def test_a_credential_is_never_in_the_log(stream: io.StringIO, text: str) -> None:
    """Neither in a message nor in an extra nor in an exception."""
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("some").exception("%s", text, extra={"header": text})
    raw = stream.getvalue()
    assert "(hidden)" in raw
    assert TOKEN not in raw
    assert "0123456789abcdef" not in raw
    assert "dXNlcjpwYXNzd29yZA" not in raw


@pytest.mark.parametrize(
    ("message", "argument", "logged"),
    [
        ("%d nodes", "many", "%d nodes ('many',)"),
        ("%s", "x" * 100_000, "x" * 8192 + "… and 91808 more characters"),
    ],
    ids=["a wrong argument", "a long one"],
)
def test_what_does_not_fit_is_logged_all_the_same(message: str, argument: str, logged: str) -> None:
    """A mistake in a log line is no reason to stop."""
    record = logging.makeLogRecord({"msg": message, "args": (argument,), "levelname": "INFO"})
    assert json.loads(logs.JsonFormatter().format(record))["message"] == logged


def test_kopf_is_heard_from_warnings_on(stream: io.StringIO) -> None:
    """It tells of every step otherwise."""
    logging.getLogger("kopf.objects").info("not this")
    logging.getLogger("kopf.objects").warning("this")
    logging.getLogger("cleanslate_operator.leader").info("and this")
    logging.getLogger("cleanslate_operator.leader").debug("not this")
    assert [line["message"] for line in lines(stream)] == ["this", "and this"]
