"""The best plan for every budget, by dynamic programming: one option per segment, or any nesting of spans.

Exact for heterogeneous chains with any options under the timeline rule. The recursion over the chain with the memory
that is left is the one of Beaumont et al. 2019 ("Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory"), here with the timeline's own constraint at each moment.

One level: a recursion over suffixes (``_items.py``). Memory is exact bytes in Pareto staircases as long as those stay
small (``_staircase.py``), beyond that a grid, rounded upward, whose loss is stated (``_grid.py``); where replays share a
log of state, what couples them is carried along (``_transitions.py``, ``_coupled.py``). Nested: a recursion
over ranges (``_figures.py``, ``_nested.py``) on a grid that is exact where its unit divides every figure, and whose
loss is at most 1 % of any budget where it does not; the least budget is exact always (``_extent.py``). Bound: 1,000
segments where many are alike; where all differ about 70 for the whole curve and about 100 for one budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Choices, Solution, Status
from regrad.core.simulate import simulate
from regrad.planners._extent import Extent
from regrad.planners._figures import NEVER, Figures, descend, figures_of, up
from regrad.planners._flat import TOLERANCE_RATIO, TOO_MANY, flat_curve, solve_flat
from regrad.planners._nested import Nested
from regrad.planners.base import Planner, infeasible
from regrad.planners.curve import Curve, make_curve

MOST_SEGMENTS = 1_000
STEP_CELLS = 4_000  # what handling a span costs apart from its cells, in updates of cells
FEASIBLE_SECONDS = 1e200  # a plan of unknown, finite seconds


@dataclass(frozen=True, slots=True)
class _Scale:
    """What the nested program needs: which cells change, the bytes of a cell, and why the whole curve is too much."""

    extent: Extent
    unit: int
    too_much: str = ""


@dataclass(frozen=True)
class Optimal(Planner):
    """The least added seconds within the budget, over all plans of one level, or with ``nested`` over all plans.

    max_points  the exact solver of one level stops at a staircase of more points than this, and the grid starts
    max_work    cell updates that a grid may spend before it takes a coarser unit (about 1 ns each)
    most_work   cell updates that the nested grid may spend to keep its loss at 1 %; so with ``most_cells``, 8 bytes each.
                Where the whole curve takes more, it is solved up to the budget asked for, on a grid that loses at most
                1 % of that budget; where even this takes more the status is LIMIT, with the best plan known

    Under the static rule use a planner that takes it. A plan with spans is for executors that can run them. Cost: a
    few milliseconds for tens of segments; see the solvers for hundreds.
    """

    nested: bool = False
    max_points: int = 20_000
    max_work: int = 300_000_000
    most_work: int = 6_000_000_000
    most_cells: int = 100_000_000

    options = True
    rules = ("timeline",)
    papers = (
        'Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with '
        'limited memory", 2019',
    )
    validity = (
        "the timeline rule, chains with any options; one level also with state, union or shared log; spans within its "
        "limits; to the byte or within the stated loss"
    )

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        # the whole curve, not one cut at the budget: two budgets must not be answered on two grids, or a larger one
        # could come out slower
        if not self.nested:
            return solve_flat(problem, budget_bytes, self.label, self.max_points, self.max_work)
        self._refuse_logs(problem)
        figures = figures_of(problem.chain)
        found = self._extent(figures)
        if isinstance(found, _Scale) and not found.too_much:
            return self._nested_curve(problem, found.extent, found.unit, None).at(budget_bytes)
        flat = replace(self, nested=False)(problem, budget_bytes)
        if isinstance(found, str):
            return replace(flat, status=Status.LIMIT, lower_bound=figures.fastest, planner=self.label)
        return self._cut(problem, found, budget_bytes, flat)

    def _cut(self, problem: Problem, scale: _Scale, budget_bytes: int, flat: Solution) -> Solution:
        """The answer where the whole curve is too much: from a grid up to the budget, or of one level if that is better.

        Which grid answers depends on the budget; each takes over from a finer one only with what that gave at its end,
        and the plan of one level is compared with always, so a larger budget is never answered worse.
        """
        least, fastest = scale.extent.least_bytes, scale.extent.figures.fastest
        if budget_bytes < least:
            return infeasible(least, self.label)
        if flat.plan is not None and flat.added_seconds <= fastest:
            return replace(flat, status=Status.OPTIMAL, least_bytes=least, planner=self.label)
        unit, reach, finer = self._grid_for(scale.extent, scale.unit, budget_bytes)
        solution = flat
        if reach is not None:
            solution = self._on_grid(problem, scale, unit, reach, finer, budget_bytes)
        elif finer is not None:
            solution = self._cut(problem, scale, finer, flat)
        bound = fastest if reach is None else solution.lower_bound
        status = Status.LIMIT if reach is None else solution.status
        if flat.plan is not None and (solution.plan is None or flat.added_seconds < solution.added_seconds):
            solution, status = flat, Status.LIMIT if reach is None else Status.FEASIBLE
        bound = min(bound, solution.added_seconds) if solution.plan is not None else bound
        return replace(solution, status=status, lower_bound=bound, least_bytes=least, planner=self.label)

    def _on_grid(
        self, problem: Problem, scale: _Scale, unit: int, reach: int, finer: int | None, budget_bytes: int
    ) -> Solution:
        loss = scale.extent.figures.loss_bytes(unit)
        solution = self._nested_curve(problem, scale.extent, unit, min(budget_bytes + loss, reach)).at(budget_bytes)
        if finer is not None and budget_bytes - loss < finer:  # what the finer grid knew may be lost on this one
            other = self._cut(problem, scale, finer, infeasible(scale.extent.least_bytes, self.label))
            if other.plan is not None and other.added_seconds < solution.added_seconds:
                bound = solution.lower_bound
                solution = replace(other, status=Status.FEASIBLE, lower_bound=bound)
        return solution

    def _grid_for(self, extent: Extent, unit: int, budget_bytes: int) -> tuple[int, int | None, int | None]:
        """The finest unit whose grid can be solved up to the budget, how far it reaches, and how far the finer one did.

        The reach is None if that unit would lose more than 1 % of the budget.
        """
        finer, first, power = None, unit, 0
        while 100 * extent.figures.loss_bytes(unit) <= budget_bytes:
            reach = self._reach(extent, unit)
            if reach is not None and budget_bytes <= reach:
                return unit, reach, finer
            finer, power = finer if reach is None else reach, power + 1
            unit = -(-first * 5**power // 4**power)
        return unit, None, finer

    def curve(self, problem: Problem, limit_bytes: int | None = None) -> Curve:
        """The whole time-memory curve, or with ``limit_bytes`` the part of it up to that budget.

        Raises :class:`PlannerMismatch` for a problem that it cannot take, and nested for one beyond its limits. On
        the grid of one level the unit is at most 1/(100 n) of the fastest plan's peak (or of the limit), on the nested
        one of the least budget, so ``loss_bytes`` is at most about 1 % of it; seconds are never rounded, and
        ``least_bytes`` is exact in every case.
        """
        self.check(problem)
        if not self.nested:
            curve = flat_curve(problem, self.label, limit_bytes, self.max_points, self.max_work)
            if curve is None:
                raise PlannerMismatch(f"{self.label}: {TOO_MANY}; offer fewer variables or segments the shared log")
            return curve
        self._refuse_logs(problem)
        found = self._extent(figures_of(problem.chain))
        if isinstance(found, str) or found.too_much:
            why = found if isinstance(found, str) else found.too_much
            raise PlannerMismatch(f"{self.label}: {why}; ask for single budgets, or allow more most_work")
        return self._nested_curve(problem, found.extent, found.unit, limit_bytes)

    def _refuse_logs(self, problem: Problem) -> None:
        if problem.shares_log:
            raise PlannerMismatch(
                f"{self.label} plans no replays from a log that segments share: take Optimal(), or offer the engines "
                "whose cost is each segment's own"
            )

    def _extent(self, figures: Figures) -> _Scale | str:
        """What is needed to solve the nested problem, or why that is too much."""
        count = len(figures.parts)
        if count > MOST_SEGMENTS:
            return f"{count:,} segments are more than {MOST_SEGMENTS:,}"
        steps = sum(stop - start for start, stop in figures.classes[1])
        if steps * STEP_CELLS > self.most_work:
            most = self.most_work // STEP_CELLS
            return f"{count} segments make {steps:,} different beginnings of plans, more than {most:,}"
        extent = Extent(figures)
        cells, work = extent.spread()
        grain, coarsest = figures.grain, extent.least_bytes // (100 * (count + 1))
        unit = max(grain, min(-(-work // self.max_work), coarsest))
        if self._affords(extent, unit, None):
            return _Scale(extent, unit)
        return _Scale(
            extent,
            unit,
            f"a unit of {unit:,} bytes takes {cells // unit:,} cells and {work // unit:,} updates of cells",
        )

    def _affords(self, extent: Extent, unit: int, top: int | None) -> bool:
        """Whether the grid can be solved with so many bytes above P, or to its end."""
        cells, work = extent.spread(top)
        return cells // unit <= self.most_cells and work // unit <= self.most_work

    def _reach(self, extent: Extent, unit: int) -> int | None:
        """The largest budget up to which the grid can be solved; None if not even its first plan is within that."""
        low, persistent = int(extent.rows[0, len(extent.figures.parts)]), extent.figures.persistent
        if self._affords(extent, unit, None):
            return NEVER
        if not self._affords(extent, unit, low):
            return None
        high = 2 * max(low, 1)
        while self._affords(extent, unit, high):
            low, high = high, 2 * high
        while high - low > max(unit, low // 1000):
            middle = (low + high) // 2
            low, high = (middle, high) if self._affords(extent, unit, middle) else (low, middle)
        return persistent + low

    def _nested_curve(self, problem: Problem, extent: Extent, unit: int, limit: int | None) -> Curve:
        figures = extent.figures
        room = None if limit is None else limit - figures.persistent
        solved = Nested(problem.chain, figures, unit, room)
        falls = np.flatnonzero(np.diff(solved.seconds, prepend=np.inf) < 0)
        slack, seconds = (solved.first + falls) * unit, solved.seconds[falls]

        def frugal() -> tuple[Choices, float]:
            # every item that leaves a way is possible; the cells, read with the loss on top, say which is fast
            def price(start: int, stop: int, memory: int, inside: bool) -> float:
                if not extent.fits(start, stop, memory, inside):
                    return inf
                cells = up(memory, unit) + len(figures.parts) + 1
                return min(solved.price(start, stop, cells, inside), FEASIBLE_SECONDS)

            plan = descend(problem.chain, figures, 1, extent.least_bytes - figures.persistent, price)
            return plan, simulate(plan, problem.chain).added_seconds

        most_seconds = max(np.abs(seconds).max(initial=0.0), abs(figures.fastest))
        return make_curve(
            problem,
            self.label,
            limit_bytes=limit,
            unit_bytes=unit,
            loss_bytes=solved.loss,
            tolerance_seconds=TOLERANCE_RATIO * float(most_seconds),
            least_bytes=extent.least_bytes,
            floor_bytes=figures.floor,
            fastest=figures.fastest,
            budgets=slack + figures.persistent,
            seconds=seconds,
            rebuild=lambda point: solved.choices(int(falls[point])),
            frugal=frugal,
        )
