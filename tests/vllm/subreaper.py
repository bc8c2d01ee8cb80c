"""`subreaper.py COMMAND…`: runs a command and adopts what that leaves behind, as launchers of jobs do. Never ends."""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36

ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
with subprocess.Popen(sys.argv[1:]):  # in this program's own process group
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()
