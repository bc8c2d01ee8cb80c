"""Times as the API writes them, and as the operator counts them: Unix time in seconds."""

from datetime import UTC, datetime
from typing import Any


def rfc3339(moment_s: float) -> str:
    """A moment as metav1.Time writes it: UTC, whole seconds."""
    return datetime.fromtimestamp(int(moment_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def unix_s(text: Any) -> float | None:
    """The moment in a metav1.Time or MicroTime; None if it is not one, as in a status that a human edited."""
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return moment.timestamp() if moment.tzinfo else None
