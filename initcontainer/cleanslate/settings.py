"""Every setting in one table: its flag, its environment variable, its default, its unit and its help. Built once, in `cli.py`.

A flag wins over its variable. Where a setting may be given several times, its variable holds one value a line (or, on one
line, values with commas between them).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_LONGEST_S = 7 * 24 * 3600.0
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_GPU = re.compile(rf"\d{{1,4}}|GPU-{_UUID}|MIG-{_UUID}|MIG-GPU-{_UUID}/\d+/\d+")
_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_OWNER = re.compile(r"(?:container|batch|service):\S+")


class Scope(StrEnum):
    """How far a reset goes."""

    ORPHANS = "orphans"  # only what is proved to be left over
    ALL = "all"  # live work in scope too


class Settings(NamedTuple):
    """What one run is asked to do. Durations in seconds, sizes in bytes; see ROWS for each."""

    verb: str
    scope: Scope = Scope.ORPHANS
    dry_run: bool = False
    gpus: tuple[str, ...] = ()
    grace_s: float = 20.0
    timeout_s: float = 120.0
    max_used_bytes: int | None = None
    stable_reads: int = 3
    expect_gpus: int | None = None
    protect: tuple[str, ...] = ()
    end_owners: tuple[str, ...] = ()
    shm_roots: tuple[str, ...] = ()
    shm_min_age_s: float = 10.0
    shm_any_name: bool = False
    bytecode: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    log_min_age_s: float = 10.0
    allow_roots: tuple[str, ...] = ()
    plan: str | None = None
    host_root: str = "/"
    host_name: str | None = None
    nvml_library: str | None = None
    termination_message: str | None = None
    exit_zero: bool = False
    output: str = "table"


class Row(NamedTuple):
    """One setting. `parse` turns one text into one value and raises ValueError with what it wants instead."""

    field: str
    flag: str
    help: str
    parse: Callable[[str], Any]
    verbs: frozenset[str]
    default: str
    metavar: str = ""
    many: bool = False
    switch: bool = False

    @property
    def variable(self) -> str:
        """The environment variable: CLEANSLATE_ and the flag's words."""
        return "CLEANSLATE_" + self.flag.lstrip("-").replace("-", "_").upper()


def duration(text: str) -> float:
    """Seconds in `15s`, `2m`, `1h`, `500ms` or a bare number. Raises ValueError."""
    found = _DURATION.fullmatch(text)
    value = float(found[1]) * _UNITS_S[found[2]] if found else -1.0
    if not 0 <= value <= _LONGEST_S:
        raise ValueError("not a duration of at most 7 days; write for example 15s or 2m")
    return value


def _mebibytes(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError("not a whole number of MiB; write for example 64")
    return int(text) << 20


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= 1000:
        raise ValueError("not a number from 1 to 1000")
    return int(text)


def _gpu(text: str) -> str:
    if not _GPU.fullmatch(text):
        raise ValueError("neither an index nor a UUID; nvidia-smi -L shows both")
    return str(int(text)) if text.isdigit() else text


def _scope(text: str) -> Scope:
    try:
        return Scope(text)
    except ValueError as error:
        raise ValueError("not a scope; write orphans or all") from error


def _output(text: str) -> str:
    if text not in {"table", "json"}:
        raise ValueError("not an output; write table or json")
    return text


def _owner(text: str) -> str:
    if not _OWNER.fullmatch(text):
        raise ValueError("not an owner; write for example service:vllm.service, batch:job_12 or container:ID")
    return text


def _host(text: str) -> str:
    if not _HOST.fullmatch(text):
        raise ValueError("not a node's name; write for example gpu-17 or gpu-17.example.com")
    return text


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("not a path")
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError("not an absolute path")
    return text


def _yes(text: str) -> bool:
    if text.lower() not in {"1", "true", "yes", "0", "false", "no", ""}:
        raise ValueError("neither yes nor no; write true or false")
    return text.lower() in {"1", "true", "yes"}


_ALL = frozenset({"inspect", "reset", "gate"})
_LOOK = frozenset({"inspect", "reset"})
_RESET = frozenset({"reset"})
_WAIT = frozenset({"reset", "gate"})


def _row(
    field: str, flag: str, parse: Callable[[str], Any], verbs: frozenset[str], default: str, text: str, **more: Any
) -> Row:
    return Row(field=field, flag=flag, parse=parse, verbs=verbs, default=default, help=text, **more)


# fmt: off
ROWS: tuple[Row, ...] = (
    _row("scope", "--scope", _scope, _LOOK, "orphans",
         "end only proved leftovers, or live work in reach too", metavar="orphans|all"),
    _row("dry_run", "--dry-run", _yes, _RESET, "off", "change nothing; print exactly what would be done, and why", switch=True),
    _row("gpus", "--gpu", _gpu, _ALL, "every GPU", "a GPU in scope; may be given several times", metavar="UUID|INDEX", many=True),
    _row("grace_s", "--grace", duration, _RESET, "20s", "how long live work may take to leave after SIGTERM", metavar="DURATION"),
    _row("timeout_s", "--timeout", duration, _ALL, "2m", "give up after this long", metavar="DURATION"),
    _row("max_used_bytes", "--max-used-mib", _mebibytes, _ALL, "64, for MIG 128",
         "used memory that still counts as clean, in MiB", metavar="MIB"),
    _row("stable_reads", "--stable-reads", _count, _WAIT, "3", "clean readings in a row that make a GPU clean", metavar="N"),
    _row("expect_gpus", "--expect-gpus", _count, _ALL, "as many as the driver has", "how many GPUs there must be", metavar="N"),
    _row("protect", "--protect", _path, _LOOK, "none",
         "an executable's name or path pattern never to end; several times", metavar="NAME|PATH", many=True),
    _row("end_owners", "--end-owner", _owner, _LOOK, "none",
         "a service, batch job or container that --scope all may end; several times", metavar="KIND:NAME", many=True),
    _row("shm_roots", "--shm-root", _absolute, _LOOK, "none",
         "a further shared memory directory of the host; several times", metavar="PATH", many=True),
    _row("shm_min_age_s", "--shm-min-age", duration, _LOOK, "10s", "keep younger shared memory", metavar="DURATION"),
    _row("shm_any_name", "--shm-any-name", _yes, _LOOK, "off", "purge unused shared memory of unknown names too", switch=True),
    _row("bytecode", "--bytecode", _path, _LOOK, "none",
         "remove cached bytecode below PATH whose path matches PATTERN; several times", metavar="PATH:PATTERN", many=True),
    _row("caches", "--cache", _path, _LOOK, "none",
         "remove a compile cache, by name, that nobody uses; several times", metavar="NAME[=PATH]", many=True),
    _row("logs", "--log", _absolute, _LOOK, "none", "remove closed log files; several times", metavar="PATTERN", many=True),
    _row("log_min_age_s", "--log-min-age", duration, _LOOK, "10s", "keep younger log files", metavar="DURATION"),
    _row("allow_roots", "--allow-root", _absolute, _LOOK, "anywhere but system paths",
         "the only places for --bytecode, --cache and --log; several times", metavar="PATH", many=True),
    _row("plan", "--plan", _path, _LOOK, "none",
         "the cluster's view of this node, a cleanslate.dev/plan/v1 file", metavar="FILE"),
    _row("host_root", "--host-root", _absolute, _ALL, "/", "where the host's file system is mounted", metavar="PATH"),
    _row("host_name", "--host-name", _host, _ALL, "the machine's own", "what the report calls the node", metavar="NAME"),
    _row("nvml_library", "--nvml-library", _absolute, _ALL, "searched for", "the driver's libnvidia-ml.so.1", metavar="PATH"),
    _row("termination_message", "--termination-message", _path, _ALL, "none",
         "write the summary, at most 4096 bytes of JSON, to this file", metavar="FILE"),
    _row("exit_zero", "--exit-zero", _yes, _RESET, "off",
         "leave with 0 once the summary is written, whatever the result: for an init container, which would be run again",
         switch=True),
    _row("output", "--output", _output, _ALL, "table", "a table for people, or the report as JSON", metavar="table|json"),
)
# fmt: on


class SettingError(ValueError):
    """A setting that cannot be used; the text names it, its value and what to write instead."""


def build(verb: str, flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> Settings:
    """The settings of one run. `flags`: the texts given on the command line, by field. Raises SettingError."""
    values: dict[str, Any] = {"verb": verb}
    for row in ROWS:
        if verb not in row.verbs:
            continue
        texts, source = flags.get(row.field), row.flag
        if texts is None and row.variable in environ:
            texts, source = _split(environ[row.variable], many=row.many), row.variable
            if row.field == "gpus" and not texts:
                raise SettingError(f"{row.variable}='': cannot use: it names no GPU; unset it to mean every GPU")
        if texts is not None:
            parsed = [_parse(row, text, source) for text in texts]
            values[row.field] = tuple(parsed) if row.many else parsed[-1]
    return Settings(**values)


def _split(text: str, *, many: bool) -> list[str]:
    if not many:
        return [text]
    return [part.strip() for part in (text.split("\n") if "\n" in text else text.split(",")) if part.strip()]


def _parse(row: Row, text: str, source: str) -> Any:
    try:
        return row.parse(text)
    except ValueError as error:
        raise SettingError(f"{source}={text[:80]!r}: cannot parse: {error}") from error
