"""The joint planner of activations and state: every plan that can be best under the static rule, kept as a set."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Solution
from regrad.planners._static import StaticPoint, solve_static, static_frontier
from regrad.planners.base import Planner


@dataclass(frozen=True)
class Frontier(Planner):
    """The fastest plan of one level under ``P + Σ g + Σ r + max t <= budget``, over all options and engines.

    Exact, by the set of all plans that no other one matches in Σ retained, max transient *and* seconds; a set on their
    sum would lose the best plan. The set can grow as m^n for m options: beyond ``max_points`` plans of one suffix the
    status is LIMIT, with the best of a few hundred simple plans and a true bound. Cost: about 2 µs for each option of
    each point.
    """

    max_points: int = 100_000

    nested = False
    options = True
    rules = ("static",)
    papers = ("the study of activation recomputation under hidden mutable state: joint planner, static rule",)
    validity = "the static rule, one level, any options and engines, union or shared log; up to its limit on points"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        return solve_static(problem, budget_bytes, self.label, self.max_points)

    def points(self, problem: Problem) -> tuple[StaticPoint, ...]:
        """The whole set, retained bytes ascending. Raises :class:`PlannerMismatch` beyond the limit."""
        self.check(problem)
        found = static_frontier(problem, self.max_points)
        if found is None:
            raise PlannerMismatch(f"{self.label}: the set has more points than that; allow more max_points")
        return found
