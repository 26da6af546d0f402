"""The set of plans of one level that no other one matches in Σ retained, max transient and seconds: the static rule.

A recursion over suffixes, with the joint states of ``_transitions.py`` where segments share a log. Of two plans of a
suffix one may be dropped only if the other is no worse in all three: what comes before adds to the retained bytes but
takes the maximum of the transient ones, so that a lower sum now can be a higher one in the end. Nothing else is ever
dropped; the set can grow as m^n, and beyond ``max_points`` there is no answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from regrad.core.chain import Option, Problem
from regrad.core.errors import PlannerMismatch
from regrad.planners._transitions import Transitions

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOST_BYTES = 1 << 59


@dataclass(frozen=True, slots=True)
class Points:
    """Plans of a suffix in one joint state, and the step and the point of the next suffix that each was made from."""

    retained: Ints
    transient: Ints
    seconds: Floats
    step: NDArray[np.int32]
    parent: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.retained)


@dataclass(frozen=True, slots=True)
class Pareto:
    """The points of the whole chain, retained bytes ascending, and the way back to their plans."""

    points: Points
    _moves: Transitions
    _back: tuple[tuple[Points, ...], ...]

    def rebuild(self, point: int) -> tuple[int, ...]:
        """The option of every segment in the plan of a point."""
        chosen, state = [], 0
        for steps, rows in zip(self._moves.steps, self._back, strict=True):
            row = rows[state]
            step = steps[int(row.step[point])]
            point, state = int(row.parent[point]), step.later
            chosen.append(step.option)
        return tuple(chosen)


def pareto(problem: Problem, moves: Transitions, max_points: int) -> Pareto | None:
    """The whole set; None if the plans of a suffix, in all joint states together, are more than ``max_points``.

    Cost: O(steps · points · log points), 32 bytes for each point of each suffix.
    """
    start: Ints = np.zeros(1, dtype=np.int64)
    rows: tuple[Points, ...] = (Points(start, start, np.zeros(1), start.astype(np.int32), start.astype(np.int32)),)
    back = []
    for i in range(len(problem.chain) - 1, -1, -1):
        options = problem.chain.segments[i].options
        for option in options:
            _check(problem.chain.segments[i].name, option)
        offers: list[list[Points]] = [[] for _ in range(moves.counts[i])]
        for which, step in enumerate(moves.steps[i]):
            option, row = options[step.option], rows[step.later]
            offers[step.state].append(
                Points(
                    row.retained + (option.retained_bytes + step.log),
                    np.maximum(row.transient, option.transient_bytes + step.aside),
                    row.seconds + (option.added_seconds + step.seconds),
                    np.full(len(row), which, dtype=np.int32),
                    np.arange(len(row), dtype=np.int32),
                )
            )
        made = tuple(_merged(offer) for offer in offers)
        if sum(map(len, made)) > max_points:
            return None
        rows = made
        back.append(made)
    return Pareto(rows[0], moves, tuple(reversed(back)))


def _check(segment: str, option: Option) -> None:
    if not isfinite(option.added_seconds) or option.retained_bytes < 0:
        raise PlannerMismatch(
            f"option {option.name!r} of segment {segment!r} takes {option.added_seconds} seconds and retains "
            f"{option.retained_bytes:,} bytes: the static rule adds up finite seconds and no negative bytes"
        )
    if option.retained_bytes + abs(option.transient_bytes) >= MOST_BYTES:
        raise PlannerMismatch(f"option {option.name!r} of segment {segment!r} needs 2**59 bytes or more")


def _merged(offers: Sequence[Points]) -> Points:
    if not offers:
        nothing: Ints = np.empty(0, dtype=np.int64)
        return Points(nothing, nothing, np.empty(0), nothing.astype(np.int32), nothing.astype(np.int32))
    columns = [
        np.concatenate([getattr(o, name) for o in offers])
        for name in ("retained", "transient", "seconds", "step", "parent")
    ]
    kept = undominated(*columns[:3])
    return Points(*(column[kept] for column in columns))


def undominated(retained: Ints, transient: Ints, seconds: Floats) -> Ints:
    """The points that no other one matches in all three, retained bytes ascending; of equal ones the first stays."""
    order = np.lexsort((seconds, transient, retained))
    kept, steps, best = [], list[int](), list[float]()  # a staircase: transient ascending, seconds descending
    for point, t, s in zip(order.tolist(), transient[order].tolist(), seconds[order].tolist(), strict=True):
        at = bisect_right(steps, t)
        if at and best[at - 1] <= s:
            continue
        beaten = at
        while beaten < len(best) and best[beaten] >= s:
            beaten += 1
        begin = at - 1 if at and steps[at - 1] == t else at
        steps[begin:beaten], best[begin:beaten] = [t], [s]
        kept.append(point)
    return np.array(kept, dtype=np.int64)
