"""Local search on the trace: what planners proposed on the chain, made faster or lower by changing single segments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from regrad.core.chain import KEEP
from regrad.torch.profile import Profile

Options = tuple[str, ...]
LIMIT_SECONDS = 1.5


def _free(source: Profile) -> list[int]:
    return [i for i, segment in enumerate(source.stateful.chain.segments) if len(segment.options) > 1]


def _with(options: Options, changes: dict[int, str]) -> Options:
    return tuple(changes.get(i, option) for i, option in enumerate(options))


def _neighbours(options: Options, source: Profile) -> Iterator[Options]:
    """Options that differ in one segment, then in two of which one is kept instead of the other."""
    free = _free(source)
    for i in free:
        for option in source.stateful.chain.segments[i].options:
            if option.name != options[i]:
                yield _with(options, {i: option.name})
    for i in free:
        for j in free:
            if options[i] != KEEP and options[j] == KEEP:
                for option in source.stateful.chain.segments[j].options:
                    if option.name != KEEP:
                        yield _with(options, {i: KEEP, j: option.name})


def _descend(start: Options, source: Profile, cost: Callable[[Options], tuple[float, float] | None]) -> Options:
    """Move to the first better neighbour until there is none or the time is up. ``cost`` is None for no plan."""
    deadline = time.monotonic() + LIMIT_SECONDS
    best, best_cost = start, cost(start)
    improved = True
    while improved and best_cost is not None:
        improved = False
        for candidate in _neighbours(best, source):
            if time.monotonic() > deadline:
                return best
            found = cost(candidate)
            if found is not None and found < best_cost:
                best, best_cost, improved = candidate, found, True
                break
    return best


def faster(
    start: Options,
    source: Profile,
    peak: Callable[[Options], int],
    seconds: Callable[[Options], float],
    budget_bytes: int,
) -> Options:
    """Options near ``start`` that take less time, or as little with a lower peak, and fit the budget."""

    def cost(options: Options) -> tuple[float, float] | None:
        return (seconds(options), peak(options)) if peak(options) <= budget_bytes else None

    return _descend(start, source, cost)


def lower(start: Options, source: Profile, peak: Callable[[Options], int]) -> Options:
    """Options near ``start`` with a lower peak."""
    return _descend(start, source, lambda options: (peak(options), 0.0))
