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
import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from regrad.core.levels import Levels
from regrad.core.simulate_tape import TapeArithmetic, TapeRange
from regrad.planners._tape_moves import Moves, Ranges

Blocks = list[tuple[int, int]]

_SWEEP = 12
_LONGEST = 2.0
"""Ranges of one level are at most this many blocks long (at least ``_LEAST`` calls)."""
_LEAST = 24
_MOST_CALLS = 160
_MOST_PRICED = 50_000
_HEAT, _PENALTY, _ABOVE, _MOST_TRIES = 0.05, 20.0, 1.15, 20_000
"""Annealing: the first temperature in shares of the added seconds, the price of a budget's overrun, how far above the
budget a start may lie, and the most tries a start."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A set of ranges with the trace's figures for it."""

    ranges: Ranges
    peak_bytes: int
    added_seconds: float


@dataclass(frozen=True, slots=True)
class _Stretch:
    freed_bytes: int
    seconds: float


@dataclass
class TapeSearch:
    """Searches sets of tape ranges on one trace.

    tape       prices them
    calls      the first and last-but-one operation of each torch call, in order
    blocks     the repeated pieces of the model, as intervals of operations; may be empty
    problem    why an interval of operations cannot be a range; "" if it can
    seed, limit_seconds   of the local search, for one budget
    proposals  plans of others that are tried, too; asked for once, when they are needed
    """

    tape: TapeArithmetic
    calls: list[tuple[int, int]]
    blocks: Blocks
    problem: Callable[[int, int], str]
    seed: int = 0
    limit_seconds: float = 2.0
    proposals: Callable[[], Iterable[Ranges]] = tuple
    _priced: dict[Ranges, Priced] = field(default_factory=dict)
    _stretches: dict[tuple[int, ...], _Stretch | None] = field(default_factory=dict)
    _kinds: list[int] = field(default_factory=list)
    _pool: list[Priced] | None = None
    _answers: dict[int, Priced] = field(default_factory=dict)

    # -- prices -------------------------------------------------------------------------------------------------------

    def levels(self, ranges: Ranges) -> Levels:
        """The levels of the step under these ranges."""
        return self.tape.levels(ranges)

    def price(self, ranges: Iterable[TapeRange]) -> Priced:
        """Peak and seconds of a set of ranges, by the trace."""
        key = tuple(sorted(ranges, key=lambda one: one.start))
        found = self._priced.get(key)
        if found is None:
            if len(self._priced) > _MOST_PRICED:
                self._priced.clear()
            levels = self.tape.levels(key)
            found = self._priced[key] = Priced(key, levels.peak_bytes, levels.added_seconds)
        return found

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

    def best_at(self, seconds_per_byte: float) -> Ranges:
        """The ranges, none inside another, of the largest Σ freed · λ − seconds."""
        count = len(self.calls)
        longest = self._longest()
        best, came = [0.0] * (count + 1), [0] * (count + 1)
        for stop in range(1, count + 1):
            best[stop], came[stop] = best[stop - 1], stop - 1
            for start in range(max(0, stop - longest), stop):
                found = self.stretch(start, stop)
                if found is not None:
                    value = best[start] + found.freed_bytes * seconds_per_byte - found.seconds
                    if value > best[stop]:
                        best[stop], came[stop] = value, start
        ranges, at = [], count
        while at > 0:
            start = came[at]
            if best[at] > best[at - 1]:
                ranges.append(TapeRange(self.calls[start][0], self.calls[at - 1][1]))
            at = start
        return tuple(reversed(ranges))

    def _longest(self) -> int:
        if not self.blocks:
            return min(_MOST_CALLS, max(_LEAST, len(self.calls) // 8))
        starts = [first for first, _ in self.calls]
        sizes = [bisect_left(starts, stop) - bisect_left(starts, start) for start, stop in self.blocks]
        typical = sorted(sizes)[len(sizes) // 2]
        return min(_MOST_CALLS, max(_LEAST, int(typical * _LONGEST)))

    def _sweep(self) -> list[Ranges]:
        """Plans of one level from the cheapest to the most thorough."""
        everything = self.best_at(1e6)
        ratios = sorted(found.seconds / found.freed_bytes for found in self._stretches.values() if found is not None)
        found: list[Ranges] = [()]
        seen: set[Ranges] = {()}
        if not ratios:
            return found
        for step in range(_SWEEP):
            at = ratios[min(len(ratios) - 1, (step * len(ratios)) // _SWEEP)]
            ranges = self.best_at(at * 1.0001 + 1e-18)
            if ranges not in seen:
                seen.add(ranges)
                found.append(ranges)
        for scale in (2.0, 8.0):
            ranges = self.best_at(ratios[-1] * scale)
            if ranges not in seen:
                seen.add(ranges)
                found.append(ranges)
        if everything not in seen:
            found.append(everything)
        return found

    # -- patterns and spans -------------------------------------------------------------------------------------------

    def _mixtures(self, plans: list[Ranges]) -> Iterator[Ranges]:
        """One plan up to a border between blocks, and its neighbour in the sweep from there on."""
        borders = [start for start, _ in self.blocks[1:]]
        borders = borders[:: max(1, len(borders) // 16)]
        for one, other in itertools.pairwise(plans):
            for border in borders:
                yield _joined(one, other, border)
                yield _joined(other, one, border)

    def _spans(self, plans: list[Ranges]) -> Iterator[Ranges]:
        """Spans of several blocks with a plan of one level inside, in front of blocks of one level."""
        count = len(self.blocks)
        widths = sorted({2, 3, 4, max(2, round(count**0.5)), max(2, count // 2)} & set(range(2, count + 1)))
        inner_plans = [*plans[1:], tuple(self._whole_blocks(0, count))]
        for width in widths:
            for inner in inner_plans:
                spans = list(self._grouped(width, inner))
                for taken in {len(spans), max(1, len(spans) // 2), max(1, len(spans) - 1)}:
                    chosen = spans[:taken]
                    if chosen:
                        rest = [one for one in inner if one.start >= chosen[-1].stop]
                        yield (*chosen, *rest)

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
            plans = self._sweep()
            tried = [self.price(plan) for plan in plans]
            tried.append(self.price(self._whole_blocks(0, len(self.blocks))))
            tried += [self.price(plan) for plan in self._mixtures(plans)]
            tried += [self.price(plan) for plan in self._spans(plans)]
            tried += [self.price(plan) for plan in self.proposals()]
            self._pool = _front(tried)
        return self._pool

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
        for turn, at in enumerate([best, *sorted(near, key=lambda one: one.peak_bytes)[:2]]):
            end = time.monotonic() + (deadline - time.monotonic()) / (3 - turn)
            best = self._annealed(at, best, budget_bytes, end, self.seed + turn)
        return self._thinned(best, budget_bytes)

    def _thinned(self, best: Priced, budget_bytes: int) -> Priced:
        for one in sorted(best.ranges, key=lambda one: -self.tape.seconds_of(one)):
            candidate = self.price(kept for kept in best.ranges if kept is not one)
            if candidate.peak_bytes <= budget_bytes and candidate.added_seconds < best.added_seconds:
                best = candidate
        return best

    def _annealed(self, at: Priced, best: Priced, budget_bytes: int, deadline: float, seed: int) -> Priced:
        chooser = random.Random(seed)
        moves = Moves(self.calls, self._longest(), self.problem, chooser)
        scale = max(best.added_seconds, 1e-9)

        def cost(one: Priced) -> float:
            return one.added_seconds / scale + _PENALTY * max(0.0, one.peak_bytes / budget_bytes - 1)

        began = time.monotonic()
        for _ in range(_MOST_TRIES):
            left = (deadline - time.monotonic()) / max(1e-9, deadline - began)
            if left <= 0:
                break
            heat = _HEAT * left * left + 1e-6
            changed = moves.neighbour(at.ranges)
            if changed is None:
                continue
            moved = self.price(changed)
            if moved.peak_bytes <= budget_bytes and moved.added_seconds < best.added_seconds:
                best = moved
            if cost(moved) < cost(at) or chooser.random() < math.exp((cost(at) - cost(moved)) / heat):
                at = moved
        return best


def saved_by(tape: TapeArithmetic, first: int, last: int) -> Iterator[tuple[int, int]]:
    """(storage, where it was born) of what the nodes of operations ``first`` … ``last - 1`` saved, each once."""
    seen = set()
    for k in range(first, last):
        for index, _ in tape.saved_at(k):
            if index not in seen:
                seen.add(index)
                yield index, tape.trace.storages[index].birth


def _joined(one: Ranges, other: Ranges, border: int) -> Ranges:
    return (*(r for r in one if r.stop <= border), *(r for r in other if r.start >= border))


def _front(tried: list[Priced]) -> list[Priced]:
    """Those that no other beats, by falling peak."""
    front: list[Priced] = []
    for one in sorted(tried, key=lambda one: (one.added_seconds, one.peak_bytes)):
        if not front or one.peak_bytes < front[-1].peak_bytes:
            front.append(one)
    return front
