"""From one set of tape ranges and moves to another, for local search. Every set that comes out is legal and nests properly."""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from regrad.core.simulate_moves import Movable
from regrad.core.simulate_tape import TapeArithmetic, TapeRange

Ranges = tuple[TapeRange, ...]
Moved = tuple[Movable, ...]

_HEAT, _PENALTY, _MOST_TRIES = 0.05, 20.0, 20_000
"""Annealing: the first temperature in shares of the added seconds, the price of a budget's overrun, and the most tries a
start."""
_SHARE = 0.25
"""Of the changes, where there are ranges and moves, so many are of moves."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A set of ranges and moves with the trace's figures for it."""

    ranges: Ranges
    peak_bytes: int
    added_seconds: float
    moves: Moved = ()


class MoveChanges:
    """Random changes of a set of moves: one is made or not, one stands in for another, all of a kind come or go."""

    def __init__(self, tape: TapeArithmetic, movables: Moved, chooser: random.Random) -> None:
        self.movables, self.chooser = movables, chooser
        storages, operations = tape.trace.storages, tape.trace.operations
        kinds: dict[object, list[Movable]] = {}
        for one in movables:
            saver = operations[storages[one.storage].saved_by[0].operation].name
            kinds.setdefault((one.how, storages[one.storage].bytes, saver), []).append(one)
        self._kinds = list(kinds.values())
        self._first = {one: min(save.operation for save in storages[one.storage].saved_by) for one in movables}

    def changed(self, moves: Moved) -> Moved:
        """One random change."""
        how = self.chooser.random()
        if how < 0.2:
            kind = self.chooser.choice(self._kinds)
            return self.joined(moves, kind) if any(one not in moves for one in kind) else self._without(moves, kind)
        one = self.chooser.choice(self.movables)
        if one in moves:
            return self._without(moves, [one])
        kept = self._without(moves, [self.chooser.choice(moves)]) if moves and how < 0.5 else moves
        return self.joined(kept, [one])

    def inside(self, one: TapeRange) -> list[Movable]:
        """The moves that a range, which is given up, has kept from being made."""
        return [move for move, first in self._first.items() if one.start <= first < one.stop]

    @staticmethod
    def joined(moves: Moved, more: Iterable[Movable]) -> Moved:
        """Both; of two moves of one storage the later one."""
        return tuple({one.storage: one for one in (*moves, *more)}.values())

    @staticmethod
    def _without(moves: Moved, less: list[Movable]) -> Moved:
        return tuple(one for one in moves if one not in less)


class Neighbours:
    """Random neighbours of a set of ranges and moves, in terms of torch calls.

    calls    the operations of each torch call, in order
    longest  new ranges are at most this many calls long; 0: ranges stay as they are
    problem  why an interval of operations cannot be a range; "" if it can
    moves    the changes of moves; None where there are none to make
    """

    def __init__(
        self,
        calls: list[tuple[int, int]],
        longest: int,
        problem: Callable[[int, int], str],
        chooser: random.Random,
        moves: MoveChanges | None = None,
    ) -> None:
        self.calls, self.longest, self.problem, self.chooser, self.moves = calls, longest, problem, chooser, moves
        self._starts = [first for first, _ in calls]

    def neighbour(self, at: Priced) -> tuple[Ranges, Moved] | None:
        """One random change; None if the one that was drawn cannot be made."""
        if self.moves is not None and (not self.longest or self.chooser.random() < _SHARE):
            return at.ranges, self.moves.changed(at.moves)
        if not self.longest:
            return None
        changed = self._changed(at.ranges)
        if changed is None:
            return None
        moves = at.moves
        if self.moves is not None and len(changed) < len(at.ranges) and self.chooser.random() < 0.5:
            for gone in set(at.ranges) - set(changed):
                moves = MoveChanges.joined(moves, self.moves.inside(gone))
        return changed, moves

    def _changed(self, ranges: Ranges) -> Ranges | None:
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


def annealed(
    at: Priced,
    best: Priced,
    budget_bytes: int,
    deadline: float,
    neighbours: Neighbours,
    price: Callable[[Ranges, Moved], Priced],
) -> Priced:
    """The fastest that fits of ``best`` and of what random changes lead to from ``at`` until ``deadline``."""
    chooser, scale, began = neighbours.chooser, max(best.added_seconds, 1e-9), time.monotonic()

    def cost(one: Priced) -> float:
        return one.added_seconds / scale + _PENALTY * max(0.0, one.peak_bytes / budget_bytes - 1)

    for _ in range(_MOST_TRIES):
        left = (deadline - time.monotonic()) / max(1e-9, deadline - began)
        if left <= 0:
            break
        heat = _HEAT * left * left + 1e-6
        changed = neighbours.neighbour(at)
        if changed is None:
            continue
        found = price(*changed)
        if found.peak_bytes <= budget_bytes and found.added_seconds < best.added_seconds:
            best = found
        if cost(found) < cost(at) or chooser.random() < math.exp((cost(at) - cost(found)) / heat):
            at = found
    return best


def lowered(best: Priced, movables: Moved, deadline: float, price: Callable[[Ranges, Moved], Priced]) -> Priced:
    """As long as that lowers the peak: one move more, or one less, whose coming back was in the way of others."""
    improved = True
    while improved:
        improved = False
        for one in movables:
            if time.monotonic() > deadline:
                return best
            others = tuple(move for move in best.moves if move.storage != one.storage)
            found = price(best.ranges, others if one in best.moves else (*others, one))
            if found.peak_bytes < best.peak_bytes:
                best, improved = found, True
    return best


def front(tried: list[Priced]) -> list[Priced]:
    """Those that no other beats, by falling peak."""
    found: list[Priced] = []
    for one in sorted(tried, key=lambda one: (one.added_seconds, one.peak_bytes)):
        if not found or one.peak_bytes < found[-1].peak_bytes:
            found.append(one)
    return found


def _sorted(ranges: Ranges) -> Ranges:
    return tuple(sorted(ranges, key=lambda one: one.start))
