"""A mixed-integer program in the manner of Jain et al. 2020 ("Checkmate: breaking the memory wall with optimal tensor
rematerialization"), solved by HiGHS (Huangfu & Hall 2018): the reference for small chains and for graphs.

The maths is in ``milp.md`` beside this file. Chains: one option for each segment, under either rule; no spans, which
``Optimal(nested=True)`` plans, or this planner on ``Graph.of_chain``. Graphs: before the backward of each node any nodes
may run again, in order, each at most once. Bound: chains of some hundreds of segments; graphs of about 20 nodes are
proved within a minute, larger ones end at the time limit with a plan and a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Generic, TypeVar

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.graph import Graph
from regrad.core.graph_plan import GraphSolution
from regrad.core.plan import Solution, Status
from regrad.core.simulate import RULES
from regrad.core.units import parse_bytes
from regrad.planners._milp_chain import formulate_chain
from regrad.planners._milp_graph import formulate_graph
from regrad.planners._milp_model import End, Formulation
from regrad.planners.base import Planner

P = TypeVar("P")
TOLERANCE_RATIO = 2e-6
"""The solver takes two costs for equal that differ by less than this, in units of the dearest single rerun."""
MOST_REPAIRS = 200


@dataclass(frozen=True, slots=True)
class _Known(Generic[P]):
    """A plan with the simulator's figures."""

    plan: P
    peak_bytes: int
    added_seconds: float


@dataclass(frozen=True, slots=True)
class _Answer(Generic[P]):
    status: Status
    best: _Known[P] | None
    bound: float
    least_bytes: int


@dataclass(frozen=True)
class Milp(Planner):
    """The least added seconds within the budget: one option for each segment of a chain, or any reruns of a graph.

    time_limit_seconds  for all solves of one call together; when it is over the status is LIMIT, with the best plan
                        found (None if there is none) and the bound proved so far. Answers then depend on the machine
    gap_ratio           stop at a plan that is within this of the bound; the status is FEASIBLE if it is not proved best

    Every plan is priced by the simulator in exact bytes before it is handed over. ``least_bytes`` is the peak of the
    least plan known; below it nothing fits unless the time limit cut its search short. Seconds are compared to a
    millionth of the dearest rerun. For a graph the solution is a :class:`GraphSolution`. Raises
    :class:`PlannerMismatch` for a graph under the static rule or with state variables and for a chain whose segments
    share a log of state, and :class:`UsageError` if the solver is not installed. Cost: two solves and more; see ``milp.md``.
    """

    time_limit_seconds: float = 60.0
    gap_ratio: float = 0.0

    nested = False
    options = True
    rules = RULES
    papers = (
        'Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica and Gonzalez, "Checkmate: Breaking the Memory Wall with '
        'Optimal Tensor Rematerialization", 2020',
        'Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018 (the solver HiGHS)',
    )
    validity = (
        "exact where the status is OPTIMAL: one option for each segment of a chain under both rules; on a graph, under "
        "the timeline rule, any reruns in order before each backward, the forward pass run once; about 20 nodes at any "
        "budget, about 40 above half of what can be saved"
    )

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        if isinstance(problem.shape, Graph):
            return self.graph(problem, budget_bytes)
        if problem.shares_log:
            raise PlannerMismatch(
                f"{self.label} charges every segment for itself, and the log of state that segments of this problem "
                "share couples them: take Optimal"
            )
        found = self._answer(formulate_chain(problem), budget_bytes)
        best = found.best
        if best is None:
            return Solution(found.status, None, found.bound, least_bytes=found.least_bytes, planner=self.label)
        figures = found.bound, best.peak_bytes, best.added_seconds, found.least_bytes
        return Solution(found.status, best.plan, *figures, self.label)

    def graph(self, problem: Problem, budget_bytes: int) -> GraphSolution:
        """As a call, for a problem whose shape is a graph, with the type of what it returns."""
        self.check(problem)
        if not isinstance(problem.shape, Graph) or problem.rule != "timeline":
            raise PlannerMismatch(
                f"{self.label} plans a graph under the timeline rule, not {problem.rule!r}, and no chain here"
            )
        if problem.states:
            raise PlannerMismatch(
                f"{self.label} cannot charge the state variables of a graph: its nodes have no options"
            )
        found = self._answer(formulate_graph(problem.shape), parse_bytes(budget_bytes))
        best = found.best
        if best is None:
            bound, least = found.bound, found.least_bytes
            return GraphSolution(found.status, None, bound, least_bytes=least, planner=self.label)
        figures = found.bound, best.peak_bytes, best.added_seconds, found.least_bytes
        return GraphSolution(found.status, None, *figures, self.label, best.plan)

    def _answer(self, form: Formulation[P], budget_bytes: int) -> _Answer[P]:
        if not 0 <= self.gap_ratio < inf or not self.time_limit_seconds >= 0:
            raise PlannerMismatch(f"{self.label}: the time limit and the gap must not be negative")
        search = _Search(form, budget_bytes, monotonic() + self.time_limit_seconds, self.gap_ratio)
        end, bound = search.fastest()
        search.smallest()
        best = search.best()
        least = min(known.peak_bytes for known in search.known)
        if best is None:
            status = Status.INFEASIBLE if end is End.INFEASIBLE else Status.LIMIT
            return _Answer(status, None, 0.0 if end is End.INFEASIBLE else max(bound, form.fastest), least)
        bound = min(max(bound, form.fastest), best.added_seconds) if bound < inf else form.fastest
        proved = best.added_seconds <= bound + search.tolerance
        status = Status.OPTIMAL if proved else Status.LIMIT if end is End.STOPPED else Status.FEASIBLE
        return _Answer(status, best, bound, least)


class _Search(Generic[P]):
    """The solves of one call: all plans that were seen, by exact bytes, and the time that is left."""

    def __init__(self, form: Formulation[P], budget_bytes: int, deadline: float, gap_ratio: float) -> None:
        self.form = form
        self.budget_bytes = budget_bytes
        self.deadline = deadline
        self.gap_ratio = gap_ratio
        self.known = [self._priced(plan) for plan in form.simple]
        self.dearest = max((abs(value) for value in form.seconds.values()), default=0.0) or 1.0
        self.tolerance = TOLERANCE_RATIO * self.dearest

    def _priced(self, plan: P) -> _Known[P]:
        return _Known(plan, *self.form.price(plan))

    def best(self) -> _Known[P] | None:
        """Of the plans seen that fit the fastest, and of equally fast ones that with the lowest peak."""
        fitting = [known for known in self.known if known.peak_bytes <= self.budget_bytes]
        return min(fitting, key=lambda known: (known.added_seconds, known.peak_bytes), default=None)

    def fastest(self) -> tuple[End, float]:
        """The fastest plan within the budget joins those seen; how the search ended and the bound in seconds."""
        room = self.form.units.room_of(self.budget_bytes)
        if room < 0:
            return End.INFEASIBLE, inf
        costs = {column: value / self.dearest for column, value in self.form.seconds.items()}
        bound = -inf
        for _ in range(MOST_REPAIRS):
            left = self.deadline - monotonic()
            if left <= 0:
                break
            outcome = self.form.model.solve(costs, {self.form.room: room}, seconds=left, gap_ratio=self.gap_ratio)
            bound = max(bound, outcome.bound * self.dearest)
            if outcome.values is None:
                return outcome.end, bound
            self.known.append(self._priced(self.form.read(outcome.values)))
            if self.known[-1].peak_bytes <= self.budget_bytes or outcome.end is End.STOPPED:
                return outcome.end, bound
            # it fits within the solver's tolerance and not by exact bytes
            self.form.model.forbid(self.form.blame(self.known[-1].plan))
        return End.STOPPED, bound

    def smallest(self) -> None:
        """The plan with the lowest peak joins those seen, if the time lasts."""
        for _ in range(MOST_REPAIRS):
            least = min(known.peak_bytes for known in self.known)
            left, room = self.deadline - monotonic(), self.form.units.room_of(least - 1)
            if left <= 0 or room < 0:
                return
            outcome = self.form.model.solve({self.form.room: 1.0}, {self.form.room: room}, seconds=left)
            if outcome.values is None:
                return
            self.known.append(self._priced(self.form.read(outcome.values)))
            least = min(least, self.known[-1].peak_bytes)
            if outcome.end is End.STOPPED or self.form.units.bytes_of(outcome.bound) >= least:
                return
            # a plan with the same cause of its peak is no lower
            self.form.model.forbid(self.form.blame(self.known[-1].plan))
