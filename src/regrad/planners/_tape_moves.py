"""Moves from one set of tape ranges to another, for local search. Every set that comes out is legal and nests properly."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable

from regrad.core.simulate_tape import TapeRange

Ranges = tuple[TapeRange, ...]


class Moves:
    """Random neighbours of a set of ranges, in terms of torch calls.

    calls    the operations of each torch call, in order
    longest  new ranges are at most this many calls long
    problem  why an interval of operations cannot be a range; "" if it can
    """

    def __init__(
        self, calls: list[tuple[int, int]], longest: int, problem: Callable[[int, int], str], chooser: random.Random
    ) -> None:
        self.calls, self.longest, self.problem, self.chooser = calls, longest, problem, chooser
        self._starts = [first for first, _ in calls]

    def neighbour(self, ranges: Ranges) -> Ranges | None:
        """One random change; None if the one that was drawn cannot be made."""
        kind = self.chooser.random()
        if not ranges or kind < 0.2:
            return self._add(ranges)
        at = self.chooser.randrange(len(ranges))
        one, rest = ranges[at], (*ranges[:at], *ranges[at + 1 :])
        if kind < 0.35:
            return _sorted((*rest, *one.inner) if self.chooser.random() < 0.5 else rest)
        if kind < 0.65:
            return self._move(one, rest)
        if kind < 0.75:
            return self._split(one, rest)
        if kind < 0.9 and at + 1 < len(ranges):
            return self._join(ranges, at)
        return self._inside(one, rest)

    def _interval(self, one: TapeRange) -> tuple[int, int]:
        return bisect_left(self._starts, one.start), bisect_left(self._starts, one.stop)

    def _made(self, start: int, stop: int, inner: Ranges = ()) -> TapeRange | None:
        if not 0 <= start < stop <= len(self.calls):
            return None
        first, last = self.calls[start][0], self.calls[stop - 1][1]
        if self.problem(first, last):
            return None
        inside = (r for r in inner if first <= r.start and r.stop <= last and (r.start, r.stop) != (first, last))
        return TapeRange(first, last, tuple(inside))

    def _placed(self, rest: Ranges, one: TapeRange | None) -> Ranges | None:
        if one is None or any(other.start < one.stop and one.start < other.stop for other in rest):
            return None
        if any(r.start == one.start and r.stop == one.stop for r in one.inner):
            return None
        return _sorted((*rest, one))

    def _add(self, ranges: Ranges) -> Ranges | None:
        start = self.chooser.randrange(len(self.calls))
        return self._placed(ranges, self._made(start, start + self.chooser.randrange(1, self.longest)))

    def _move(self, one: TapeRange, rest: Ranges) -> Ranges | None:
        start, stop = self._interval(one)
        far = self.chooser.choice((1, 1, 2, 4, 8))
        if self.chooser.random() < 0.5:
            start += self.chooser.randrange(-far, far + 1)
        else:
            stop += self.chooser.randrange(-far, far + 1)
        return self._placed(rest, self._made(start, stop, one.inner))

    def _split(self, one: TapeRange, rest: Ranges) -> Ranges | None:
        start, stop = self._interval(one)
        if stop - start < 2:
            return None
        middle = self.chooser.randrange(start + 1, stop)
        left, right = self._made(start, middle, one.inner), self._made(middle, stop, one.inner)
        halves = [half for half in (left, right) if half is not None]
        if self.chooser.random() < 0.3:
            halves = halves[: self.chooser.randrange(1, 2)]
        return _sorted((*rest, *halves)) if halves else None

    def _join(self, ranges: Ranges, at: int) -> Ranges | None:
        """Two neighbours become one range, with what they were inside it or with nothing."""
        one, other = ranges[at], ranges[at + 1]
        start, stop = self._interval(one)[0], self._interval(other)[1]
        rest = (*ranges[:at], *ranges[at + 2 :])
        inner: Ranges = (one, other) if self.chooser.random() < 0.5 else ()
        return self._placed(rest, self._made(start, stop, inner))

    def _inside(self, one: TapeRange, rest: Ranges) -> Ranges | None:
        """A range gets another one inside, or changes one that it has."""
        start, stop = self._interval(one)
        inner = list(one.inner)
        if inner and self.chooser.random() < 0.5:
            inner.pop(self.chooser.randrange(len(inner)))
        elif stop - start > 2:
            at = self.chooser.randrange(start, stop - 1)
            made = self._made(at, self.chooser.randrange(at + 1, stop + 1))
            if made is None or any(other.start < made.stop and made.start < other.stop for other in inner):
                return None
            inner.append(made)
        return self._placed(rest, self._made(start, stop, _sorted(tuple(inner))))


def _sorted(ranges: Ranges) -> Ranges:
    return tuple(sorted(ranges, key=lambda one: one.start))
