"""Plans with one level of equally long spans, for the planners that propose them."""

from __future__ import annotations

from regrad.core.chain import RECOMPUTE, Problem
from regrad.core.plan import Choice, Choices
from regrad.planners.base import kept, recomputable


def span(problem: Problem, start: int, stop: int) -> Choice:
    """Segments ``start`` … ``stop - 1`` as one span whose second run keeps everything."""
    inner = tuple(Choice(i, i + 1, kept(problem.chain.segments[i])) for i in range(start, stop))
    return Choice(start, stop, RECOMPUTE, inner)


def uniform_cuts(can: tuple[int, ...], k: int) -> list[tuple[int, int]]:
    """Start and stop of the spans when the segments in ``can`` are put in ``k`` parts whose lengths differ by one.

    A part that a segment in between interrupts is cut there.
    """
    cuts: list[tuple[int, int]] = []
    start = previous = part = -1
    for position, segment in enumerate(can):
        if segment != previous + 1 or position * k // len(can) != part or start < 0:
            if start >= 0:
                cuts.append((start, previous + 1))
            start, part = segment, position * k // len(can)
        previous = segment
    return [*cuts, (start, previous + 1)] if can else []


def uniform_spans(problem: Problem, k: int) -> Choices:
    """The segments that can be recomputed in ``k`` equal parts, each a span (:func:`uniform_cuts`); others are kept."""
    starts = {start: span(problem, start, stop) for start, stop in uniform_cuts(recomputable(problem), k)}
    choices: list[Choice] = []
    at = 0
    while at < len(problem.chain):
        choices.append(starts.get(at) or Choice(at, at + 1, kept(problem.chain.segments[at])))
        at = choices[-1].stop
    return tuple(choices)
