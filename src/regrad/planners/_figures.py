"""A chain's figures as the program over spans reads them: what one segment costs where it stands in a plan.

Everything is counted above the baseline at the moment when an item is entered, exactly as ``core/simulate`` walks it:

    run   while its forward runs          an option f; as the first of a span b + f, for the span holds b already
    back  while its backward runs         its own r + t; gradients of later segments come on top
    held  from its run to its backward    r; as the first of a span r + b - e, e = b if r counts the boundary, else 0

The first of a span counts from the baseline without b, so that the span K(r, p, g, c) = (b, p + b - e, g, F + c) and
the span inside it that starts with it, which shares the boundary, are both read off the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd, isfinite

import numpy as np
from numpy.typing import NDArray

from regrad.core.chain import RECOMPUTE, Chain, Segment
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Choice, Choices

NEVER = 1 << 60
MOST_BYTES = 1 << 58
Ints = NDArray[np.int64]
# seconds of segments start … stop - 1 as a row of items (False) or as one span, its forwards too (True), in some
# memory; infinite where they do not fit it
Price = Callable[[int, int, int, bool], float]


@dataclass(frozen=True, slots=True)
class Leaf:
    """An option at one place of a plan; ``which`` is its index among the segment's options."""

    held: int
    run: int
    back: int
    seconds: float
    which: int


@dataclass(frozen=True, slots=True)
class Part:
    """A segment without its names: two segments with equal parts are interchangeable.

    ``alone`` are its options in a row of items, ``first`` those at the beginning of a span (none if nothing may span
    it); ``tail`` is the forward of a span's last segment.
    """

    alone: tuple[Leaf, ...]
    first: tuple[Leaf, ...]
    gradient: int
    boundary: int
    replay: int
    forward: float
    tail: float


@dataclass(frozen=True)
class Figures:
    """The parts of a chain and what follows from them alone.

    later  for each i the gradients of segments i … n-1, and 0 at the end
    reach  for each i where a span that starts there must end at the latest (i itself: it cannot start one)
    """

    parts: tuple[Part, ...]
    persistent: int
    floor: int
    later: tuple[int, ...]
    reach: tuple[int, ...]

    def span_seconds(self, start: int, stop: int) -> float:
        """F: one run of the forwards of a span, of the last one its tail."""
        return sum((part.forward for part in self.parts[start : stop - 1]), 0.0) + self.parts[stop - 1].tail

    @cached_property
    def fastest(self) -> float:
        """Seconds below which no plan is: a span adds its forwards and what the options in it add."""
        total = 0.0
        for part in reversed(self.parts):
            total += min(leaf.seconds for leaf in part.alone)
        return total

    @cached_property
    def grain(self) -> int:
        """The largest unit of memory in which every figure is whole."""
        unit = 0
        for part in self.parts:
            unit = gcd(unit, part.gradient, part.boundary, part.replay)
            for leaf in (*part.alone, *part.first):
                unit = gcd(unit, leaf.held, leaf.run, leaf.back)
        return max(unit, 1)

    def loss_bytes(self, unit: int) -> int:
        """What rounding every figure up to ``unit`` loses: see ``_nested.py``. Nothing if they are multiples of it."""
        return 0 if self.grain % unit == 0 else (len(self.parts) + 1) * unit

    @cached_property
    def classes(self) -> tuple[NDArray[np.int32], tuple[tuple[int, int], ...]]:
        """For each (start, stop) the number of its class, and a member of each class, short ones first.

        Ranges are of one class if their parts are equal one by one: they share every plan and every price.
        """
        count = len(self.parts)
        of_part: dict[Part, int] = {}
        kinds = [of_part.setdefault(part, len(of_part)) for part in self.parts]
        known: dict[tuple[int, int], int] = {}
        members: list[tuple[int, int]] = []
        number = np.zeros((count, count + 1), dtype=np.int32)
        before = [-1] * count
        for length in range(1, count + 1):
            for start in range(count - length + 1):
                key = before[start], kinds[start + length - 1]
                found = known.get(key)
                if found is None:
                    found = known[key] = len(members)
                    members.append((start, start + length))
                before[start] = found
            rows = np.arange(count - length + 1)
            number[rows, rows + length] = before[: count - length + 1]
        return number, tuple(members)


def figures_of(chain: Chain) -> Figures:
    """The figures of ``chain``.

    Raises :class:`PlannerMismatch` for times that are not finite, for forwards that take less than no time, for
    negative bytes other than transient ones, and for 2**58 bytes or more in all.
    """
    parts = tuple(_part(segment) for segment in chain.segments)
    total = sum(p.gradient + p.boundary + p.replay + max(x.held + x.run + abs(x.back) for x in p.alone) for p in parts)
    if total >= MOST_BYTES:
        raise PlannerMismatch(f"the segments of this chain need {total:,} bytes; 2**58 is the limit")
    later, reach = [0], list[int]()
    for i in range(len(parts) - 1, -1, -1):
        later.append(later[-1] + parts[i].gradient)
        onward = reach[-1] if reach and parts[i].first and parts[i + 1].first else i + 1
        reach.append(onward if parts[i].first else i)
    floor = chain.persistent_bytes + chain.gradient_bytes + chain.optimizer_bytes
    return Figures(parts, chain.persistent_bytes, floor, tuple(reversed(later)), tuple(reversed(reach)))


def _part(segment: Segment) -> Part:
    tail = segment.forward_seconds if segment.tail_seconds is None else segment.tail_seconds
    b = segment.boundary_bytes
    alone, first = [], []
    for which, o in enumerate(segment.options):
        back = o.retained_bytes + o.transient_bytes
        again = 0 if o.holds_input else b
        alone.append(Leaf(o.retained_bytes, o.forward_bytes, back, o.added_seconds, which))
        first.append(Leaf(o.retained_bytes + again, b + o.forward_bytes, back + again, o.added_seconds, which))
    part = Part(
        alone=tuple(_undominated(alone)),
        first=tuple(_undominated(first)) if segment.can(RECOMPUTE) else (),
        gradient=segment.gradient_bytes,
        boundary=b,
        replay=segment.replay_bytes,
        forward=segment.forward_seconds,
        tail=tail,
    )
    seconds = [tail, segment.forward_seconds, *(option.added_seconds for option in segment.options)]
    if not all(isfinite(value) for value in seconds) or min(seconds[:2]) < 0:
        raise PlannerMismatch(f"segment {segment.name!r} has times that cannot be added up: {seconds}")
    sizes = [part.gradient, b, part.replay, *(option.retained_bytes for option in segment.options)]
    if min(sizes) < 0:
        raise PlannerMismatch(f"segment {segment.name!r} holds less than nothing: {min(sizes)} bytes")
    return part


def _undominated(leaves: list[Leaf]) -> list[Leaf]:
    """Without leaves that another one matches or beats on all four; of equal ones the first option stays."""
    best: list[Leaf] = []
    for leaf in sorted(leaves, key=lambda it: (it.held, it.run, it.back, it.seconds, it.which)):
        if not any(o.run <= leaf.run and o.back <= leaf.back and o.seconds <= leaf.seconds for o in best):
            best.append(leaf)
    return best


def up(size: int, unit: int) -> int:
    """``size`` in units, rounded upward."""
    return -(-size // unit)


@dataclass(frozen=True, slots=True)
class _Item:
    """A way to begin a plan: a leaf, or a span to ``end`` with ``room`` for its contents; ``left`` is for the rest."""

    seconds: float
    leaf: Leaf | None
    end: int
    left: int
    room: int = 0


def descend(chain: Chain, figures: Figures, unit: int, cells: int, price: Price) -> Choices:
    """The plan of the whole chain in ``cells`` of memory that takes at each step what ``price`` finds the fastest.

    Of equally fast ways an option comes before a span, and a short span before a long one. The price of the whole
    must be finite. Cost: O(n²) prices.
    """

    # a span waits on the stack until what is inside it is known; hundreds may wait
    waiting: list[tuple[list[Choice], _Place, int]] = []
    choices, at = list[Choice](), _Place(0, len(chain), cells, inside=False)
    while True:
        if at.start == at.stop:
            if not waiting:
                return tuple(choices)
            outer, then, start = waiting.pop()
            outer.append(Choice(start, then.start, RECOMPUTE, tuple(choices)))
            choices, at = outer, then
            continue
        ways = _items(figures, unit, at.start, at.stop, at.cells, at.inside, price)
        item = min(ways, key=lambda it: it.seconds)
        then = _Place(item.end, at.stop, item.left, inside=False)
        if item.leaf is None:
            waiting.append((choices, then, at.start))
            choices, at = [], _Place(at.start, item.end, item.room, inside=True)
        else:
            choices.append(Choice(at.start, item.end, chain.segments[at.start].options[item.leaf.which].name))
            at = then


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a plan is read back: segments ``start`` … ``stop - 1`` in ``cells`` of memory, as the contents of a span."""

    start: int
    stop: int
    cells: int
    inside: bool


def _items(
    figures: Figures, unit: int, start: int, stop: int, cells: int, inside: bool, price: Price
) -> Iterator[_Item]:
    part, later = figures.parts[start], figures.later
    for leaf in part.first if inside else part.alone:
        if up(max(leaf.run, leaf.back + later[start + 1] - later[stop]), unit) <= cells:
            left = cells - up(leaf.held, unit)
            yield _Item(leaf.seconds + price(start + 1, stop, left, False), leaf, start + 1, left)
    replay, left = 0, cells - up(part.boundary, unit)
    for end in range(start + 1, min(stop - inside, figures.reach[start]) + 1):
        replay = max(replay, figures.parts[end - 1].replay)
        if up(part.boundary + replay, unit) > cells:
            return
        room = cells - up(later[end] - later[stop], unit)
        yield _Item(price(start, end, room, True) + price(end, stop, left, False), None, end, left, room)
