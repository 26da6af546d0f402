"""The ranges of one forward: which torch calls are recomputed, as values that are checked once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from regrad.core.errors import InvalidPlan


@dataclass(frozen=True, slots=True)
class Range:
    """Calls ``start`` … ``stop - 1`` of a forward, by their ordinals. ``name`` is for messages and reports.

    ``keep`` are ordinals inside that are never run again: what they save stays in the graph, and what they make is held
    where a recomputed call reads it.
    """

    start: int
    stop: int
    name: str = ""
    keep: frozenset[int] = frozenset()

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or f"calls {self.start} to {self.stop - 1}"


class Ranges:
    """Ranges that nest or lie apart, with the names of all calls that the forward is expected to make.

    A forward that calls something else from some ordinal on is recorded up to there and kept from there on. Without
    names nothing is compared.

    Raises :class:`InvalidPlan` for an empty range, two that are the same or cross, one beyond the last name, or one that
    keeps a call outside it.
    """

    def __init__(self, ranges: Iterable[Range], names: Iterable[str] = ()) -> None:
        self.ranges = tuple(sorted(ranges, key=_outermost_first))
        self.names = tuple(names)
        self.opens: dict[int, list[Range]] = {}
        enclosing: list[Range] = []
        for one in self.ranges:
            self._check(one)
            while enclosing and enclosing[-1].stop <= one.start:
                enclosing.pop()
            if enclosing and one.stop > enclosing[-1].stop:
                raise InvalidPlan(f"the ranges {enclosing[-1].title} and {one.title} cross; ranges nest or lie apart")
            if enclosing and (one.start, one.stop) == (enclosing[-1].start, enclosing[-1].stop):
                raise InvalidPlan(f"the range {one.title} stands there twice")
            enclosing.append(one)
            self.opens.setdefault(one.start, []).append(one)
        self.keep = frozenset().union(*(one.keep for one in self.ranges))
        self.first = min((one.start for one in self.ranges), default=-1)

    def _check(self, one: Range) -> None:
        if not 0 <= one.start < one.stop:
            raise InvalidPlan(f"the range {one.title} [{one.start}, {one.stop}) holds no call")
        if any(not one.start <= ordinal < one.stop for ordinal in one.keep):
            raise InvalidPlan(f"the range {one.title} keeps calls {sorted(one.keep)}, not all of which are inside it")
        if self.names and one.stop > len(self.names):
            raise InvalidPlan(f"the range {one.title} ends at call {one.stop} of a forward of {len(self.names)} calls")


def _outermost_first(one: Range) -> tuple[int, int]:
    return one.start, -one.stop
