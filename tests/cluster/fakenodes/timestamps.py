"""Unix times as the API writes them."""

import datetime as dt


def rfc3339(time_s: float) -> str:
    """Whole seconds, as in metav1.Time."""
    return dt.datetime.fromtimestamp(int(time_s), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(time_s: float) -> str:
    """Microseconds, as in metav1.MicroTime (leases)."""
    return dt.datetime.fromtimestamp(time_s, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
