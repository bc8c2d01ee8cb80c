"""`python -m cleanslate` and the `cleanslate` command."""

import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    if sys.argv[1:2] == ["idle"]:
        # In every reset pod this waits for days: it loads nothing else, to stay at a few MB.
        from cleanslate.idle import idle

        sys.exit(idle())
    from cleanslate.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
