"""About √n spans: the textbook choice.

Chen et al. 2016 (see ``uniform.py``): with s spans of n/s equal segments s + n/s boundaries' worth is alive, least at
s = √n, for one more forward. The closed form counts the boundary that a span shares with its first segment twice; the
simulator does not, so the two differ by one unit or more. Valid for homogeneous chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Solution
from regrad.core.simulate import RULES
from regrad.planners.base import Planner, least_seconds, pick, price, recomputable, recomputing
from regrad.planners.spans import uniform_spans


def closed_form_peak(n: int, s: int) -> float:
    """Chen's peak of ``s`` spans over ``n`` equal segments, in units of one segment: s + n/s.

    64 segments: 16 for s = 8, 65 for s = 64; 10,000 segments: 200 for s = 100. Raises :class:`PlannerMismatch` unless
    1 <= s <= n.
    """
    if not 1 <= s <= n:
        raise PlannerMismatch(f"{s} spans over {n} segments: there must be at least one span and one segment in each")
    return s + n / s


def best_count(n: int) -> int:
    """The s that minimises :func:`closed_form_peak` for ``n`` segments: √n, or its better neighbour."""
    root = isqrt(n)
    return min((s for s in (root, root + 1) if s <= n), key=lambda s: closed_form_peak(n, s))


@dataclass(frozen=True)
class SqrtN(Planner):
    """``Uniform`` with about as many spans as each has segments; keeps all where nothing can be recomputed.

    A plan with spans is for executors that can run them. Cost: one walk.
    """

    nested = True
    options = False
    rules = RULES
    papers = ('Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016',)
    validity = "equal segments, one level of spans, within a unit or two of 2 sqrt(n); else a baseline"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        count = len(recomputable(problem))
        plan = uniform_spans(problem, best_count(count)) if count else recomputing(problem, ())
        return pick([price(plan, problem)], budget_bytes, label=self.label, lower_bound=least_seconds(problem))
