"""Every block checkpointed: what most training scripts do today.

Each segment is run again on its own, so only one segment's activations are alive at a time (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost", with s = n). Not the least peak in general: on a chain of small
segments the kept boundaries dominate, and a segment whose boundary is larger than its activations is better kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.chain import Problem
from regrad.core.plan import Solution
from regrad.core.simulate import RULES
from regrad.planners.base import Planner, least_seconds, pick, price, recomputable, recomputing


@dataclass(frozen=True)
class RecomputeAll(Planner):
    """Every segment that can be recomputed is; the others are kept. Cost: one walk."""

    nested = False
    options = False
    rules = RULES
    papers = ('Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016',)
    validity = "every problem, as a baseline; not the least peak in general"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        pool = [price(recomputing(problem, recomputable(problem)), problem)]
        return pick(pool, budget_bytes, label=self.label, lower_bound=least_seconds(problem))
