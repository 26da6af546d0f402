"""The exact program of one level under the static rule, for every planner whose plans it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from regrad.core.chain import Option, Problem
from regrad.core.plan import Choices, Solution, Status, one_level
from regrad.core.state import LOG_ENGINES
from regrad.core.state_options import only_without
from regrad.planners._pareto import Pareto, pareto
from regrad.planners._transitions import transitions
from regrad.planners.base import fastest_first, infeasible, least_seconds, pick, price

TRIALS = 16  # limits on transient bytes, and prices of retained bytes, in the answer beyond the limit


@dataclass(frozen=True, slots=True)
class StaticPoint:
    """A plan that no other one matches: Σ retained (the log's with it), max transient, added seconds."""

    retained_bytes: int
    transient_bytes: int
    added_seconds: float
    plan: Choices


def static_frontier(problem: Problem, max_points: int, most_plans: int | None = None) -> tuple[StaticPoint, ...] | None:
    """Every such plan, or ``most_plans`` of them evenly spaced, retained bytes ascending; None beyond ``max_points``."""
    found = _solve(problem, max_points)
    if found is None:
        return None
    points = found.points
    return tuple(
        StaticPoint(
            int(points.retained[k]), int(points.transient[k]), float(points.seconds[k]), _plan(problem, found, k)
        )
        for k in spread(len(points), most_plans or len(points))
    )


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` indices, evenly spaced, the ends with them."""
    which: list[int] = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()
    return which


def solve_static(problem: Problem, budget_bytes: int, label: str, max_points: int) -> Solution:
    """The best plan of one level under the static rule, or status LIMIT with the best of a few dozen."""
    found = _solve(problem, max_points)
    if found is None:
        pool = fastest_first(simple_plans(problem), problem)
        bound = least_seconds(problem)
        solved = pick(pool, budget_bytes, label=label, lower_bound=bound) if pool else infeasible(0, label)
        return replace(solved, status=Status.LIMIT, lower_bound=bound)
    chain, points = problem.chain, found.points
    peaks = chain.persistent_bytes + chain.gradient_bytes + points.retained + np.maximum(points.transient, 0)
    peaks = np.maximum(peaks, chain.persistent_bytes + chain.gradient_bytes + chain.optimizer_bytes)
    fits = np.flatnonzero(peaks <= budget_bytes)
    if not len(fits):
        return infeasible(int(peaks.min()), label)
    best = fits[np.lexsort((peaks[fits], points.seconds[fits]))[0]]
    plan = price(_plan(problem, found, int(best)), problem)
    return replace(
        pick([plan], budget_bytes, label=label, status=Status.OPTIMAL),
        least_bytes=int(peaks.min()),
    )


def _solve(problem: Problem, max_points: int) -> Pareto | None:
    moves = transitions(problem)
    return None if moves is None else pareto(problem, moves, max_points)


def _plan(problem: Problem, found: Pareto, point: int) -> Choices:
    which = found.rebuild(point)
    return one_level([s.options[k].name for s, k in zip(problem.chain.segments, which, strict=True)])


def simple_plans(problem: Problem) -> list[Choices]:
    """For some limits on the transient bytes and some prices of a retained byte each segment's cheapest option.

    Without options that need a shared log. None of it depends on a budget, so a larger one is never answered worse.
    """
    chain = only_without(problem.chain, LOG_ENGINES)
    if chain is None:
        return []
    every = [option for segment in chain.segments for option in segment.options]
    limits = np.unique(np.quantile([o.transient_bytes for o in every], np.linspace(0, 1, TRIALS), method="higher"))
    spread_seconds = max(o.added_seconds for o in every) - min(o.added_seconds for o in every) or 1.0
    size = max(max(o.retained_bytes for o in every), 1)
    prices = [0.0, *(spread_seconds / size * 4.0**k for k in range(-TRIALS // 2, TRIALS // 2))]
    prices.append(spread_seconds * 4.0**TRIALS)
    found = (
        one_level([_cheapest(segment.options, limit, per_byte).name for segment in chain.segments])
        for limit in limits.tolist()
        for per_byte in prices
    )
    return list(dict.fromkeys(found))


def _cheapest(options: tuple[Option, ...], limit: int, per_byte: float) -> Option:
    return min(
        options,
        key=lambda o: (max(o.transient_bytes - limit, 0), o.added_seconds + per_byte * o.retained_bytes),
    )
