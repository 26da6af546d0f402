"""Trace arithmetic: the levels of a step under a plan, from the record of the eager step alone.

A plan is given as nested, never crossing ranges of forward operations. A range keeps what it was given and none of
what its operations save; its replay runs those operations again, right before the first backward node that wants one
of those tensors. From that follows for every storage when it lives, once for each time it is made:

    first life    from its operation until Python drops it, every kept node that saved it has run, and every range that
                  was given it has ended
    in a replay   the same, with the operations of that replay; what leaves a range is dropped at the replay's end

A range ends when the last of its nodes that saved anything has run. Nodes run in falling order of sequence numbers.
While its operations run for the first time it holds what they save, and lets go at its last one: only then is it known
that it can be replayed. So does an inner range in the replay of an outer one.
What follows the last operation that the backward needs costs a replay no time; its memory is counted, because the first
replays do run it.
Cost: one pass over storages and operations for each plan, milliseconds for a thousand of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from regrad.core.levels import Layout, Levels, Live, Replay, every
from regrad.core.trace import BACKWARD, NO_HOOK, OPTIMIZER, Save, Trace


@dataclass(frozen=True, slots=True)
class StateCopy:
    """State that a range found at its start, copied and held until it ends: a generator's, or old bytes of a storage.

    key            ranges that find the same version of the same state share one copy
    bytes          of the copy
    birth          the forward operation at which it is taken, if not at the start of the first range that needs it
    present_bytes  put aside while the replay runs, so that the present comes back
    take_seconds   once for all ranges that share it; replay_seconds  in each replay, to bring it in and the present back
    name, engine   what it is and how it is kept, for people
    written        whether the step writes it from here on
    """

    key: tuple[str, int, int]
    bytes: int
    present_bytes: int = 0
    name: str = ""
    engine: str = "snapshot"
    written: bool = False
    birth: int = -1
    take_seconds: float = 0.0
    replay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Range:
    """Forward operations ``start`` … ``stop - 1`` that are run again.

    holds  storages that it was given and keeps until it ends
    inner  ranges inside it that keep nothing in its replay either, and have replays of their own
    state  copies of the state that it found
    """

    start: int
    stop: int
    holds: tuple[int, ...] = ()
    inner: tuple[Range, ...] = ()
    state: tuple[StateCopy, ...] = ()

    @property
    def present_bytes(self) -> int:
        """Put aside while its replay runs."""
        return sum(copy.present_bytes for copy in self.state)


def live_levels(trace: Trace) -> Levels:
    """Walk a trace as it was recorded: every storage from its birth to its death."""
    layout, base = Layout(trace), 0
    for index, storage in enumerate(trace.storages):
        if storage.birth < 0:
            base += storage.bytes
        end = len(trace.operations) if storage.death is None else storage.death
        if storage.birth >= 0 or storage.death is not None:
            layout.live(storage.bytes, storage.birth, end, index)
    return layout.levels(base, [operation.seconds for operation in trace.operations])


@dataclass(kw_only=True)
class _Node(Replay):
    range: Range
    saves: list[Save]
    last: int = 0
    inner: list[_Node] = field(default_factory=list)


class TraceArithmetic:
    """Prices plans on one trace. Indexes the trace once; each plan is then a pass over it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.forward_stop = trace.phase_starts[BACKWARD]
        self.optimizer_start = trace.phase_starts[OPTIMIZER]
        self._falling = self._running_nodes()
        self._saves: list[list[Save]] = [[] for _ in range(self.forward_stop + 1)]
        """For each forward operation what its node saved."""
        self._released: dict[int, int] = {}
        for storage in trace.storages:
            for save in storage.saved_by:
                self._saves[save.operation].append(save)
                last = self._released.get(save.node, self.last_operation_of(save.node))
                if storage.death is not None and storage.death > self.forward_stop:
                    last = min(last, storage.death - 1)
                self._released[save.node] = last
        self.made_by: list[list[int]] = [[] for _ in range(self.forward_stop + 1)]
        self._static: list[tuple[int, int, int, int]] = []
        self.base_bytes = 0
        for index, storage in enumerate(trace.storages):
            if storage.birth < 0:
                self.base_bytes += storage.bytes
                if storage.death is not None:
                    self._static.append((storage.bytes, -1, storage.death, index))
            elif storage.birth < self.forward_stop:
                self.made_by[storage.birth].append(index)
            else:
                death = len(trace.operations) if storage.death is None else storage.death
                self._static.append((storage.bytes, storage.birth, death, index))

    def _running_nodes(self) -> list[int]:
        """For each backward operation minus the sequence number of the node that runs, so that the list rises."""
        running, current = [], 1 << 62
        for operation in self.trace.operations[self.forward_stop : self.optimizer_start]:
            if 0 <= operation.sequence < current:
                current = operation.sequence
            running.append(-current)
        return running

    def last_operation_of(self, node: int) -> int:
        """The last backward operation before any node below ``node`` runs; the forward's last if there is none."""
        return self.forward_stop + bisect_right(self._falling, -node) - 1

    def release_of(self, node: int) -> int:
        """The backward operation after which ``node`` lets go of what it saved: its last, or an earlier one if a tensor
        that it saved was gone by then. Gradients that flow together are added after that, still in the node's name."""
        return self._released[node]

    def last_save(self, start: int, stop: int) -> int:
        """Operations from ``start`` up to before this one must have run for all that nodes of the interval saved."""
        saves = (save.position for k in range(start, stop) for save in self._saves[k] if save.position != NO_HOOK)
        return max(saves, default=start)

    def first_operation_of(self, node: int) -> int:
        """The backward operation at which ``node`` starts: the first that runs after all nodes above it."""
        return self.forward_stop + bisect_right(self._falling, -node - 1)

    # -- one plan ---------------------------------------------------------------------------------------------

    def levels(self, ranges: Iterable[Range] = (), watch: Live | None = None) -> Levels:
        """The levels of the step with ``ranges`` recomputed; without any, those of the eager step.

        ``watch`` is told of every life that is not the whole step: all of them and the persistent bytes are the levels,
        save for the operations' workspace.
        """
        nodes = [self._node(one, 0) for one in sorted(ranges, key=lambda one: one.start)]
        everyone = every(nodes)
        layout = Layout(self.trace, ((node, range(node.range.start, node.range.stop)) for node in everyone), watch)
        slot, live = layout.slot, layout.live
        holders = self._first_lives(nodes, slot, live)
        for node in nodes:
            self._replay_lives(node, slot, live)
        self.static_lives(slot, holders, live)
        seconds = [self.trace.operations[index].seconds for index in layout.operations]
        for node in everyone:
            layout.aside(node.range.present_bytes, node.slot_of.values())
            for k, at in node.slot_of.items():
                if k >= node.last:
                    seconds[at] = 0.0
        _charge(everyone, seconds)
        return layout.levels(self.base_bytes, seconds)

    def static_lives(self, slot: list[int], held: dict[int, int], live: Live) -> None:
        """The lives of what plans do not move: what the backward makes, and what was there and dies in the step."""
        for size, birth, death, index in self._static:
            end = slot[death - 1] + 1 if death else 0
            live(size, slot[birth] if birth >= 0 else -1, max(end, held.get(index, 0)), index)

    def _node(self, one: Range, depth: int) -> _Node:
        inner = [self._node(child, depth + 1) for child in sorted(one.inner, key=lambda child: child.start)]
        covered = {k for child in inner for k in range(child.range.start, child.range.stop)}
        own = (save for k in range(one.start, one.stop) if k not in covered for save in self._saves[k])
        saves = [save for save in own if save.position != NO_HOOK]
        node = _Node(depth=depth, range=one, saves=saves, inner=inner)
        sequences = [save.node for save in saves] + [save.node for child in every(inner) for save in child.saves]
        if sequences:
            node.trigger = self.first_operation_of(max(sequences))
            node.end_after = self.release_of(min(sequences))
            node.last = one.stop if inner else max(save.position for save in saves)
        return node

    def _first_lives(self, nodes: list[_Node], slot: list[int], live: Live) -> dict[int, int]:
        """The lives of what the forward makes. Returns until when ranges hold what they were given, by storage."""
        inside = [False] * (self.forward_stop + 1)
        holders: dict[int, int] = {}
        for node in nodes:
            end = node.until(slot, node.range.stop)
            for k in range(node.range.start, node.range.stop):
                inside[k] = True
            for index in node.range.holds:
                holders[index] = max(holders.get(index, 0), end)
        innermost: dict[int, int] = {}
        for node in every(nodes):
            innermost.update(dict.fromkeys(range(node.range.start, node.range.stop), node.range.stop))
        # An inner range took its copies in the first run too, and keeps those.
        _copies([(node.range, node.range.start, node.until(slot, node.range.stop)) for node in every(nodes)], live)
        for birth in range(self.forward_stop):
            for index in self.made_by[birth]:
                storage = self.trace.storages[index]
                end = self.dropped(index, slot)
                for save in storage.saved_by:
                    if not inside[save.operation]:
                        end = max(end, slot[self.release_of(save.node)] + 1)
                    else:
                        end = max(end, innermost[save.operation])
                live(storage.bytes, birth, max(end, holders.get(index, 0)), index)
        return holders

    def _argument_end(self, node: _Node, index: int, end: int, slot: list[int]) -> int:
        """Until when an inner range holds what it was given in its outer range's replay: until its own replay is done,
        which hands it on to the nodes that save it. ``end`` serves a range without a replay."""
        if node.end_after < 0:
            return end
        end = node.replay_end
        for save in self.trace.storages[index].saved_by:
            if not node.range.start <= save.operation < node.range.stop:
                continue
            within = [child for child in node.inner if child.range.start <= save.operation < child.range.stop]
            if not within:
                end = max(end, slot[self.release_of(save.node)] + 1)
            elif index in within[0].range.holds:
                end = max(end, self._argument_end(within[0], index, end, slot))
        return end

    def dropped(self, index: int, slot: list[int]) -> int:
        """The slot before which nothing but autograd holds a storage any more."""
        storage = self.trace.storages[index]
        drop = storage.drop if storage.drop is not None else storage.death
        if drop is None:
            return len(self.trace.operations) + (1 << 40)
        return slot[drop - 1] + 1 if drop > 0 else 0

    def _replay_lives(self, node: _Node, slot: list[int], live: Live) -> None:
        inside = [False] * (self.forward_stop + 1)
        holders: dict[int, int] = {}
        again = [(child, child.range.start) for child in every(node.inner) if child.range.start in node.slot_of]
        _copies([(child.range, node.slot_of[start], node.replay_end) for child, start in again], live)
        innermost: dict[int, int] = {}
        for child in every(node.inner):
            end = node.slot_of.get(child.range.stop - 1, node.replay_end - 1) + 1
            innermost.update(dict.fromkeys(range(child.range.start, child.range.stop), end))
        for child in node.inner:
            if child.end_after >= 0:
                end = child.until(slot, child.range.stop)
            else:  # it saves nothing, so what it holds it holds while it runs
                end = node.slot_of.get(child.range.stop - 1, node.replay_end - 1) + 1
            for k in range(child.range.start, child.range.stop):
                inside[k] = True
            for index in child.range.holds:
                holders[index] = max(holders.get(index, 0), self._argument_end(child, index, end, slot))
        for k, first in node.slot_of.items():
            for index in self.made_by[k]:
                storage = self.trace.storages[index]
                drop = storage.drop if storage.drop is not None else storage.death
                end = node.slot_of.get(drop - 1, node.replay_end - 1) + 1 if drop is not None else node.replay_end
                for save in storage.saved_by:
                    if not node.range.start <= save.operation < node.range.stop:
                        continue
                    if not inside[save.operation]:
                        end = max(end, slot[self.release_of(save.node)] + 1)
                    else:
                        end = max(end, innermost[save.operation])
                live(storage.bytes, first, max(end, holders.get(index, 0)), index)
        for child in node.inner:
            self._replay_lives(child, slot, live)


def _charge(nodes: list[_Node], seconds: list[float]) -> None:
    """Add what state takes to the first slot of each replay: its own moves, and what is taken once with the first."""
    taken = set()
    for node in nodes:
        if not node.slot_of:
            continue
        at = min(node.slot_of.values())
        for copy in node.range.state:
            seconds[at] += copy.replay_seconds + (0.0 if copy.key in taken else copy.take_seconds)
            taken.add(copy.key)


def _copies(takers: list[tuple[Range, int, int]], live: Live) -> None:
    """One life for each copy of state that ranges take in one run: from the first taker's start to the last one's end."""
    lives: dict[tuple[str, int, int], tuple[int, int, int]] = {}
    for one, start, end in takers:
        for copy in one.state:
            begin = max(start, copy.birth)
            size, first, last = lives.get(copy.key, (0, begin, end))
            lives[copy.key] = (max(size, copy.bytes), min(first, begin), max(last, end))
    for size, first, last in lives.values():
        live(size, first, last, -1)
