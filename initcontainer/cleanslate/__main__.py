"""`python -m cleanslate` and the `cleanslate` command."""

import os
import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    arguments = sys.argv[1:]
    if arguments == ["idle"]:
        # In every reset pod this waits for days: it loads nothing else, to stay at a few MB.
        from cleanslate.idle import idle

        sys.exit(idle())
    worker = None
    if arguments[:1] in (["gate"], ["inspect"], ["reset"]) and not {"-h", "--help"} & set(arguments):
        # NVML loads in its child while the rest of the program loads here.
        from cleanslate import nvml_worker

        worker = nvml_worker.start()
    from cleanslate.cli import run

    try:
        sys.exit(run(arguments, os.environ, worker))
    except Exception:  # noqa: BLE001 - a fault of the program is no verdict: it must not look like one
        sys.excepthook(*sys.exc_info())
        sys.exit(4)


if __name__ == "__main__":
    main()
