"""The best plan for every budget, by dynamic programming: one option per segment, or any nesting of spans.

Exact for heterogeneous chains with any options under the timeline rule. The recursion over the chain with the memory
that is left is the one of Beaumont et al. 2019 ("Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory"), here with the timeline's own constraint at each moment.

One level: a recursion over suffixes (``_items.py``). Memory is exact bytes in Pareto staircases as long as those stay
small (``_staircase.py``), beyond that a grid, rounded upward, whose loss is stated (``_grid.py``). Nested: a recursion
over ranges (``_figures.py``, ``_nested.py``) on a grid that is exact where its unit divides every figure, and whose
loss is at most 1 % of any budget where it does not; the least budget is exact always (``_extent.py``). Bound: 400
segments where many are alike or a large unit divides every figure; where nothing is, about 100 if the least budget is
a quarter of what keeping all takes, about 70 if it is a twelfth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Choices, Solution, Status, one_level
from regrad.core.simulate import simulate
from regrad.planners._extent import Extent
from regrad.planners._figures import Figures, descend, figures_of, up
from regrad.planners._grid import Grid, grid
from regrad.planners._items import items_of
from regrad.planners._nested import Nested
from regrad.planners._staircase import Staircase, staircase
from regrad.planners.base import Planner
from regrad.planners.curve import Curve, make_curve

# a plan with spans adds up a few thousand times of forwards; floats lose less than this of their sum by that
TOLERANCE_RATIO = 1e-11
MOST_SEGMENTS = 400  # spans nest as deep as this at worst, and plans are walked recursively
MOST_CELLS = 1 << 27
STEP_CELLS = 4_000  # what handling a span costs apart from its cells, in updates of cells
FEASIBLE_SECONDS = 1e200  # a plan of unknown, finite seconds


@dataclass(frozen=True)
class Optimal(Planner):
    """The least added seconds within the budget, over all plans of one level, or with ``nested`` over all plans.

    max_points  the exact solver of one level stops at a staircase of more points than this, and the grid starts
    max_work    cell updates that a grid may spend before it takes a coarser unit (about 1 ns each)
    most_work   cell updates that the nested grid may spend to keep its loss at 1 % (or 2**27 cells, 1 GiB); beyond
                that it answers LIMIT with the best plan of one level

    Under the static rule use a planner that takes it. A plan with spans is for executors that can run them. Cost: a
    few milliseconds for tens of segments; see the solvers for hundreds.
    """

    nested: bool = False
    max_points: int = 20_000
    max_work: int = 300_000_000
    most_work: int = 6_000_000_000

    options = True
    rules = ("timeline",)

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        # the whole curve, not one cut at the budget: two budgets must not be answered on two grids, or a larger one
        # could come out slower
        if not self.nested:
            return self.curve(problem).at(budget_bytes)
        figures = figures_of(problem.chain)
        found = self._extent(figures)
        if not isinstance(found, str):
            return self._nested_curve(problem, *found, None).at(budget_bytes)
        flat = replace(self, nested=False)(problem, budget_bytes)
        bound = min(figures.fastest, flat.added_seconds)
        return replace(flat, status=Status.LIMIT, lower_bound=bound, planner=self.label)

    def curve(self, problem: Problem, limit_bytes: int | None = None) -> Curve:
        """The whole time-memory curve, or with ``limit_bytes`` the part of it up to that budget.

        Raises :class:`PlannerMismatch` for a problem that it cannot take, and nested for one beyond its limits. On
        the grid of one level the unit is at most 1/(100 n) of the fastest plan's peak (or of the limit), on the nested
        one of the least budget, so ``loss_bytes`` is at most about 1 % of it; seconds are never rounded, and
        ``least_bytes`` is exact in every case.
        """
        self.check(problem)
        if not self.nested:
            return self._flat_curve(problem, limit_bytes)
        found = self._extent(figures_of(problem.chain))
        if isinstance(found, str):
            raise PlannerMismatch(f"{self.label}: {found}; take Portfolio(spans=True), or allow more most_work")
        return self._nested_curve(problem, *found, limit_bytes)

    def _flat_curve(self, problem: Problem, limit: int | None) -> Curve:
        items = items_of(problem.chain)
        most_slack = None if limit is None else limit - items.persistent
        solved: Staircase | Grid | None = staircase(items, most_slack, self.max_points)
        if solved is None:
            solved = grid(items, most_slack, self.max_work)
        if isinstance(solved, Grid):
            unit, loss = solved.unit, solved.loss
            falls = np.flatnonzero(np.diff(solved.seconds, prepend=np.inf) < 0)
            slack, seconds = (solved.first + falls) * unit, solved.seconds[falls]
        else:
            unit, loss = 1, 0
            falls, slack, seconds = np.arange(len(solved.slack)), solved.slack, solved.seconds

        def plan(which: tuple[int, ...]) -> Choices:
            return one_level([segment[k].name for segment, k in zip(items.segments, which, strict=True)])

        def frugal() -> tuple[Choices, float]:
            which, frugal_seconds = items.frugal()
            return plan(which), frugal_seconds

        return make_curve(
            problem,
            self.label,
            limit_bytes=limit,
            unit_bytes=unit,
            loss_bytes=loss,
            least_bytes=items.least_bytes,
            floor_bytes=items.floor,
            fastest=items.fastest[0],
            budgets=slack + items.persistent,
            seconds=seconds,
            rebuild=lambda point: plan(solved.rebuild(int(falls[point]))),
            frugal=frugal,
        )

    def _extent(self, figures: Figures) -> tuple[Extent, int] | str:
        """What is needed to solve the nested problem and the unit to solve it in, or why that is too much."""
        count = len(figures.parts)
        if count > MOST_SEGMENTS:
            return f"{count:,} segments are more than {MOST_SEGMENTS:,}"
        steps = sum(stop - start for start, stop in figures.classes[1])
        if steps * STEP_CELLS > self.most_work:
            most = self.most_work // STEP_CELLS
            return f"{count} segments make {steps:,} different beginnings of plans, more than {most:,}"
        extent = Extent(figures)
        cells, work = extent.spread
        grain, coarsest = figures.grain, extent.least_bytes // (100 * (count + 1))
        unit = max(grain, min(-(-work // self.max_work), coarsest))
        if cells // unit > MOST_CELLS or work // unit > self.most_work:
            return f"a unit of {unit:,} bytes takes {cells // unit:,} cells and {work // unit:,} updates of cells"
        return extent, unit

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
