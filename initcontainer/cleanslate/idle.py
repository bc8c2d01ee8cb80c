"""`cleanslate idle`: what a reset pod's main container does, so that its results stay to be read. Waits for SIGTERM."""

import signal


def idle() -> int:
    """Block until SIGTERM or SIGINT comes, then return 0. Imports nothing, holds nothing."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.sigwait(ends)
    return 0
