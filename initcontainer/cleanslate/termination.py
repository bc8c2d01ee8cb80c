"""SIGTERM: heard from the first moment, since to the first process of a pod it means nothing unless it is handled."""

import signal

EXIT_CODE = 143  # 128 + SIGTERM, as a shell says it


class TerminatedError(Exception):
    """SIGTERM came."""


def heed() -> None:
    """From here on SIGTERM raises TerminatedError, wherever the program is: also in a read that never returns."""

    def terminate(_: int, __: object) -> None:
        raise TerminatedError

    signal.signal(signal.SIGTERM, terminate)
