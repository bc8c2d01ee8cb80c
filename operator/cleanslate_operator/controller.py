"""One look at one reset: read, decide, do, for as long as there is something to do at once. The work queue calls it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cleanslate_operator import actions, names, plan
from cleanslate_operator.api import Api, ApiError, Denied, Invalid
from cleanslate_operator.events import Recorder
from cleanslate_operator.execute import Executor
from cleanslate_operator.metrics import Metrics
from cleanslate_operator.record import Record
from cleanslate_operator.settings import Settings
from cleanslate_operator.snapshot import Reader
from cleanslate_operator.views import Snapshot

STEPS = 100  # decisions in one look; one that needs more has lost its way, and the next look starts anew
MANY_NODES = 10
PAUSE_S = 1.0  # between looks at a reset of many nodes, so that what several pods say is taken in at once
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Memory:
    """What is worth knowing again at the next look; lost with the process, and nothing depends on it."""

    record: Record | None = None
    blocked: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, float] = field(default_factory=dict)
    checked: Mapping[str, float] = field(default_factory=dict)
    looked_s: float = 0.0


class Controller:
    """Brings resets forward. `clock_s` is Unix time in seconds."""

    def __init__(
        self, api: Api, settings: Settings, recorder: Recorder, metrics: Metrics, clock_s: Callable[[], float]
    ) -> None:
        self._reader = Reader(api, settings.resets_namespace, clock_s)
        self._executor = Executor(api, settings, recorder, clock_s)
        self._recorder, self._metrics, self._clock_s = recorder, metrics, clock_s
        self._memories: dict[str, _Memory] = {}

    async def reconcile(self, name: str) -> float | None:
        """Look at the reset of this name and do what is next. Returns in how many seconds to look again; None: no need.

        Raises ApiError for a write or a read that failed: then the queue tries again, from a new look.
        """
        memory = self._memories.setdefault(name, _Memory())
        if (early_s := self._early_s(memory)) > 0:
            return early_s
        try:
            return await self._look(name, memory)
        except ApiError:
            memory.record = None  # perhaps somebody else has written it
            raise

    def _early_s(self, memory: _Memory) -> float:
        many = memory.record is not None and len(memory.record.results) >= MANY_NODES
        return min(memory.looked_s + PAUSE_S - self._clock_s(), PAUSE_S) if many else 0.0

    async def _look(self, name: str, memory: _Memory) -> float | None:
        memory.looked_s = self._clock_s()
        known = await self._reader.read(name, memory.record)
        if known is None or known.reset.ended:
            self._memories.pop(name, None)
        if known is None:
            return None
        if memory.record and memory.record.uid == known.reset.uid:
            known = replace(known, blocked=memory.blocked, asked=memory.asked, checked=memory.checked)
        for _ in range(STEPS):
            known = await self._reader.look(known)
            memory.checked = known.checked
            decision = plan.plan(known)
            known = await self._carry_out(decision, known, memory)
            if not decision.more:
                return decision.again_s
        return 0.0

    async def _carry_out(self, decision: plan.Decision, known: Snapshot, memory: _Memory) -> Snapshot:
        for action in decision.actions:
            try:
                known = await self._executor.carry_out(action, known)
            except (Denied, Invalid) as error:
                self._complain(known, error)
                raise
            self._tell(action, known)
            memory.record, memory.blocked, memory.asked = known.record, known.blocked, known.asked
        return known

    def _complain(self, known: Snapshot, error: ApiError) -> None:
        """Say on the reset that no time will mend this: it is tried again, but somebody has to see to it."""
        message = f"{error}; are the chart, its CRD and the operator of one release?"
        self._recorder.post(
            name=known.reset.name, uid=known.reset.uid, reason="CannotGoOn", message=message, warning=True
        )

    def _tell(self, action: actions.Action, known: Snapshot) -> None:
        """Log and count what was done."""
        name = known.reset.name
        _log.debug("%s %s: did %s", names.KIND, name, action, extra={"reset": name})
        if isinstance(action, actions.RecordResults):
            for result in action.results:
                text = "%s %s: node %s: %s: %s"
                extra = {"reset": name, "node": result.node, "result": str(result.result)}
                _log.info(text, names.KIND, name, result.node, result.reason, result.message, extra=extra)
                self._metrics.node_done(str(result.result))
        if isinstance(action, actions.Announce):
            _log.info("%s %s: %s: %s", names.KIND, name, action.reason, action.message, extra={"reset": name})
        if isinstance(action, actions.MarkEnded):
            took_s = max(self._clock_s() - known.record.started_s, 0.0) if known.record else None
            self._metrics.reset_ended(str(known.status.get("phase")), took_s)
