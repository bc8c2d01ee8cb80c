"""The command line: verbs, flags, what is written where, and the exit codes. Everything it decides is how to say it."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cleanslate import gate, report, settings, usage
from cleanslate.gpus import Result
from cleanslate.nvml import Nvml
from cleanslate.settings import SettingError, Settings
from cleanslate.worker import Worker

if TYPE_CHECKING:
    from cleanslate.formats import Plan

VERBS = {
    "inspect": "look at the node and say what is left over; changes nothing",
    "reset": "end and remove what is left over, and nothing else; then prove that the GPUs are clean",
    "gate": "wait until the GPUs are clean",
    "idle": "wait for SIGTERM in a few MB",
}
USAGE, CANNOT_TELL, REFUSED = 2, 4, 5


class _Leave(Exception):  # noqa: N818 - not an error: the way out with one line to say
    """Leave with this exit code and this line on stderr."""

    def __init__(self, code: int, line: str) -> None:
        self.code, self.line = code, line
        super().__init__(line)


def run(argv: Sequence[str], environ: Mapping[str, str], worker: Worker | None = None) -> int:
    """Run one command line and return its exit code. Writes the report to stdout, everything else to stderr.

    `worker`: for NVML, if one was started already.
    """
    try:
        return _carry_out(_parse(argv, environ), environ, worker)
    except _Leave as leave:
        _say(f"cleanslate: {leave.line}")
        return leave.code
    except KeyboardInterrupt:
        return 130


def _carry_out(chosen: Settings, environ: Mapping[str, str], worker: Worker | None) -> int:
    started_at_s, start = time.time(), time.monotonic()
    try:
        parts = _gate(chosen, worker) if chosen.verb == "gate" else _node(chosen, environ, worker)
    except _Leave as leave:
        if leave.code == USAGE:
            raise
        result = Result.REFUSED if leave.code == REFUSED else Result.CANNOT_TELL
        parts = {"result": result, "message": leave.line}
        _say(f"cleanslate: {leave.line}")
    outline = report.Outline(
        verb=chosen.verb,
        host=chosen.host_name or os.uname().nodename,
        started_at_s=started_at_s,
        duration_s=time.monotonic() - start,
        **parts,
    )
    return _publish(report.build(outline), chosen)


def _gate(chosen: Settings, worker: Worker | None) -> dict[str, Any]:
    with Nvml(gate.library(chosen), worker) as nvml:
        found = gate.wait(chosen, nvml)
    return {
        "result": found.result,
        "message": report.message(found.result, found.verdicts, found.failure, ()),
        "gpus": found.verdicts,
        "timings_s": {"verify": found.waited_s},
    }


def _node(chosen: Settings, environ: Mapping[str, str], worker: Worker | None) -> dict[str, Any]:
    # What only a look at the whole node needs is not loaded by a gate, whose start is on every server's path.
    import resource

    from cleanslate import procfs, purge, tree
    from cleanslate.nodereport import parts_of
    from cleanslate.reset import Run

    _check_rights(chosen, hidden=procfs.hides_processes())
    # A descriptor pins each process that matters, and after a fork storm there may be thousands.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    warnings: list[str] = []
    plan = _read_plan(chosen.plan)
    try:
        prepared = purge.prepare(chosen, environ, warnings.append)
    except ValueError as error:
        raise _Leave(USAGE, str(error)) from error
    except tree.RefusedPathError as error:
        raise _Leave(REFUSED, str(error)) from error
    except OSError as error:
        raise _Leave(REFUSED, f"--host-root={chosen.host_root}: cannot open: {error.strerror}") from error
    findings = Run(chosen, plan, prepared).carry_out(worker)
    findings.warnings[:0] = warnings
    return parts_of(findings, chosen)


def _check_rights(chosen: Settings, *, hidden: bool) -> None:
    what = f"{chosen.verb}: cannot see other users' processes"
    if os.geteuid() != 0:
        raise _Leave(CANNOT_TELL, f"{what}: not root; run it with sudo or in a privileged pod")
    if hidden:
        raise _Leave(CANNOT_TELL, f"{what}: /proc is mounted with hidepid; run it with CAP_SYS_PTRACE")


def _read_plan(path: str | None) -> "Plan | None":
    from cleanslate.formats import PLAN_LIMIT_BYTES, PlanError, parse_plan  # no gate reads a plan

    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return parse_plan(file.read(PLAN_LIMIT_BYTES + 1), now_s=time.time())
    except OSError as error:
        raise _Leave(REFUSED, f"--plan={path}: cannot read: {error.strerror}; nothing was touched") from error
    except PlanError as error:
        raise _Leave(REFUSED, f"--plan={path}: cannot use: {error}; nothing was touched") from error


def _publish(document: dict[str, Any], chosen: Settings) -> int:
    """Write the report where it was asked for. A report that can't be written leaves nobody knowing: exit 4.

    With --exit-zero the summary is what counts: once it is there, the code is 0.
    """
    code: int = document["exitCode"]
    if chosen.termination_message:
        from cleanslate.formats import summarize

        with _told(document):
            _write_summary(chosen.termination_message, summarize(document))
    try:
        with _told(document):
            _print_report(document, chosen.output)
    except _Leave as leave:
        if not chosen.exit_zero:
            raise
        _say(f"cleanslate: {leave.line}")
    return 0 if chosen.exit_zero else code


@contextlib.contextmanager
def _told(document: dict[str, Any]) -> Iterator[None]:
    """Turn an OSError into the way out that says what could not be written, and what would have been."""
    try:
        yield
    except OSError as error:
        where = error.filename or "stdout"
        _discard_stdout()
        raise _Leave(
            CANNOT_TELL, f"{where}: cannot write the report: {error.strerror}; the result was {document['result']}"
        ) from error


def _write_summary(path: str, summary: bytes) -> None:
    """Put the summary into the file, or leave it empty: half a summary is none. Raises OSError with the path."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        while summary:
            summary = summary[os.write(descriptor, summary) :]
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)


def _print_report(document: dict[str, Any], output: str) -> None:
    """The report to stdout, whole. Raises OSError."""
    if sys.stdout is None:  # closed before we were started
        raise OSError(errno.EBADF, "it is closed", "stdout")
    if output == "json":
        import json

        print(json.dumps(document, indent=2), flush=True)  # noqa: T201 - the report
        return
    from cleanslate import table

    print(table.render(document), flush=True)  # noqa: T201 - the report


def _discard_stdout() -> None:
    """So that the interpreter's own flush at exit does not fail a second time."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - the one line for people


def _parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    try:
        verb, flags = usage.parse(argv, VERBS)
        chosen = settings.build(verb, flags, environ)
    except SettingError as error:
        raise _Leave(USAGE, str(error)) from error
    if chosen.exit_zero and chosen.termination_message is None:
        what = "--exit-zero: cannot use: nobody would know the result"
        raise _Leave(USAGE, f"{what}; give --termination-message too")
    return chosen
