"""The time-memory curve of one step: what each planner makes of every budget, all priced by the same arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from regrad.core.errors import InvalidPlan, InvalidQuantity

FORMAT_VERSION = 1
OURS = "rt.plan"
CONTROL, BASELINE, PLANNER = KINDS = ("control", "baseline", "planner")
ROUNDING_RATIO = 1e-9
"""Two sums of the same seconds in another order differ by less than this share of them."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan of one method.

    method         the planner's name, ``OURS`` for what ``rt.plan`` gives
    kind           "planner", "baseline" (a rule with a number in it) or "control"
    setting        what distinguishes this plan from the method's others
    budget_bytes   that it was asked for; None for a setting that knows no budget
    peak_bytes     of the step, P included
    added_seconds  over the eager step
    step_ratio     step time over the eager step's
    recomputed     segments that run again, once or more
    depth          0 keeps everything, 1 recomputes segments or stretches of calls, more nests
    """

    method: str
    kind: str
    setting: str
    budget_bytes: int | None
    peak_bytes: int
    added_seconds: float
    step_ratio: float
    recomputed: int
    depth: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A method that has no point, or none at some budgets, and why."""

    method: str
    reason: str


@dataclass(frozen=True)
class Frontier:
    """The time-memory curve of a step, made by ``rt.frontier``.

    budgets_bytes      ascending, those below ``least_bytes`` included
    points             in the order of their methods, within one by peak
    persistent_bytes   there whatever the plan; eager_peak_bytes of the step without one
    least_bytes        the smallest budget for which ``rt.plan`` has a plan
    predicted_by       "trace" or "fake trace", good to ``band_ratio``
    """

    fingerprint: str
    device: str
    budgets_bytes: tuple[int, ...]
    points: tuple[FrontierPoint, ...]
    persistent_bytes: int
    eager_peak_bytes: int
    eager_seconds: float
    least_bytes: int
    predicted_by: str
    band_ratio: float
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    planning_seconds: float = 0.0
    version: int = FORMAT_VERSION

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that have points, ours first."""
        return tuple(dict.fromkeys(point.method for point in self.points))

    def of(self, method: str) -> tuple[FrontierPoint, ...]:
        """The points of one method; empty for one that has none."""
        return tuple(point for point in self.points if point.method == method)

    def best(self, budget_bytes: int, method: str | None = None, *, others: bool = False) -> FrontierPoint | None:
        """The fastest point within a budget, of equally fast ones the lowest; None if none fits.

        Of one ``method``, with ``others`` of all but ours, otherwise of all.
        """
        pool = [point for point in self.points if point.peak_bytes <= budget_bytes]
        if method is not None:
            pool = [point for point in pool if point.method == method]
        if others:
            pool = [point for point in pool if point.method != OURS]
        return min(pool, key=lambda point: (point.added_seconds, point.peak_bytes), default=None)

    def behind(self) -> tuple[tuple[int, float, FrontierPoint], ...]:
        """Where ours is beaten: (budget, seconds slower, by what), for each budget that was asked for.

        A difference within rounding is none. A budget that ours refuses and another method meets is behind by infinitely much.
        """
        found = []
        for budget in self.budgets_bytes:
            other, ours = self.best(budget, others=True), self.best(budget, OURS)
            if other is None:
                continue
            slower = inf if ours is None else ours.added_seconds - other.added_seconds
            if slower > ROUNDING_RATIO * max(self.eager_seconds, abs(other.added_seconds)):
                found.append((budget, slower, other))
        return tuple(found)

    def to_json(self) -> str:
        """As JSON, to be read by :meth:`from_json`."""
        from regrad.core.codec import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str) -> Frontier:
        """Read what :meth:`to_json` wrote. Raises :class:`InvalidPlan` for anything else."""
        from regrad.core.codec import load

        found = load(cls, text)
        if found.version != FORMAT_VERSION:
            raise InvalidPlan(f"the curve has format version {found.version}, this regrad reads {FORMAT_VERSION}")
        return found


def outline(points: Iterable[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """The points that no other one beats in both peak and seconds, peaks ascending: the staircase of a method."""
    found: list[FrontierPoint] = []
    for point in sorted(points, key=lambda one: (one.peak_bytes, one.added_seconds)):
        if not found or point.added_seconds < found[-1].added_seconds:
            found.append(point)
    return tuple(found)


def spread_budgets(least_bytes: int, most_bytes: int, count: int) -> tuple[int, ...]:
    """``count`` budgets from ``least_bytes`` to ``most_bytes``, evenly spaced, both ends included.

    Raises :class:`InvalidQuantity` for fewer than two.
    """
    if count < 2:
        raise InvalidQuantity(count, "a curve takes two budgets or more")
    most_bytes = max(least_bytes, most_bytes)
    steps = (least_bytes + (most_bytes - least_bytes) * k // (count - 1) for k in range(count))
    return tuple(dict.fromkeys(steps))
