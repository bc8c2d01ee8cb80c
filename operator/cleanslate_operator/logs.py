"""The log: one JSON object a line on stderr, kopf's included, and never a credential."""

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, TextIO

_TEXT_LIMIT = 8192
_SECRET = re.compile(
    r"(?i:\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"  # the value of an Authorization header
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"  # a JSON web token, wherever it is
)
_HIDDEN = "(hidden)"
_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_PLAIN = (str, int, float, bool, type(None))
_EXTRAS_LIMIT = 16


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, what was given as `extra`, and the exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _clean(_message(record)),
        }
        line.update(_extras(record))
        if record.exc_info:
            line["exception"] = _clean("".join(traceback.format_exception(*record.exc_info)))
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, stream: TextIO | None = None) -> None:
    """Log from `level` on to stderr. kopf tells of every step it takes: it is heard from warnings on, unless `level` is debug."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
    quiet = logging.DEBUG if level == "debug" else max(logging.WARNING, root.level)
    for name in ("kopf", "aiohttp", "asyncio"):
        logging.getLogger(name).setLevel(quiet)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # arguments that do not fit are the log's problem, not the operator's
        return f"{record.msg} {record.args}"


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`, plain values only: kopf hands over whole objects and its settings."""
    given = [(name, value) for name, value in record.__dict__.items() if name not in _OWN and isinstance(value, _PLAIN)]
    return {name: _clean(value) if isinstance(value, str) else value for name, value in given[:_EXTRAS_LIMIT]}


def _clean(text: str) -> str:
    cut = text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}… and {len(text) - _TEXT_LIMIT} more characters"
    return _SECRET.sub(_HIDDEN, cut)
