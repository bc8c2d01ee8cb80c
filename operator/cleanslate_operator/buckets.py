"""Token buckets: how many at once, and how many a second after that, for each key of its own."""

from collections.abc import Callable
from dataclasses import dataclass

_FEW = 64  # fewer buckets than this are not worth a look for full ones

_TINY = 1e-6  # of a token: who waited as long as it was told is not sent away for a rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """`burst` at once, then `per_s` a second."""

    burst: int
    per_s: float


class Buckets:
    """A bucket for each key. A full one is forgotten, so that there are only as many as were used of late."""

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}  # key: tokens lacking at a moment
        self._look_at = _FEW

    def take(self, key: str) -> float:
        """Take a token: 0 if there was one, else the seconds until there is one, and none is taken."""
        lacking = self._lacking(key)
        if lacking + 1 > self._rate.burst + _TINY:
            return (lacking + 1 - self._rate.burst) / self._rate.per_s
        self._spent[key] = (lacking + 1, self._clock())
        self._forget_full()
        return 0.0

    def __len__(self) -> int:
        return len(self._spent)

    def _lacking(self, key: str) -> float:
        lacking, at = self._spent.get(key, (0.0, 0.0))
        return max(0.0, lacking - (self._clock() - at) * self._rate.per_s)

    def _forget_full(self) -> None:
        if len(self._spent) < self._look_at:
            return
        self._spent = {key: spent for key, spent in self._spent.items() if self._lacking(key) > 0}
        self._look_at = max(_FEW, 2 * len(self._spent))
