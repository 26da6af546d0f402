"""Peaks and seconds of many plans of one kind, by numpy, so that only those that matter are walked.

A planner with a number to choose (the first k, every k-th, k spans) has one plan for each number, and to walk them all
takes seconds on a chain of hundreds of segments. Here a plan costs a few numpy steps over the chain: which segments are
recomputed each by itself, and where spans stand, in which everything is kept. The moments and the order of additions
are those of ``core/simulate``, which has the last word: the plan that is chosen is walked, and so is the one with the
least peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regrad.core.chain import RECOMPUTE, Option, Problem, Segment
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Choices, Solution
from regrad.planners.base import infeasible, kept, least_seconds, pick, price

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan is thought to cost; ``which`` is the planner's number for it."""

    which: int
    peak_bytes: int
    added_seconds: float


def choose(
    problem: Problem, ranked: Sequence[Estimate], plan: Callable[[int], Choices], budget_bytes: int, label: str
) -> Solution:
    """The first plan of ``ranked`` whose walk fits, as a solution. Cost: two walks."""
    least = price(plan(min(ranked, key=lambda estimate: estimate.peak_bytes).which), problem)
    for estimate in ranked:
        if estimate.peak_bytes <= budget_bytes:
            found = price(plan(estimate.which), problem)
            if found.peak_bytes <= budget_bytes:
                return pick([found, least], budget_bytes, label=label, lower_bound=least_seconds(problem))
    return infeasible(least.peak_bytes, label)


@dataclass(frozen=True, slots=True)
class _Options:
    """One option of every segment."""

    held: Ints
    transient: Ints
    forward: Ints
    shared: Ints
    seconds: Floats


class Ranking:
    """The figures of a problem's keep and recompute options as arrays.

    Raises :class:`PlannerMismatch` for 2**62 bytes or more in all.
    """

    def __init__(self, problem: Problem) -> None:
        chain, self.static = problem.chain, problem.rule == "static"
        segments = chain.segments
        keep = [segment.option(kept(segment)) for segment in segments]
        again = [s.option(RECOMPUTE) if s.can(RECOMPUTE) else o for s, o in zip(segments, keep, strict=True)]
        total = sum(s.boundary_bytes + s.replay_bytes + s.gradient_bytes for s in segments)
        total += sum(abs(o.retained_bytes) + abs(o.transient_bytes) + o.forward_bytes for o in (*keep, *again))
        if chain.persistent_bytes + total + chain.optimizer_bytes >= MOST_BYTES:
            raise PlannerMismatch(f"the segments of this chain need {total:,} bytes; 2**62 is the limit")
        self.persistent, self.gradients = chain.persistent_bytes, chain.gradient_bytes
        self.floor = self.persistent + self.gradients + chain.optimizer_bytes
        self._keep, self._again = _options(segments, keep), _options(segments, again)
        self._made = np.array([chain.gradient_bytes, *chain.later_gradient_bytes], dtype=np.int64)  # by i … n - 1
        self._boundary = np.array([segment.boundary_bytes for segment in segments], dtype=np.int64)
        self._replay = np.array([segment.replay_bytes for segment in segments], dtype=np.int64)
        self._forward = np.array([segment.forward_seconds for segment in segments])
        self._tail = np.array([s.forward_seconds if s.tail_seconds is None else s.tail_seconds for s in segments])

    def one_level(self, which: int, recomputed: Sequence[int]) -> Estimate:
        """The plan that recomputes these segments, each by itself, and keeps the rest."""
        keep, again = self._keep, self._again
        mask = np.zeros(len(self._boundary), dtype=np.bool_)
        mask[list(recomputed)] = True
        held, transient = np.where(mask, again.held, keep.held), np.where(mask, again.transient, keep.transient)
        before = np.cumsum(held) - held
        forward = before + np.where(mask, again.forward, keep.forward)
        backward = before + held + transient + self._made[1:]
        # added up as the walk does, from the last segment on
        seconds = np.cumsum(np.where(mask, again.seconds, keep.seconds)[::-1])[-1]
        moments = max(int(forward.max()), int(backward.max()))
        return self._estimate(which, moments, int(held.sum()), int(transient.max()), float(seconds))

    def spans(self, which: int, spans: Sequence[tuple[int, int]]) -> Estimate:
        """The plan with these spans, start and stop, in which everything is kept, as it is outside of them."""
        keep, count = self._keep, len(self._boundary)
        starts, stops = np.array(spans).T
        inside = np.concatenate([np.arange(start, stop) for start, stop in spans])
        begin, end = np.arange(count), np.arange(1, count + 1)
        begin[inside], end[inside] = np.repeat(starts, stops - starts), np.repeat(stops, stops - starts)
        spanned = np.zeros(count, dtype=np.bool_)
        spanned[inside] = True
        # ``level``: what is held when a segment runs and is kept, in the forward pass or in the replay of its span
        outer = np.where(spanned, np.where(begin == np.arange(count), self._boundary, 0), keep.held)
        outer_before, inner_before = np.cumsum(outer) - outer, np.cumsum(keep.held) - keep.held
        entry = np.where(spanned, self._boundary - keep.shared, 0)
        level = inner_before + (outer_before + entry - inner_before)[begin]
        first = spanned & (begin == np.arange(count))
        forward = level + keep.forward + np.where(spanned, self._made[end], 0) + np.where(first, keep.shared, 0)
        backward = level + keep.held + keep.transient + self._made[1:]
        blank = np.where(spanned, (outer_before + self._boundary)[begin] + self._replay, 0)
        moments = max(int(forward.max()), int(backward.max()), int(blank.max()))
        retained = max(int(outer.sum()), int((level + keep.held).max()))
        # added up as the walk does: from the last span on its forwards, then what its options add, backwards
        at, seconds = np.arange(count), np.zeros(2 * count)
        seconds[2 * (count - end) + at - begin] = np.where(
            spanned, np.where(at + 1 == end, self._tail, self._forward), 0
        )
        seconds[2 * (count - end) + 2 * end - begin - 1 - at] = keep.seconds
        return self._estimate(which, moments, retained, int(keep.transient.max()), float(np.cumsum(seconds)[-1]))

    def _estimate(self, which: int, moments: int, retained: int, transient: int, seconds: float) -> Estimate:
        peak = self.persistent + moments
        if self.static:
            peak = self.persistent + self.gradients + max(retained, 0) + max(transient, 0)
        return Estimate(which, max(peak, self.floor), seconds)


def _options(segments: Sequence[Segment], options: Sequence[Option]) -> _Options:
    return _Options(
        held=np.array([option.retained_bytes for option in options], dtype=np.int64),
        transient=np.array([option.transient_bytes for option in options], dtype=np.int64),
        forward=np.array([option.forward_bytes for option in options], dtype=np.int64),
        shared=np.array(
            [s.boundary_bytes if o.holds_input else 0 for s, o in zip(segments, options, strict=True)], dtype=np.int64
        ),
        seconds=np.array([option.added_seconds for option in options], dtype=np.float64),
    )
