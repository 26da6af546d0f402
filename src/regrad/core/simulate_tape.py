"""Trace arithmetic for ranges of torch calls: the levels of a step in which recorded calls are replayed one by one.

A tape range (:class:`TapeRange`) keeps none of the tensors that its calls save and that were computed inside it. Right
before the first backward node that wants one of them, those calls run again of which something is needed, in order, and
nothing else: not the code around them, not a call whose result no one wants. So it differs from the replay of a module
(:mod:`regrad.core.simulate_trace`) in three ways:

needed   a backward slice: the calls that give what nodes of the range saved, and the calls that those read from; of a
         product whose result nobody reads only the copies of its operands
held     what the slice reads from before the range, and what nodes saved of it, as in the eager step
replay   a result is dropped after the last call of the slice that reads it, unless a node saved it or an inner range
         needs it from there

Operations between two borders of a torch call run together. Beside ranges a plan may hold moves
(:mod:`regrad.core.simulate_moves`). Cost: a pass over storages and operations for each plan.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from regrad.core.levels import Layout, Levels, Live, Replay, every
from regrad.core.simulate_moves import Movable, Moving
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.trace import NO_HOOK, Save, Trace


@dataclass(frozen=True, slots=True)
class TapeRange:
    """Forward operations ``start`` … ``stop - 1``, both at borders of torch calls; ``inner`` ranges have replays of their
    own and keep nothing in the replay of this one."""

    start: int
    stop: int
    inner: tuple[TapeRange, ...] = ()


@dataclass(kw_only=True)
class _Node(Replay):
    range: TapeRange
    inner: list[_Node] = field(default_factory=list)
    saves: list[tuple[int, Save]] = field(default_factory=list)
    last_reads: dict[int, int] = field(default_factory=dict)  # by storage: the slot of the replay that reads it last


@dataclass(frozen=True, slots=True)
class KeptDraw:
    """A drawing call whose draw is kept in ``bytes``, and what its replay takes instead of drawing: ``seconds`` in all.

    ``product`` is the operation of the call that a replay does run.
    """

    bytes: int
    seconds: float
    product: int


class TapeArithmetic:
    """Prices plans of tape ranges on one trace. ``arithmetic`` has indexed it; ``generator_bytes`` is one state of it.

    ``draws`` are the draws that are kept, by the operation that draws. ``products`` are the first operations of calls that
    a replay leaves as soon as they have saved what is wanted of them, if nobody reads their result. ``call_seconds`` is
    what recording a torch call and running it again takes beside its kernels.
    """

    def __init__(
        self,
        arithmetic: TraceArithmetic,
        generator_bytes: int,
        draws: dict[int, KeptDraw] | None = None,
        products: Collection[int] = (),
        call_seconds: float = 0.0,
    ) -> None:
        self.arithmetic, self.trace = arithmetic, arithmetic.trace
        self.draws, self.products = draws or {}, frozenset(products)
        self.generator_bytes = generator_bytes
        self.moves: tuple[Movable, ...] = ()
        stop = arithmetic.forward_stop
        self._saved: list[list[tuple[int, Save]]] = [[] for _ in range(stop + 1)]
        self._writers: dict[int, list[int]] = {}
        for index, storage in enumerate(self.trace.storages):
            for save in storage.saved_by:
                if save.position != NO_HOOK:
                    self._saved[save.operation].append((index, save))
        self._drawing = [k for k, operation in enumerate(self.trace.operations[:stop]) if operation.draws]
        self.group_start, self.group_stop = _groups([one.torch_call for one in self.trace.operations[:stop]])
        for position, operation in enumerate(self.trace.operations[:stop]):
            for index in operation.writes:
                self._writers.setdefault(index, []).append(position)
        self._slices: dict[TapeRange, tuple[list[int], set[int]]] = {}
        self.seconds = [operation.seconds for operation in self.trace.operations[:stop]]
        """Of each forward operation in a replay."""
        for drawing, kept in self.draws.items():
            for k in range(self.group_start[drawing], self.group_stop[drawing]):
                if k != kept.product:
                    self.seconds[k] = 0.0
            self.seconds[drawing] = kept.seconds
        for k in range(stop):
            if self.group_start[k] == k:
                self.seconds[k] += call_seconds

    def saved_at(self, operation: int) -> list[tuple[int, Save]]:
        """(storage, save) of what the node of a forward operation saved."""
        return self._saved[operation]

    # -- one range ----------------------------------------------------------------------------------------------------

    def slice_of(self, one: TapeRange) -> tuple[list[int], set[int]]:
        """The operations that a replay of ``one`` runs, and the storages from before it that they read."""
        found = self._slices.get(one)
        if found is None:
            if len(self._slices) > 100_000:
                self._slices.clear()
            found = self._slices[one] = self._slice(one)
        return found

    def _slice(self, one: TapeRange) -> tuple[list[int], set[int]]:
        storages = self.trace.storages
        covered = {k for child in one.inner for k in range(child.start, child.stop)}
        wanted: list[tuple[int, int]] = [
            (index, save.position)
            for k in range(one.start, one.stop)
            if k not in covered
            for index, save in self._saved[k]
            if one.start <= storages[index].birth < one.stop
        ]
        for child in one.inner:
            # as the child leaves it: its calls that write what is older than it belong to this range, and run again with it
            wanted += [(i, child.stop) for i in self._lent(child) if one.start <= storages[i].birth < one.stop]
        until: dict[int, int] = {}  # by the first operation of a call where it may stop
        seen: set[tuple[int, int]] = set()
        externals: set[int] = set()
        while wanted:
            index, before = wanted.pop()
            if (index, before) in seen:
                continue
            seen.add((index, before))
            for position in (storages[index].birth, *self._writers.get(index, ())):
                if not one.start <= position < before:
                    continue
                first, stop = self.group_start[position], self.group_stop[position]
                stop = min(before, stop) if first in self.products else stop
                run = range(until.get(first, first), stop)
                until[first] = max(until.get(first, first), stop)
                for k in run:
                    for read in self.trace.operations[k].reads:
                        if one.start <= storages[read].birth:
                            if storages[read].birth < k:
                                wanted.append((read, k))
                        elif storages[read].birth >= 0 or storages[read].death is not None:
                            externals.add(read)
        return sorted(k for first, stop in until.items() for k in range(first, stop)), externals

    def _lent(self, one: TapeRange) -> set[int]:
        """What a range and those inside it need from before it: for their slices, and because their nodes saved it."""
        found = set(self.slice_of(one)[1])
        storages = self.trace.storages
        for k in range(one.start, one.stop):
            found |= {index for index, _ in self._saved[k] if 0 <= storages[index].birth < one.start}
        for child in one.inner:
            found |= {index for index in self._lent(child) if storages[index].birth < one.start}
        return found

    def bytes_of_draw(self, operation: int) -> int:
        """What a range holds of a draw: its bits, or the generator's state before it."""
        kept = self.draws.get(operation)
        return self.generator_bytes if kept is None else kept.bytes

    def seconds_of(self, one: TapeRange) -> float:
        """Seconds of its replay and of those inside it."""
        own = sum(self.seconds[k] for k in self.slice_of(one)[0])
        return own + sum(self.seconds_of(child) for child in one.inner)

    # -- one plan -----------------------------------------------------------------------------------------------------

    def with_moves(self, moves: Iterable[Movable]) -> TapeArithmetic:
        """The same arithmetic for steps in which ``moves`` are made."""
        twin = copy.copy(self)
        twin.moves = tuple(moves)
        return twin

    def levels(
        self, ranges: Iterable[TapeRange] = (), watch: Live | None = None, moves: Iterable[Movable] | None = None
    ) -> Levels:
        """The levels of the step with ``ranges`` replayed call by call; see :meth:`TraceArithmetic.levels`.

        ``moves`` are those of :meth:`with_moves` unless given. One whose storage a call in a range saves is not made.
        """
        arithmetic, trace = self.arithmetic, self.trace
        ranges = sorted(ranges, key=lambda one: one.start)
        nodes = [self._node(one, 0) for one in ranges]
        everyone = every(nodes)
        layout = Layout(trace, ((node, self.slice_of(node.range)[0]) for node in everyone), watch)
        slot, live = layout.slot, layout.live
        moving = Moving(
            arithmetic, movable_beside(trace, self.moves if moves is None else moves, ranges), self.group_stop
        )
        held = self._first_lives(nodes, slot, live, moving)
        for node in reversed(everyone):
            self._replay_lives(node, slot, live)
            if any(trace.operations[k].draws and k not in self.draws for k in node.slot_of):
                layout.aside(self.generator_bytes, node.slot_of.values())
        arithmetic.static_lives(slot, held, live)
        seconds = [
            self.seconds[index] if again else trace.operations[index].seconds
            for index, again in zip(layout.operations, layout.replayed, strict=True)
        ]
        return layout.levels(arithmetic.base_bytes, seconds, moving.lay_out(layout, seconds))

    def _node(self, one: TapeRange, depth: int) -> _Node:
        node = _Node(depth=depth, range=one)
        node.inner = [self._node(child, depth + 1) for child in sorted(one.inner, key=lambda child: child.start)]
        covered = {k for child in one.inner for k in range(child.start, child.stop)}
        saves = [
            (k, index, save)
            for k in range(one.start, one.stop)
            for index, save in self._saved[k]
            if one.start <= self.trace.storages[index].birth
        ]
        node.saves = [(index, save) for k, index, save in saves if k not in covered]
        # what a range inside saved of this one's results makes this one's replay start, too
        sequences = [save.node for _, _, save in saves]
        if sequences:
            node.trigger = self.arithmetic.first_operation_of(max(sequences))
            node.end_after = self.arithmetic.release_of(min(sequences))
        return node

    def _first_lives(self, nodes: list[_Node], slot: list[int], live: Live, moving: Moving) -> dict[int, int]:
        """The lives of what the forward makes. Returns until when ranges hold what was there before the step."""
        trace, arithmetic = self.trace, self.arithmetic
        outermost: dict[int, int] = {}
        held: dict[int, int] = {}
        for outer in nodes:
            top, end = outer.range.start, outer.until(slot, outer.range.stop)
            outermost.update(dict.fromkeys(range(top, outer.range.stop), top))
            # what is held of the calls of a range goes at once, when nothing is wanted any more of it or of those inside
            for node in every([outer]):
                for index in self.slice_of(node.range)[1]:
                    if trace.storages[index].birth < top:
                        held[index] = max(held.get(index, 0), end)
            for k in self._drawing[bisect_left(self._drawing, top) : bisect_left(self._drawing, outer.range.stop)]:
                again = any(k in self.slice_of(node.range)[0] for node in every([outer]))
                live(self.bytes_of_draw(k), k, max(end, k + 1) if again else outer.range.stop, -1)
        for birth in range(arithmetic.forward_stop):
            for index in arithmetic.made_by[birth]:
                storage = trace.storages[index]
                end = arithmetic.dropped(index, slot)
                for save in storage.saved_by:
                    top = outermost.get(save.operation, -1)
                    if index in moving:
                        end = max(end, self.group_stop[save.operation])
                    elif top < 0 or storage.birth < top or save.position == NO_HOOK:
                        end = max(end, slot[arithmetic.release_of(save.node)] + 1)
                live(storage.bytes, birth, max(end, held.get(index, 0)), index)
        return held

    def _replay_lives(self, node: _Node, slot: list[int], live: Live) -> None:
        trace, arithmetic = self.trace, self.arithmetic
        ends = {self.group_start[k]: at + 1 for k, at in node.slot_of.items()}
        for k, at in node.slot_of.items():
            for index in trace.operations[k].reads:
                # what a call is given lives until it returns; what it makes for itself no longer than it reads it
                given = trace.storages[index].birth < self.group_start[k]
                node.last_reads[index] = ends[self.group_start[k]] - 1 if given else at
        own: dict[int, int] = {}
        for index, save in node.saves:
            own[index] = max(own.get(index, 0), slot[arithmetic.release_of(save.node)] + 1)
        for child in node.inner:
            # what is lent to a range inside is let go in the last replay that reads it, like what that computes
            for one in every([child]):
                for index, at in one.last_reads.items():
                    if trace.storages[index].birth < child.range.start:
                        own[index] = max(own.get(index, 0), at + 1)
            for k in range(child.range.start, child.range.stop):
                for index, save in self._saved[k]:
                    if trace.storages[index].birth < child.range.start:
                        own[index] = max(own.get(index, 0), slot[arithmetic.release_of(save.node)] + 1)
        for k, first in node.slot_of.items():
            group_end = ends[self.group_start[k]]
            for index in arithmetic.made_by[k]:
                drop = trace.storages[index].drop
                inside = drop is not None and drop - 1 in node.slot_of and drop < self.group_stop[k]
                end = node.slot_of[drop - 1] + 1 if inside and drop is not None else group_end
                live(
                    trace.storages[index].bytes,
                    first,
                    max(end, node.last_reads.get(index, -1) + 1, own.get(index, 0)),
                    index,
                )


def movable_beside(trace: Trace, moves: Iterable[Movable], ranges: Iterable[TapeRange]) -> list[Movable]:
    """Those of ``moves`` whose storage no call in any of ``ranges`` saves; ``moves`` itself if there are none."""
    spans = sorted((one.start, one.stop) for one in ranges)
    starts = [start for start, _ in spans]

    def inside(operation: int) -> bool:
        at = bisect_right(starts, operation) - 1
        return at >= 0 and operation < spans[at][1]

    return [
        one
        for one in moves
        if not spans or not any(inside(save.operation) for save in trace.storages[one.storage].saved_by)
    ]


def _groups(calls: list[int]) -> tuple[list[int], list[int]]:
    """For each operation where the run of operations of its torch call starts and stops."""
    starts, stops = list(range(len(calls))), [0] * len(calls)
    for k in range(1, len(calls)):
        if calls[k] >= 0 and calls[k] == calls[k - 1]:
            starts[k] = starts[k - 1]
    stop = len(calls)
    for k in range(len(calls) - 1, -1, -1):
        stops[k] = stop
        if starts[k] == k:
            stop = k
    return starts, stops
