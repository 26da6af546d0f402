"""Every planner as a candidate, the best that fits: what ``plan()`` calls.

Never worse than any planner in it, and monotone in the budget because each of them is. The one planner that may import
others.
"""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.chain import Problem
from regrad.core.plan import Choices, Solution, Status
from regrad.core.simulate import RULES
from regrad.core.units import parse_bytes
from regrad.planners.base import Planner, infeasible, least_seconds
from regrad.planners.binomial import Binomial
from regrad.planners.every_k import EveryK
from regrad.planners.first_k import FirstK
from regrad.planners.frontier import Frontier
from regrad.planners.keep_all import KeepAll
from regrad.planners.optimal import Optimal
from regrad.planners.recompute_all import RecomputeAll
from regrad.planners.sqrt_n import SqrtN
from regrad.planners.uniform import Uniform


@dataclass(frozen=True)
class Portfolio(Planner):
    """The best of ``Optimal`` (``Frontier`` under the static rule), ``KeepAll``, ``RecomputeAll``, ``FirstK``, ``EveryK``.

    With ``spans`` also of ``Optimal(nested=True)``, ``SqrtN``, ``Uniform`` and ``Binomial`` with every number of spans
    or slots: only for executors that can run them. Cost: a dozen walks beside the solve, under 0.1 s for 400 segments
    one level deep; with ``spans`` what the nested program takes.
    """

    spans: bool = False

    options = True
    rules = RULES
    papers = ("those of its members",)
    validity = "never worse than its best member; optimal where a member proves it"

    @property
    def nested(self) -> bool:
        """As ``spans``."""
        return self.spans

    def members(self, problem: Problem) -> tuple[Planner, ...]:
        """The planners that take this problem, in the order in which equally good plans are preferred."""
        planners: list[Planner] = [Optimal(), Frontier(), KeepAll(), FirstK(), EveryK(), RecomputeAll()]
        if self.spans:
            planners += [] if problem.shares_log else [Optimal(nested=True)]
            planners += [SqrtN(), Uniform(), Binomial()]
        return tuple(planner for planner in planners if problem.rule in planner.rules)

    def candidates(self, problem: Problem, budget_bytes: int) -> tuple[Solution, ...]:
        """One solution per distinct plan that fits, the best first, so that a caller can price them all on a trace.

        Sorted by added seconds, then peak, then the order of :meth:`members`; empty if nothing fits.
        """
        return self._ranked(self._solutions(problem, budget_bytes))

    def _solutions(self, problem: Problem, budget_bytes: int) -> list[Solution]:
        self.check(problem)
        budget = parse_bytes(budget_bytes)
        return [planner(problem, budget) for planner in self.members(problem)]

    def _ranked(self, solutions: list[Solution]) -> tuple[Solution, ...]:
        distinct: dict[object, Solution] = {}
        for solution in solutions:
            if solution.plan is not None:
                distinct.setdefault(_flat(solution.plan), solution)
        return tuple(sorted(distinct.values(), key=lambda s: (s.added_seconds, s.peak_bytes)))

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        solutions = self._solutions(problem, budget_bytes)
        least = min(s.least_bytes for s in solutions if s.plan is not None or s.status is Status.INFEASIBLE)
        ranked = self._ranked(solutions)
        if not ranked:
            return infeasible(least, self.label)
        best = ranked[0]
        # every member knows a bound for all plans, only the programs over one level bound no plan with spans
        flat = (Optimal().label, Frontier().label) if self.spans else ()
        proved = [s.lower_bound for s in solutions if s.plan is not None and s.planner not in flat]
        bound = min(max(proved, default=least_seconds(problem)), best.added_seconds)
        status = Status.OPTIMAL if best.added_seconds <= bound else Status.FEASIBLE
        return Solution(status, best.plan, bound, best.peak_bytes, best.added_seconds, least, best.planner)


def _flat(plan: Choices) -> tuple[tuple[int, int, str], ...]:
    """A plan without its nesting, which start and stop tell: hundreds of spans in spans are too deep to be hashed."""
    found, ahead = [], list(reversed(plan))
    while ahead:
        choice = ahead.pop()
        found.append((choice.start, choice.stop, f"span {choice.option}" if choice.is_span else choice.option))
        ahead += reversed(choice.inner)
    return tuple(found)
