"""Segments of equal length, each run again as a whole.

Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016. Exact for
homogeneous chains and one level: with s spans over n segments about s + n/s units are alive. On chains of unequal
segments it is a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Solution
from regrad.core.simulate import RULES
from regrad.planners._ranking import Ranking, choose
from regrad.planners.base import Planner, least_seconds, pick, price, recomputable
from regrad.planners.spans import uniform_cuts, uniform_spans


@dataclass(frozen=True)
class Uniform(Planner):
    """``k`` spans of equal length over the segments that can be recomputed; in the replay of a span all is kept.

    Segments that can only be kept stay outside: a span that would reach across one is cut there, so a chain with
    such segments in between can have more than k spans. A plan with spans is for executors that can run them.
    With ``k=None`` the fastest that fits over all k; keeps all where nothing can be recomputed. Raises
    :class:`PlannerMismatch` unless 1 <= k <= the number of segments that can be recomputed. Cost: two walks and n
    estimates, one walk for a given k.
    """

    k: int | None = None

    nested = True
    options = False
    rules = RULES
    papers = ('Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016',)
    validity = "equal segments, one level of spans; else a baseline"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        can = recomputable(problem)
        if self.k is None and can:
            ranking = Ranking(problem)
            ranked = [ranking.spans(k, uniform_cuts(can, k)) for k in range(1, len(can) + 1)]
            ranked.sort(key=lambda estimate: (estimate.added_seconds, estimate.peak_bytes))
            return choose(problem, ranked, lambda k: uniform_spans(problem, k), budget_bytes, self.label)
        if self.k is not None and not 1 <= self.k <= len(can):
            raise PlannerMismatch(f"{self.label}: this chain has {len(can)} segments that can be recomputed")
        pool = [price(uniform_spans(problem, self.k or 0), problem)]
        return pick(pool, budget_bytes, label=self.label, lower_bound=least_seconds(problem))
