"""`python -m cleanslate` and the `cleanslate` command."""

import os
import sys
from typing import NoReturn

from cleanslate import termination


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    try:
        sys.exit(_run(sys.argv[1:]))
    except termination.TerminatedError:
        print("cleanslate: stopped by SIGTERM", file=sys.stderr)  # noqa: T201 - the one line for people
        sys.exit(termination.EXIT_CODE)
    except Exception:  # noqa: BLE001 - a fault of the program is no verdict: it must not look like one
        sys.excepthook(*sys.exc_info())
        sys.exit(4)


def _run(arguments: list[str]) -> int:
    if arguments == ["idle"]:
        # In every reset pod this waits for days: it loads nothing else, to stay at a few MB.
        from cleanslate.idle import idle

        return idle()
    worker = None
    if arguments[:1] in (["gate"], ["inspect"], ["reset"]) and not {"-h", "--help"} & set(arguments):
        termination.heed()
        # NVML loads in its child while the rest of the program loads here.
        from cleanslate import nvml_worker

        worker = nvml_worker.start()
    from cleanslate.cli import run

    return run(arguments, os.environ, worker)


if __name__ == "__main__":
    main()
