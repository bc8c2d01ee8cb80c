"""The command line's grammar and its help, made by argparse from the one table in `settings.py`."""

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

import cleanslate
from cleanslate.settings import ROWS, Row, SettingError

_EXIT_CODES = "exit codes: 0 clean · 2 usage · 3 not clean · 4 cannot tell · 5 refused, nothing was touched"


class _Parser(argparse.ArgumentParser):
    """An argparse that tells what is wrong in one line and leaves the exit to the caller."""

    def error(self, message: str) -> NoReturn:
        """Raise SettingError instead of printing the usage."""
        raise SettingError(f"{' '.join(message.split())}; see {self.prog} --help")


def parse(argv: Sequence[str], verbs: Mapping[str, str]) -> tuple[str, dict[str, list[str]]]:
    """The verb and the texts given for each setting's field. Raises SettingError, and SystemExit(0) after printing help."""
    parser = _Parser(
        prog="cleanslate",
        description="Gives a GPU node a clean slate between two LLM servers.",
        epilog=f"cleanslate VERB --help explains the flags of each; all can be environment variables too. {_EXIT_CODES}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cleanslate {cleanslate.__version__}")
    # With a prog of its own argparse need not format a usage to find one, which would load half the library.
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, prog="cleanslate")
    for verb, text in verbs.items():
        what = f"{text[0].upper()}{text[1:]}."
        sub = subparsers.add_parser(verb, help=text, description=what, epilog=_EXIT_CODES, allow_abbrev=False)
        for row in ROWS:
            if verb in row.verbs and verb in argv[:1]:
                _add(sub, row)
    found = vars(parser.parse_args(argv))
    verb = found.pop("verb")
    return verb, {field: texts for field, texts in found.items() if texts is not None}


def _add(parser: argparse.ArgumentParser, row: Row) -> None:
    explained = f"{row.help} (default: {row.default}; {row.variable})".replace("%", "%%")
    if row.switch:
        parser.add_argument(row.flag, dest=row.field, action="append_const", const="true", help=explained)
    else:
        parser.add_argument(row.flag, dest=row.field, action="append", metavar=row.metavar, help=explained)
