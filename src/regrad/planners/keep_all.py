"""The eager step: nothing is recomputed. Every other plan is measured against it."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.chain import Problem
from regrad.core.plan import Solution
from regrad.core.simulate import RULES
from regrad.planners.base import Planner, least_seconds, pick, price, recomputing


@dataclass(frozen=True)
class KeepAll(Planner):
    """Every segment keeps what autograd saves (its first option where it has no keep). Cost: one walk."""

    nested = False
    options = False
    rules = RULES
    papers = ("the eager step, no paper",)
    validity = "every problem; never slower than a plan that only recomputes"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        pool = [price(recomputing(problem, ()), problem)]
        return pick(pool, budget_bytes, label=self.label, lower_bound=least_seconds(problem))
