"""One inspection or one reset of a node: survey, verdicts, end, purge, verify, in this order. Returns what a report tells.

Everything is decided elsewhere: who is ended in `verdicts.py`, whether a GPU is clean in `gpus.py`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cleanslate import devices, ending, gpus, holding, people, procfs, termination, verify
from cleanslate.ending import Fate
from cleanslate.formats import Plan
from cleanslate.gpus import GpuResult, GpuVerdict, Result
from cleanslate.model import Identity, Judgement, Outcome, Pid, Verdict
from cleanslate.nvml import NVML_DEADLINE_S, Nvml, Reading, find_library
from cleanslate.people import Person
from cleanslate.purge import Purge, Purged
from cleanslate.settings import Settings
from cleanslate.survey import Survey, Surveyor
from cleanslate.verdicts import Case, Ground
from cleanslate.verify import Patience, Settled
from cleanslate.worker import Worker

LOOK_AGAIN_S = (
    2.0  # memory that nobody holds may be a newcomer's: how long to watch it before looking at processes again
)
ROUND_LIMIT = 10  # a supervisor that respawns its workers this often has to be ended by whoever runs it


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One process in the report: what was known, what was decided, what became of it."""

    case: Case
    judgement: Judgement
    fate: Fate
    person: Person


@dataclass(slots=True, kw_only=True)
class Findings:
    """What one run found and did, while it runs and after."""

    records: dict[Identity, Record] = field(default_factory=dict)
    verdicts: tuple[GpuVerdict, ...] = ()
    purged: Purged = field(default_factory=Purged)
    gpu_bytes_freed: int = 0
    failure: str | None = None
    result: Result = Result.CANNOT_TELL
    timings_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("survey", "end", "purge", "verify"), 0.0)
    )
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add what the block takes to one of the timings, in seconds."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.timings_s[part] += time.monotonic() - start


class Run:
    """One run on one node."""

    def __init__(self, settings: Settings, plan: Plan | None, purge: Purge) -> None:
        self.settings, self.plan, self.purge = settings, plan, purge
        self.findings = Findings()
        self.first: Reading | None = None
        self.until = time.monotonic() + settings.timeout_s
        self.users = people.read_users(settings.host_root)
        self.numbers = devices.find_devices(settings.host_root)
        self.host_init = procfs.in_initial_pid_namespace()
        self.expected = settings.expect_gpus or devices.count_gpus() or devices.count_nodes(settings.host_root) or None

    def carry_out(self, worker: Worker | None = None) -> Findings:
        """Look, and act unless asked not to. Raises nothing that a process, a file or a GPU does.

        `worker`: for NVML, if one was started already. Raises termination.TerminatedError on SIGTERM if it is heeded.
        """
        library = self.settings.nvml_library or find_library(self.settings.host_root)
        with Nvml(library, worker) as nvml:
            if self.settings.verb == "reset" and not self.settings.dry_run:
                self._act(nvml)
            else:
                self._look(nvml)
        return self.findings

    def _look(self, nvml: Nvml) -> None:
        """Survey and judge; say what a reset would do."""
        with self._survey(nvml) as survey:
            self._purge(dry_run=True, ending=_to_end(survey))
            self._judge_gpus(survey, survey.reading, settled=True)
            self._conclude(survey)

    def _act(self, nvml: Nvml) -> None:
        """End, purge, verify, and look again, until nothing new is to be ended and the GPUs have settled, or time is over.

        The last look comes after the verification: what a supervisor brings back is seen, and not called clean.
        """
        rounds = 0
        survey = self._survey(nvml)
        while True:
            with survey:
                rounds += self._end_leftovers(survey)
                self._purge(dry_run=False)
                settled = self._settle(nvml, survey)
            survey = self._survey(nvml, settled.reading)
            newcomers, over = self._untried(survey), time.monotonic() >= self.until
            if newcomers and rounds < ROUND_LIMIT and not over:
                continue
            self._judge_gpus(survey, settled.reading, settled=settled.clean)
            if settled.clean or newcomers or over or not _may_still_clear(self.findings.verdicts):
                break
        with survey:
            self._give_up_on_the_rest(survey)
            self._conclude(survey)

    def _survey(self, nvml: Nvml, reading: Reading | None = None) -> Survey:
        """One survey, on a reading of its own unless one is given that is as good as new."""
        termination.check()
        with self.findings.timed("survey"):
            if reading is None:
                nvml.start()
            scan = procfs.scan(self.numbers)
            if reading is None:
                reading = nvml.read(deadline_s=min(NVML_DEADLINE_S, max(self.until - time.monotonic(), 0.05)))
            self.first = self.first or reading
            surveyor = Surveyor(
                numbers=self.numbers,
                ground=self._ground(reading),
                protect=self.settings.protect,
                host_init=self.host_init,
            )
            survey = surveyor.survey(scan, reading)
        self._note(survey)
        return survey

    def _ground(self, reading: Reading) -> Ground:
        named = frozenset(self.settings.gpus) or None
        scope = (
            None
            if named is None
            else frozenset(gpu.uuid for gpu in reading.gpus if gpu.uuid and gpus.in_scope(gpu, named))
        )
        return Ground(
            scope=self.settings.scope,
            plan=self.plan,
            gpus=scope,
            named_owners=frozenset(self.settings.end_owners),
        )

    def _note(self, survey: Survey) -> None:
        """Write down what a survey saw; a process seen again keeps its verdict and what became of it."""
        for pid, case in survey.cases.items():
            identity = case.process.identity
            known = self.findings.records.get(identity)
            judgement = survey.judgements[pid]
            if known and known.judgement.verdict is Verdict.END:
                judgement = known.judgement
            fate = _fate_at_sight(case, judgement)
            self.findings.records[identity] = Record(
                case=case,
                judgement=judgement,
                fate=known.fate if known and _is_tried(known.fate) and not case.process.is_zombie else fate,
                person=known.person if known else people.person(identity, self.users),
            )

    def _end_leftovers(self, survey: Survey) -> bool:
        """End what the survey says, if there is anything not tried before. Returns whether there was."""
        if not self._untried(survey):
            return False
        termination.check()
        with self.findings.timed("end"):
            fates = ending.end(survey, grace_s=self.settings.grace_s, deadline=self.until)
        for pid, fate in fates.items():
            self._set_fate(survey.cases[pid].process.identity, fate)
        return True

    def _give_up_on_the_rest(self, survey: Survey) -> None:
        over = time.monotonic() >= self.until
        why = "the time allowed was over" if over else f"more came back {ROUND_LIMIT} times"
        for identity in self._untried(survey):
            parent = self.findings.records[identity].case.process.ppid
            message = f"pid {identity.pid}: cannot end: {why}; end its parent {parent} first and run again"
            self._set_fate(identity, Fate(outcome=Outcome.NOT_ENDED, message=message))

    def _untried(self, survey: Survey) -> list[Identity]:
        wanted = (
            survey.cases[pid].process.identity for pid, j in survey.judgements.items() if j.verdict is Verdict.END
        )
        return [identity for identity in wanted if not _is_tried(self.findings.records[identity].fate)]

    def _set_fate(self, identity: Identity, fate: Fate) -> None:
        self.findings.records[identity] = replace(self.findings.records[identity], fate=fate)

    def _purge(self, *, dry_run: bool, ending: frozenset[int] = frozenset()) -> None:
        with self.findings.timed("purge"):
            purged = self.purge.carry_out(dry_run=dry_run, now_s=time.time(), ending=ending)
        self.findings.purged = self.findings.purged.then(purged)

    def _settle(self, nvml: Nvml, survey: Survey) -> Settled:
        """Read the GPUs until they settle, or for so long that another look at the processes is due."""
        patience = Patience(
            until=min(self.until, time.monotonic() + LOOK_AGAIN_S),
            stable_reads=self.settings.stable_reads,
            hopeful=_may_still_clear,
        )
        with self.findings.timed("verify"):
            return verify.settle(nvml, lambda reading: self._judge(survey, reading), patience)

    def _judge_gpus(self, survey: Survey, reading: Reading, *, settled: bool) -> None:
        found = self.findings
        found.verdicts = self._judge(survey, reading)
        found.failure = reading.failure
        found.gpu_bytes_freed = gpus.freed_bytes(self.first or reading, reading, frozenset(self.settings.gpus) or None)
        found.result = gpus.overall(found.verdicts, failure=reading.failure, busy_is_clean=True)
        if found.result is Result.CLEAN and not settled:
            found.result = Result.NOT_CLEAN

    def _judge(self, survey: Survey, reading: Reading) -> tuple[GpuVerdict, ...]:
        outcomes = {
            pid: self.findings.records[case.process.identity].fate.outcome for pid, case in survey.cases.items()
        }
        held = holding.holders(
            survey.cases,
            survey.judgements,
            outcomes,
            reading,
            name_of=_name_of,
            all_visible=self.host_init,
        )
        return gpus.judge_reading(
            reading,
            held,
            scope=frozenset(self.settings.gpus) or None,
            expected=self.expected,
            asked_bytes=self.settings.max_used_bytes,
        )

    def _conclude(self, survey: Survey) -> None:
        found = self.findings
        left = [r for r in found.records.values() if r.judgement.verdict is Verdict.END and r.fate.outcome in NOT_GONE]
        if left:
            found.result = Result.NOT_CLEAN
        found.warnings += [r.fate.message for r in found.records.values() if r.fate.message]
        found.warnings += found.purged.errors()
        if survey.silent:
            found.warnings.append(f"{_some(survey.silent)}: did not answer and was left out; look for D state in ps")
        if survey.unsettled:
            found.warnings.append(f"{_some(survey.unsettled)}: its parent kept changing, so it was kept; run again")
        if survey.unreadable:
            found.warnings.append(
                f"{survey.unreadable} processes: cannot read their descriptors; run with CAP_SYS_PTRACE"
            )


NOT_GONE = frozenset({Outcome.WOULD_END, Outcome.NOT_ENDED, Outcome.UNINTERRUPTIBLE, Outcome.UNKILLABLE})


def _to_end(survey: Survey) -> frozenset[int]:
    return frozenset(pid for pid, judgement in survey.judgements.items() if judgement.verdict is Verdict.END)


def _is_tried(fate: Fate) -> bool:
    return fate.outcome not in {Outcome.KEPT, Outcome.WOULD_END}


def _fate_at_sight(case: Case, judgement: Judgement) -> Fate:
    process = case.process
    if process.is_zombie:
        parent = f"{process.ppid} ({case.parent.comm})" if case.parent else str(process.ppid)
        step = (
            "it holds nothing and goes when that one collects it" if process.ppid == 1 else "it goes when that one ends"
        )
        label = f"pid {process.pid} ({process.comm})"
        return Fate(
            outcome=Outcome.ZOMBIE, message=f"{label}: a zombie, its parent {parent} has not collected it; {step}"
        )
    return Fate(outcome=Outcome.WOULD_END if judgement.verdict is Verdict.END else Outcome.KEPT)


def _may_still_clear(verdicts: Sequence[GpuVerdict]) -> bool:
    """Memory without a process is being given back, or leaked: only time tells."""
    return any(verdict.result is GpuResult.RESIDUAL for verdict in verdicts)


def _name_of(pid: Pid) -> str | None:
    stat = procfs.read_stat(pid)
    return stat.comm if stat else None


def _some(pids: Sequence[Pid]) -> str:
    shown = ", ".join(map(str, pids[:5]))
    return f"pid {shown}" if len(pids) <= 5 else f"pid {shown} … and {len(pids) - 5} more"
