"""The whole time-memory curve of a problem, from one solve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regrad.core.chain import Problem
from regrad.core.plan import Choices, Solution, Status
from regrad.core.simulate import simulate
from regrad.planners.base import infeasible


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The least added seconds for every budget; made by :meth:`regrad.planners.optimal.Optimal.curve`.

    least_bytes        the smallest budget that has a plan, exact
    unit_bytes         the grid that memory was put on, rounded upward; 1 (or a divisor of every figure) where exact
    loss_bytes         the plan for M bytes is as fast as every plan that fits ``M - loss_bytes``; 0 where exact
    limit_bytes        the curve was only made up to this budget; None if it is whole
    tolerance_seconds  within this all seconds are good: they are sums of floats, a plan with spans is added up in
                       another order than it is walked, and points faster by less are left out. 0 for one level
    """

    problem: Problem
    least_bytes: int
    unit_bytes: int
    loss_bytes: int
    limit_bytes: int | None
    tolerance_seconds: float
    _label: str
    _fastest: float
    _budgets: NDArray[np.int64]
    _seconds: NDArray[np.float64]
    _rebuild: Callable[[int], Choices]

    def points(self) -> tuple[tuple[int, float], ...]:
        """The breakpoints (budget_bytes, added_seconds): budgets ascending, seconds descending; empty if none fits.

        The seconds are at hand from this budget up to the next one.
        """
        return tuple(zip(self._budgets.tolist(), self._seconds.tolist(), strict=True))

    def at(self, budget_bytes: int) -> Solution:
        """The plan for a budget, of equally fast ones that with the lowest peak.

        A larger budget never gives larger ``added_seconds``. OPTIMAL if nothing is lost to the grid, FEASIBLE with a
        true lower bound otherwise, INFEASIBLE below ``least_bytes``. Cost: one walk, and for plans with spans O(n²).
        """
        point = self._point(budget_bytes)
        if point < 0:
            return infeasible(self.least_bytes, self._label)
        plan = self._rebuild(point)
        simulation = simulate(plan, self.problem.chain, states=self.problem.states)
        bound = self._bound(budget_bytes)
        status = Status.OPTIMAL if simulation.added_seconds <= bound + self.tolerance_seconds else Status.FEASIBLE
        bound = min(bound, simulation.added_seconds)
        peak, seconds = simulation.peak_bytes, simulation.added_seconds
        return Solution(status, plan, bound, peak, seconds, self.least_bytes, self._label)

    def _point(self, budget_bytes: int) -> int:
        return int(np.searchsorted(self._budgets, budget_bytes, side="right")) - 1

    def _bound(self, budget_bytes: int) -> float:
        """Seconds below which no plan for this budget can be."""
        richer = budget_bytes + self.loss_bytes
        if self.limit_bytes is not None and richer > self.limit_bytes:
            return self._fastest
        return float(self._seconds[self._point(richer)])


def make_curve(
    problem: Problem,
    label: str,
    *,
    limit_bytes: int | None,
    unit_bytes: int,
    loss_bytes: int,
    tolerance_seconds: float = 0.0,
    least_bytes: int,
    floor_bytes: int,
    fastest: float,
    budgets: NDArray[np.int64],
    seconds: NDArray[np.float64],
    rebuild: Callable[[int], Choices],
    frugal: Callable[[], tuple[Choices, float]],
) -> Curve:
    """A solver's points as a curve: the optimizer's floor, the least plan, and no point that another one beats.

    ``budgets`` ascend and ``seconds`` descend; ``rebuild`` gives the plan of a point, ``frugal`` one for
    ``least_bytes`` and its seconds, asked for only where rounding upward lost it.
    """
    kept = np.arange(len(budgets))
    if tolerance_seconds:
        kept = _clear_falls(seconds, tolerance_seconds)
    budgets = np.maximum(budgets, floor_bytes)
    if limit_bytes is not None and limit_bytes < floor_bytes:
        kept = kept[:0]
    kept = kept[np.append(budgets[kept][1:] != budgets[kept][:-1], True)[: len(kept)]]
    budgets, seconds = budgets[kept], seconds[kept]
    least: Choices = ()
    missing = not len(budgets) or budgets[0] > least_bytes
    if missing and (limit_bytes is None or limit_bytes >= least_bytes):
        # rounding upward lost the least budget: its plan is known without the grid
        least, least_seconds = frugal()
        better = seconds < least_seconds - tolerance_seconds
        kept = np.append(-1, kept[better])
        budgets, seconds = np.append(least_bytes, budgets[better]), np.append(least_seconds, seconds[better])

    def plan(point: int) -> Choices:
        return least if kept[point] < 0 else rebuild(int(kept[point]))

    scale = unit_bytes, loss_bytes, limit_bytes, tolerance_seconds
    return Curve(problem, least_bytes, *scale, label, fastest, budgets, seconds, plan)


def _clear_falls(seconds: NDArray[np.float64], tolerance: float) -> NDArray[np.int64]:
    """The points that are faster by more than ``tolerance`` than the last one that was."""
    kept, before = [], np.inf
    for point, value in enumerate(seconds.tolist()):
        if value < before - tolerance:
            kept.append(point)
            before = value
    return np.array(kept, dtype=np.int64)
