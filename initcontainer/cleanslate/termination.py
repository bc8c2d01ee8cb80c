"""SIGTERM: heard from the first moment, since to the first process of a pod it means nothing unless it is handled."""

import signal

EXIT_CODE = 143  # 128 + SIGTERM, as a shell says it
_came = False


class TerminatedError(Exception):
    """SIGTERM came."""


def heed() -> None:
    """From here on SIGTERM raises TerminatedError, wherever the program is: also in a read that never returns."""
    signal.signal(signal.SIGTERM, _terminate)


def check() -> None:
    """Raise TerminatedError if SIGTERM came before.

    For places that a program passes again and again: an exception that the interpreter raises inside one of its own callbacks
    (a weak reference's, during an import) is swallowed there.
    """
    if _came:
        raise TerminatedError


def _terminate(_: int, __: object) -> None:
    global _came  # noqa: PLW0603 - a signal belongs to the process
    _came = True
    raise TerminatedError
