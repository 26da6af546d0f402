"""Choices on a profile's chain, spans in spans included, as the ranges of torch calls that they run as."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Choices
from regrad.core.simulate_tape import TapeRange
from regrad.planners.optimal import Optimal
from regrad.planners.tape_search import TapeSearch
from regrad.torch.tape_plan import spans_as_ranges

if TYPE_CHECKING:
    from regrad.torch.profile import Profile

NESTED = Optimal(nested=True, max_work=5_000_000, most_work=500_000_000, most_cells=3_000_000)
"""Solved for the whole curve on a coarse grid, for the trace prices its plans: a blink, and 24 MB at most, because planning
may happen in a process that is short of memory."""
_MOST_SEEDS = 24


class NoSuchSpan(Exception):
    """A span that cannot be run again as one; the message says why."""


def ranges_of(source: Profile, choices: Choices) -> tuple[TapeRange, ...]:
    """The ranges that ``choices`` run as. Raises :class:`NoSuchSpan` where one of them cannot."""
    if source.search is None:
        raise NoSuchSpan(
            "spans run as ranges of torch calls, and this step's calls are not numbered: its segments were named, or a part "
            "of it is compiled"
        )
    return _legal(source, source.search, choices)


def nested_seeds(source: Profile, search: TapeSearch) -> list[tuple[TapeRange, ...]]:
    """The best nested plans of the chain for budgets all along its curve; none where the chain is too long for that."""
    try:
        curve = NESTED.curve(source.problem)
    except PlannerMismatch:
        return []
    points = curve.points()
    seeds = []
    for budget, _ in points[:: max(1, -(-len(points) // _MOST_SEEDS))]:
        plan = curve.at(budget).plan
        if plan is not None and any(choice.is_span for choice in plan):
            try:
                seeds.append(_legal(source, search, plan))
            except NoSuchSpan:
                continue
    return seeds


def _legal(source: Profile, search: TapeSearch, choices: Choices) -> tuple[TapeRange, ...]:
    calls = {(call.module, call.count): call for call in source.arithmetic.trace.calls}
    edges = [calls[piece.module, piece.call] if piece.module else None for piece in source.pieces]
    ranges = spans_as_ranges([(0, 0) if call is None else (call.start, call.stop) for call in edges], choices)
    for one in ranges:
        problem = search.problem(one.start, one.stop)
        if problem:
            inside = [call for call in edges if call and one.start <= call.start and call.stop <= one.stop]
            names = " … ".join(dict.fromkeys((inside[0].module, inside[-1].module))) if inside else "a span"
            raise NoSuchSpan(f"{names} cannot be run again as one: {problem}")
    return ranges
