"""A control: what it costs to plan activations as if keeping state were free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from regrad.core.chain import Problem
from regrad.core.plan import Choices, Solution
from regrad.core.simulate import RULES
from regrad.core.state import STAYS_BACK
from regrad.core.state_options import only_without, without_states
from regrad.planners._flat import flat_curve
from regrad.planners._static import simple_plans, spread, static_frontier
from regrad.planners.base import Planner, fastest_first, least_seconds, pick

MOST_WALKS = 256


@dataclass(frozen=True)
class StateAgnostic(Planner):
    """Plans with the cost of keeping state left out, and is then charged the true cost.

    Its plans are those on the time-memory curve of the problem without state costs, with the engine that stands first
    in each segment (one that stays rolled back is left to planners that see it); of these the fastest that truly fits.
    At most 256 points of that curve, evenly spaced, are looked at. Cost: the solve and a walk for each.
    """

    max_points: int = 20_000
    max_work: int = 300_000_000

    nested = False
    options = True
    rules = RULES
    papers = ("the study of activation recomputation under hidden mutable state: plans that ignore retention",)
    validity = "none beyond the budget, which is kept by true costs; a control"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        pool = fastest_first(self._proposals(problem), problem)
        return pick(pool, budget_bytes, label=self.label, lower_bound=least_seconds(problem))

    def _proposals(self, problem: Problem) -> list[Choices]:
        chain = without_states(only_without(problem.chain, (STAYS_BACK,)) or problem.chain)
        free = replace(problem, shape=chain)
        if problem.rule == "static":
            found = static_frontier(free, self.max_points, MOST_WALKS)
            return simple_plans(free) if found is None else [point.plan for point in found]
        curve = flat_curve(free, self.label, None, self.max_points, self.max_work)
        assert curve is not None  # without states no log is open
        budgets = [budget for budget, _ in curve.points()]
        solutions = [curve.at(budgets[k]) for k in spread(len(budgets), MOST_WALKS)]
        return [solution.plan for solution in solutions if solution.plan is not None]
