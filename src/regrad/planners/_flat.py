"""The exact program of one level under the timeline rule, for every planner whose plans it makes.

``_staircase.py`` while exact bytes stay few, else ``_grid.py``; ``_coupled.py`` where segments share a log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from regrad.core.chain import Problem
from regrad.core.plan import Choices, Solution, Status, one_level
from regrad.core.simulate import simulate
from regrad.core.state import LOG_ENGINES
from regrad.core.state_options import only_without
from regrad.planners._coupled import coupled
from regrad.planners._grid import Grid, grid
from regrad.planners._items import items_of
from regrad.planners._staircase import Staircase, staircase
from regrad.planners._transitions import MOST_STATES, Transitions, transitions
from regrad.planners.base import least_seconds
from regrad.planners.curve import Curve, make_curve

# plans that are added up in another order than they are walked: floats lose less than this of their sum by that
TOLERANCE_RATIO = 1e-11
TOO_MANY = f"the logs that are open at one segment have more than {MOST_STATES:,} joint states"


def flat_curve(problem: Problem, label: str, limit_bytes: int | None, max_points: int, max_work: int) -> Curve | None:
    """The curve of all plans of one level; None where too many logs are open at once to solve it."""
    if not problem.shares_log:
        return _plain_curve(problem, label, limit_bytes, max_points, max_work)
    moves = transitions(problem)
    return None if moves is None else _coupled_curve(problem, label, limit_bytes, max_points, moves)


def solve_flat(problem: Problem, budget_bytes: int, label: str, max_points: int, max_work: int) -> Solution:
    """The best plan of one level, or status LIMIT with the best one that replays nothing from a shared log.

    The whole curve answers where what its grid loses is at most 1 % of the budget; below, finer grids that end near the
    budget do.
    """

    def cut(limit_bytes: int) -> Curve | None:
        return flat_curve(problem, label, limit_bytes, max_points // 4, max_work)

    whole = flat_curve(problem, label, None, max_points, max_work)
    if whole is not None:
        solution = whole.at(budget_bytes)
        until = 100 * whole.loss_bytes
        if solution.plan is None or budget_bytes - whole.loss_bytes >= until:
            return solution
        if budget_bytes > until:
            return _better(solution, _finer(cut, until, whole.least_bytes))
        finer = _finer(cut, budget_bytes, whole.least_bytes)
        if finer is None:
            return solution
        return _better(replace(finer, lower_bound=max(finer.lower_bound, solution.lower_bound)), solution)
    bound = least_seconds(problem)
    local = only_without(problem.chain, LOG_ENGINES)
    if local is None:
        return Solution(Status.LIMIT, None, lower_bound=bound, planner=label)
    solved = solve_flat(replace(problem, shape=local), budget_bytes, label, max_points, max_work)
    return replace(solved, status=Status.LIMIT, lower_bound=bound)


def _finer(cut: Callable[[int], Curve | None], budget_bytes: int, least_bytes: int) -> Solution | None:
    """The answer of the grids that end at the least budget and tenths more, as many as it takes.

    Each takes over from the one before it only with what that gave at its end, as far as its own loss could have cost
    that: a larger budget is never answered worse.
    """
    before, end = None, least_bytes + least_bytes // 10
    while end < budget_bytes:
        before, end = end, end + end // 10 + 1
    curve = cut(end)
    if curve is None:
        return None
    solution = curve.at(budget_bytes)
    if before is not None and budget_bytes - curve.loss_bytes < before:
        last = cut(before)
        solution = _better(solution, None if last is None else last.at(before))
    return solution


def _better(solution: Solution, other: Solution | None) -> Solution:
    """The faster plan of two, ``other`` made for this budget or a smaller one: only ``solution``'s bound is one here."""
    if other is None or other.plan is None:
        return solution
    best = min(solution, other, key=lambda s: (s.added_seconds, s.peak_bytes))
    bound = min(solution.lower_bound, best.added_seconds)
    status = Status.OPTIMAL if best.added_seconds <= bound else Status.FEASIBLE
    return replace(best, lower_bound=bound, status=status)


def _plain_curve(problem: Problem, label: str, limit: int | None, max_points: int, max_work: int) -> Curve:
    items = items_of(problem.chain)
    most_slack = None if limit is None else limit - items.persistent
    solved: Staircase | Grid | None = staircase(items, most_slack, max_points)
    if solved is None:
        solved = grid(items, most_slack, max_work)
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
        label,
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


def _coupled_curve(problem: Problem, label: str, limit: int | None, max_points: int, moves: Transitions) -> Curve:
    chain = problem.chain
    persistent, floor = chain.persistent_bytes, chain.persistent_bytes + chain.gradient_bytes + chain.optimizer_bytes
    solved = coupled(chain, moves, None if limit is None else limit - persistent, max_points)

    def plan(which: tuple[int, ...]) -> Choices:
        return one_level([segment.options[k].name for segment, k in zip(chain.segments, which, strict=True)])

    def frugal() -> tuple[Choices, float]:
        found = plan(solved.frugal())
        return found, simulate(found, chain, states=problem.states).added_seconds

    fastest = least_seconds(problem)
    most_seconds = max(float(np.abs(solved.seconds).max(initial=0.0)), abs(fastest))
    return make_curve(
        problem,
        label,
        limit_bytes=limit,
        unit_bytes=solved.unit,
        loss_bytes=solved.loss,
        tolerance_seconds=TOLERANCE_RATIO * most_seconds,
        least_bytes=max(persistent + solved.least, floor),
        floor_bytes=floor,
        fastest=fastest,
        budgets=solved.slack + persistent,
        seconds=solved.seconds,
        rebuild=lambda point: plan(solved.rebuild(point)),
        frugal=frugal,
    )
