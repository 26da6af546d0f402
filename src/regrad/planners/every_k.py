"""Recompute every k-th segment: the even spread that frameworks offer as "selective per layer"."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Solution
from regrad.core.simulate import RULES
from regrad.planners._ranking import Ranking, choose
from regrad.planners.base import Planner, least_seconds, pick, price, recomputable, recomputing


@dataclass(frozen=True)
class EveryK(Planner):
    """Of the segments that can be recomputed, those numbered 0, k, 2k, … are; ``k=1`` recomputes all of them.

    With ``k=None`` the fastest plan that fits over all k, "none of them" included. Raises :class:`PlannerMismatch`
    for ``k < 1``. Cost: two walks and n + 1 estimates, one walk for a given k.
    """

    k: int | None = None

    nested = False
    options = False
    rules = RULES
    papers = ("a rule of practice, no paper",)
    validity = "every problem, as a baseline"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        if self.k is not None and self.k < 1:
            raise PlannerMismatch(f"{self.label}: k must be 1 or more")
        can = recomputable(problem)
        if self.k is not None:
            pool = [price(recomputing(problem, can[:: self.k]), problem)]
            return pick(pool, budget_bytes, label=self.label, lower_bound=least_seconds(problem))

        def members(k: int) -> tuple[int, ...]:
            return can[::k] if k else ()

        ranking = Ranking(problem)
        ranked = [ranking.one_level(k, members(k)) for k in (0, *range(len(can), 0, -1))]
        ranked.sort(key=lambda estimate: (estimate.added_seconds, estimate.peak_bytes))
        return choose(problem, ranked, lambda k: recomputing(problem, members(k)), budget_bytes, self.label)
