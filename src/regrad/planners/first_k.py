"""Recompute the first k segments: the usual hand-written compromise.

For equal segments it is the best one-level choice for its k, because the activations of the first segments live the
longest. For unequal segments it is only a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Solution
from regrad.core.simulate import RULES
from regrad.planners._ranking import Ranking, choose
from regrad.planners.base import Planner, least_seconds, pick, price, recomputable, recomputing


@dataclass(frozen=True)
class FirstK(Planner):
    """The first ``k`` of the segments that can be recomputed are; with ``k=None`` the smallest k that fits
    (the fastest, should recomputing ever gain time).

    Raises :class:`PlannerMismatch` if there are fewer than ``k`` such segments or k is negative. Cost: two walks and
    n + 1 estimates, one walk for a given k.
    """

    k: int | None = None

    nested = False
    options = False
    rules = RULES
    papers = ("a rule of practice, no paper",)
    validity = "best of its k for equal segments and one level, else a baseline"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        can = recomputable(problem)
        if self.k is not None and not 0 <= self.k <= len(can):
            raise PlannerMismatch(f"{self.label}: this chain has {len(can)} segments that can be recomputed")
        if self.k is not None:
            pool = [price(recomputing(problem, can[: self.k]), problem)]
            return pick(pool, budget_bytes, label=self.label, lower_bound=least_seconds(problem))
        ranking = Ranking(problem)
        ranked = [ranking.one_level(k, can[:k]) for k in range(len(can) + 1)]
        ranked.sort(key=lambda estimate: estimate.added_seconds)  # stable: of equally fast ones the smallest k
        return choose(problem, ranked, lambda k: recomputing(problem, can[:k]), budget_bytes, self.label)
