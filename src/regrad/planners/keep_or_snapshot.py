"""A control: what joint planning gains over the usual two ways, keeping all or copying the whole state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Solution
from regrad.core.simulate import RULES
from regrad.core.state import SNAPSHOT
from regrad.core.state_options import only
from regrad.planners._flat import solve_flat
from regrad.planners._static import solve_static
from regrad.planners.base import Planner, least_seconds


@dataclass(frozen=True)
class KeepOrSnapshot(Planner):
    """The best plan of one level in which every replay that needs state takes a copy of the whole of it.

    True costs, fewer options: segments without state keep theirs. Raises :class:`PlannerMismatch` where a segment has
    none of these options. Settings and cost as of ``Optimal`` under the timeline rule, of ``Frontier`` under the static
    one.
    """

    max_points: int = 20_000
    max_work: int = 300_000_000

    nested = False
    options = True
    rules = RULES
    papers = (
        "the study of activation recomputation under hidden mutable state: exact plans of eager and whole copies",
    )
    validity = "exact among plans of one level whose states are kept or copied whole; a control"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        chain = only(problem.chain, (SNAPSHOT,))
        if chain is None:
            raise PlannerMismatch(f"{self.label}: a segment of this chain can neither be kept nor replayed from a copy")
        limited = replace(problem, shape=chain)
        if problem.rule == "static":
            solved = solve_static(limited, budget_bytes, self.label, self.max_points)
        else:
            solved = solve_flat(limited, budget_bytes, self.label, self.max_points, self.max_work)
        if solved.plan is None:
            return solved
        # its optimum bounds no plan that may journal
        return replace(solved, lower_bound=min(solved.lower_bound, least_seconds(problem)))
