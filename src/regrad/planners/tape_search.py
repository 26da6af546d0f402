"""Plans of tape ranges: which stretches of torch calls to compute again, found on the trace itself.

For a price λ of a byte in seconds the best set of ranges that lie apart is a weighted interval scheduling: every stretch
of calls up to a length has the bytes that it frees and the seconds of its replay, and a dynamic program over borders
picks the set with the largest Σ freed · λ − seconds. A sweep of λ gives plans from "recompute what is nearly free" to
"recompute all"; patterns of two of them, before and after a border between blocks, lie between; spans of blocks with
ranges inside lie below. All are priced by trace arithmetic, which alone says what fits, and the best are improved by
local search.

Sources: selective recomputation (Korthikanti et al. 2022), Checkmate (Jain et al. 2020) for recomputation at the grain of
operations, Chen et al. 2016 for spans. A heuristic: no bound but that of keeping everything.
"""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from regrad.core.levels import Levels
from regrad.core.simulate_moves import PACKING, Movable, seconds_of
from regrad.core.simulate_tape import TapeArithmetic, TapeRange, movable_beside
from regrad.planners._tape_moves import MoveChanges, Moved, Neighbours, Priced, Ranges, annealed, front, lowered

__all__ = ["Blocks", "Priced", "TapeSearch", "Way", "saved_by"]

Blocks = list[tuple[int, int]]
Way = tuple[Ranges, Moved]
"""What is recomputed, and what is moved."""

_SWEEP, _MOST_PREFIXES = 12, 48
_LONGEST = 2.0
"""Ranges of one level are at most this many blocks long (at least ``_LEAST`` calls)."""
_LEAST = 24
_MOST_CALLS = 160
_MOST_PRICED = 50_000
_STARTS = 3
_ABOVE = 1.15
"""How far above the budget annealing may start."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Offer:
    """A move that can be made, what it frees and costs, and which call saves its storage first."""

    move: Movable
    freed_bytes: int
    seconds: float
    call: int


@dataclass
class TapeSearch:
    """Searches sets of tape ranges and moves on one trace.

    tape       prices them
    calls      the first and last-but-one operation of each torch call, in order
    blocks     the repeated pieces of the model, as intervals of operations; may be empty
    problem    why an interval of operations cannot be a range; "" if it can
    movables   the moves that may be made
    recompute  whether there may be ranges
    seed, limit_seconds   of the local search, for one budget
    proposals  plans of others that are tried, too; asked for once, when they are needed
    """

    tape: TapeArithmetic
    calls: list[tuple[int, int]]
    blocks: Blocks
    problem: Callable[[int, int], str]
    movables: Moved = ()
    recompute: bool = True
    seed: int = 0
    limit_seconds: float = 2.0
    proposals: Callable[[], Iterable[Ranges]] = tuple
    _priced: dict[Way, Priced] = field(default_factory=dict)
    _stretches: dict[tuple[int, ...], _Stretch | None] = field(default_factory=dict)
    _kinds: list[int] = field(default_factory=list)
    _offered: list[_Offer] | None = None
    _pool: list[Priced] | None = None
    _answers: dict[int, Priced] = field(default_factory=dict)

    # -- prices -------------------------------------------------------------------------------------------------------

    def levels(self, ranges: Ranges, moves: Moved = ()) -> Levels:
        """The levels of the step under these ranges and moves."""
        return self.tape.levels(ranges, moves=moves)

    def price(self, ranges: Iterable[TapeRange], moves: Iterable[Movable] = ()) -> Priced:
        """Peak and seconds of a set of ranges and moves, by the trace. Moves that the ranges forbid are left out, and
        of two of one storage the first."""
        taken = tuple(sorted(ranges, key=lambda one: one.start))
        beside = {one.storage: one for one in reversed(movable_beside(self.tape.trace, moves, taken))}
        key = taken, tuple(beside[storage] for storage in sorted(beside))
        found = self._priced.get(key)
        if found is None:
            if len(self._priced) > _MOST_PRICED:
                self._priced.clear()
            levels = self.tape.levels(taken, moves=key[1])
            found = self._priced[key] = Priced(taken, levels.peak_bytes, levels.added_seconds, key[1])
        return found

    @property
    def offers(self) -> list[_Offer]:
        """The moves that free something, with their prices."""
        if self._offered is None:
            starts, storages = [first for first, _ in self.calls], self.tape.trace.storages
            self._offered = []
            for one in self.movables:
                first = min(save.operation for save in storages[one.storage].saved_by)
                call = bisect_right(starts, first) - 1
                freed, seconds = storages[one.storage].bytes - one.held_bytes, seconds_of(self.tape.arithmetic, one)
                if freed > 0:
                    self._offered.append(_Offer(one, freed, seconds, call))
        return self._offered

    def stretch(self, start: int, stop: int) -> _Stretch | None:
        """What the range of calls ``start`` … ``stop - 1`` frees and costs; None if it frees nothing or cannot be."""
        first, last = self.calls[start][0], self.calls[stop - 1][1]
        if self.problem(first, last):
            return None
        # equal blocks have equal stretches: calls of one kind do the same to tensors from the same places
        kinds = self._kinds = self._kinds or self._call_kinds()
        key = tuple(kinds[start:stop])
        if key not in self._stretches:
            self._stretches[key] = self._measure(start, stop)
        return self._stretches[key]

    def _call_kinds(self) -> list[int]:
        """A number for each call, the same for calls whose operations, sizes and neighbours are the same."""
        numbers: dict[object, int] = {}
        return [
            numbers.setdefault(tuple(self._kind(k) for k in range(start, stop)), len(numbers))
            for start, stop in self.calls
        ]

    def _kind(self, position: int) -> object:
        operation, storages = self.tape.trace.operations[position], self.tape.trace.storages
        made = tuple(
            (
                storages[i].bytes,
                storages[i].drop is None,
                tuple(save.operation - position for save in storages[i].saved_by),
            )
            for i in operation.makes
        )
        read = tuple(position - storages[i].birth if storages[i].birth >= 0 else -1 for i in operation.reads)
        return operation.name, made, read, operation.seconds

    def _measure(self, start: int, stop: int) -> _Stretch | None:
        first, last = self.calls[start][0], self.calls[stop - 1][1]
        storages = self.tape.trace.storages
        one = TapeRange(first, last)
        internal = {
            index
            for index, birth in saved_by(self.tape, first, last)
            if first <= birth < last and not self._saved_outside(index, first, last)
        }
        if not internal:
            return None
        freed = sum(storages[index].bytes for index in internal)
        needed, externals = self.tape.slice_of(one)
        # what nodes of the range saved of what came before it is kept, as in the eager step
        freed -= sum(storages[i].bytes for i in externals if not storages[i].saved_by and storages[i].drop is not None)
        freed -= sum(self.tape.bytes_of_draw(k) for k in range(first, last) if self.tape.trace.operations[k].draws)
        if freed <= 0:
            return None
        return _Stretch(freed, sum(self.tape.seconds[k] for k in needed))

    def _saved_outside(self, index: int, first: int, last: int) -> bool:
        """Whether the eager step keeps a storage for a node outside the range, or for Python."""
        storage = self.tape.trace.storages[index]
        if storage.drop is None:
            return True
        return any(not first <= save.operation < last for save in storage.saved_by)

    # -- one level ----------------------------------------------------------------------------------------------------

    def best_at(self, seconds_per_byte: float, start: int = 0, stop: int | None = None) -> Way:
        """The ranges, none inside another, and moves beside them of the largest Σ freed · λ − seconds, among calls
        ``start`` … ``stop - 1``. A move counts at the first call that saves its storage."""
        stop = len(self.calls) if stop is None else stop
        offers = self._worth(seconds_per_byte, start, stop)
        gains = [0.0] * (stop + 1)
        for value, offer in offers:
            gains[offer.call] += value
        longest = self._longest() if self.recompute else 0
        best, came = [0.0] * (stop + 1), [-1] * (stop + 1)
        for end in range(start + 1, stop + 1):
            best[end] = best[end - 1] + gains[end - 1]
            for begin in range(max(start, end - longest), end):
                found = self.stretch(begin, end)
                if found is not None:
                    value = best[begin] + found.freed_bytes * seconds_per_byte - found.seconds
                    if value > best[end]:
                        best[end], came[end] = value, begin
        ranges, at = [], stop
        while at > start:
            begin = came[at]
            if begin >= 0:
                ranges.append(TapeRange(self.calls[begin][0], self.calls[at - 1][1]))
            at = begin if begin >= 0 else at - 1
        ranges.reverse()
        moves = movable_beside(self.tape.trace, [offer.move for _, offer in offers], ranges)
        return tuple(ranges), tuple(moves)

    def _worth(self, seconds_per_byte: float, start: int, stop: int) -> list[tuple[float, _Offer]]:
        """For each storage that some call of the interval saves first the best of its moves, where one pays."""
        best: dict[int, tuple[float, _Offer]] = {}
        for offer in self.offers:
            value = offer.freed_bytes * seconds_per_byte - offer.seconds
            known = best.get(offer.move.storage)
            if start <= offer.call < stop and value > 0 and (known is None or value > known[0]):
                best[offer.move.storage] = value, offer
        return list(best.values())

    def _longest(self) -> int:
        if not self.blocks:
            return min(_MOST_CALLS, max(_LEAST, len(self.calls) // 8))
        starts = [first for first, _ in self.calls]
        sizes = [bisect_left(starts, stop) - bisect_left(starts, start) for start, stop in self.blocks]
        typical = sorted(sizes)[len(sizes) // 2]
        return min(_MOST_CALLS, max(_LEAST, int(typical * _LONGEST)))

    def _sweep(self) -> list[Way]:
        """Plans of one level from the cheapest to the most thorough."""
        everything = self.best_at(1e6)
        rates = sorted(
            [found.seconds / found.freed_bytes for found in self._stretches.values() if found is not None]
            + [offer.seconds / offer.freed_bytes for offer in self.offers]
        )
        ways: dict[Way, None] = {((), ()): None}
        if not rates:
            return list(ways)
        steps = _SWEEP if self.recompute else min(_MOST_PREFIXES, len(rates))
        for step in range(steps):
            at = rates[min(len(rates) - 1, (step * len(rates)) // steps)]
            ways[self.best_at(at * 1.0001 + 1e-18)] = None
        for scale in (2.0, 8.0):
            ways[self.best_at(rates[-1] * scale)] = None
        ways[everything] = None
        return list(ways)

    def _variants(self, ways: Iterable[Way]) -> Iterator[Way]:
        """The same ranges with no moves, and with all that pack."""
        packing = [offer.move for offer in self.offers if offer.move.how in PACKING]
        for ranges in dict.fromkeys(ranges for ranges, _ in ways) if self.offers else ():
            yield ranges, ()
            if packing:
                yield ranges, tuple(packing)

    # -- patterns and spans -------------------------------------------------------------------------------------------

    def _mixtures(self, ways: list[Way]) -> Iterator[Way]:
        """One plan up to a border between blocks, and its neighbour in the sweep from there on."""
        borders = [start for start, _ in self.blocks[1:]]
        borders = borders[:: max(1, len(borders) // 16)]
        for one, other in itertools.pairwise(ways):
            for border in borders:
                yield self._joined(one, other, border)
                yield self._joined(other, one, border)

    def _joined(self, one: Way, other: Way, border: int) -> Way:
        storages = self.tape.trace.storages
        ranges = (*(r for r in one[0] if r.stop <= border), *(r for r in other[0] if r.start >= border))
        moves = (
            *(m for m in one[1] if storages[m.storage].birth < border),
            *(m for m in other[1] if storages[m.storage].birth >= border),
        )
        return ranges, moves

    def _spans(self, ways: list[Way]) -> Iterator[Way]:
        """Spans of several blocks with a plan of one level inside, in front of blocks of one level."""
        count = len(self.blocks)
        widths = sorted({2, 3, 4, max(2, round(count**0.5)), max(2, count // 2)} & set(range(2, count + 1)))
        inner_ways = [*ways[1:], (tuple(self._whole_blocks(0, count)), ())]
        for width in widths if self.recompute else ():
            for inner, moves in inner_ways:
                spans = list(self._grouped(width, inner))
                for taken in {len(spans), max(1, len(spans) // 2), max(1, len(spans) - 1)}:
                    chosen = spans[:taken]
                    if chosen:
                        rest = [one for one in inner if one.start >= chosen[-1].stop]
                        yield (*chosen, *rest), moves

    def _whole_blocks(self, start: int, stop: int) -> list[TapeRange]:
        return [TapeRange(*block) for block in self.blocks[start:stop] if not self.problem(*block)]

    def _grouped(self, width: int, inner: Ranges) -> Iterator[TapeRange]:
        for at in range(0, len(self.blocks) - width + 1, width):
            start, stop = self.blocks[at][0], self.blocks[at + width - 1][1]
            if not self.problem(start, stop):
                inside = tuple(
                    one
                    for one in inner
                    if start <= one.start and one.stop <= stop and (one.start, one.stop) != (start, stop)
                )
                yield TapeRange(start, stop, inside)

    # -- answers ------------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> list[Priced]:
        """Every plan tried so far that no other beats in both peak and seconds, by falling peak."""
        if self._pool is None:
            ways = self._sweep()
            tried = [self.price(*way) for way in (*ways, *self._variants(ways))]
            if self.recompute:
                seeds: list[Way] = [(tuple(self._whole_blocks(0, len(self.blocks))), ())]
                seeds += [(ranges, ()) for ranges in self.proposals()]
                tried += [self.price(*way) for way in (*seeds, *self._variants(seeds))]
            tried += [self.price(*way) for way in self._mixtures(ways)]
            tried += [self.price(*way) for way in self._spans(ways)]
            self._pool = front(tried)
            until = time.monotonic() + self.limit_seconds / 2
            self._pool = front([*self._pool, lowered(self._pool[-1], self.movables, until, self.price)])
        return self._pool

    def consider(self, ranges: Ranges, moves: Moved) -> None:
        """Another plan to start from."""
        self._pool = front([*self.pool, self.price(ranges, moves)])

    def least(self) -> Priced:
        """The plan of the lowest peak that is known."""
        return min(self.pool, key=lambda one: (one.peak_bytes, one.added_seconds))

    def fastest(self, budget_bytes: int) -> Priced | None:
        """The fastest plan known whose peak is at most the budget; None if none fits. Answers for other budgets are
        remembered, so that a larger one never gets a slower plan than a smaller one before it."""
        fitting = [one for one in self.pool if one.peak_bytes <= budget_bytes]
        if not fitting:
            return None
        known = [one for one in self._answers.values() if one.peak_bytes <= budget_bytes]
        best = min(fitting + known, key=lambda one: (one.added_seconds, one.peak_bytes))
        found = self._answers[budget_bytes] = self._improved(best, budget_bytes)
        return found

    def _improved(self, start: Priced, budget_bytes: int) -> Priced:
        """Drop what is not needed to fit, then anneal: borders move, ranges split, join, nest, come and go."""
        best = self._thinned(start, budget_bytes)
        near = [
            one
            for one in self.pool
            if one.peak_bytes <= budget_bytes * _ABOVE and one.added_seconds < best.added_seconds
        ]
        deadline = time.monotonic() + self.limit_seconds
        starts = [best, *sorted(near, key=lambda one: one.peak_bytes)[: _STARTS - 1]]
        for turn in range(_STARTS):
            at = starts[turn] if turn < len(starts) else best
            end = time.monotonic() + (deadline - time.monotonic()) / (_STARTS - turn)
            chooser = random.Random(self.seed + turn)
            moves = MoveChanges(self.tape, self.movables, chooser) if self.movables else None
            longest = self._longest() if self.recompute else 0
            neighbours = Neighbours(self.calls, longest, self.problem, chooser, moves)
            best = annealed(at, best, budget_bytes, end, neighbours, self.price)
        return self._thinned(best, budget_bytes)

    def _thinned(self, best: Priced, budget_bytes: int) -> Priced:
        for one in sorted(best.ranges, key=lambda one: -self.tape.seconds_of(one)):
            candidate = self.price((kept for kept in best.ranges if kept is not one), best.moves)
            if candidate.peak_bytes <= budget_bytes and candidate.added_seconds < best.added_seconds:
                best = candidate
        return self._without_idle_moves(best, budget_bytes)

    def _without_idle_moves(self, best: Priced, budget_bytes: int) -> Priced:
        """Without the moves that it can do without, the dearest first: as many at once as can go."""
        order = sorted(best.moves, key=lambda one: -seconds_of(self.tape.arithmetic, one))
        at, many = 0, max(1, len(order))
        while at < len(order):
            gone = {one.storage for one in order[at : at + many]}
            candidate = self.price(best.ranges, (one for one in best.moves if one.storage not in gone))
            if candidate.peak_bytes <= budget_bytes and candidate.added_seconds < best.added_seconds:
                best, at, many = candidate, at + many, 2 * many
            elif many > 1:
                many //= 2
            else:
                at += 1
        return best


def saved_by(tape: TapeArithmetic, first: int, last: int) -> Iterator[tuple[int, int]]:
    """(storage, where it was born) of what the nodes of operations ``first`` … ``last - 1`` saved, each once."""
    seen = set()
    for k in range(first, last):
        for index, _ in tape.saved_at(k):
            if index not in seen:
                seen.add(index)
                yield index, tape.trace.storages[index].birth
