"""SIGTERM is never lost: not even where the interpreter swallows what a handler raises."""

import subprocess
import sys

SWALLOWED = """
import os, signal, sys, weakref
from cleanslate import termination

class Thing: pass

termination.heed()
thing = Thing()
watch = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM) or [None for _ in range(10_000)])
del thing
print("swallowed", flush=True)
try:
    termination.check()
except termination.TerminatedError:
    print("heard", flush=True)
"""


def test_a_signal_swallowed_by_a_callback_is_heard_at_the_next_check() -> None:
    """A weak reference's callback ignores exceptions, and imports are full of them."""
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == ["swallowed", "heard"]
    assert "Exception ignored" in done.stderr
