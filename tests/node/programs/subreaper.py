"""A supervisor that is a child subreaper, as process managers are: starts the command given and stays when that has ended.

`subreaper.py [--new-session] COMMAND…`. Collects every child and makes no worker itself.
"""

import ctypes
import os
import signal
import sys

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Starts the command and waits for children for ever."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own_session, command = sys.argv[1] == "--new-session", sys.argv[1:]
    if os.fork() == 0:
        if own_session:
            os.setsid()
        command = command[own_session:]
        os.execvp(command[0], command)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()


if __name__ == "__main__":
    main()
