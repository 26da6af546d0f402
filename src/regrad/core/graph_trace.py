"""From a recorded step to a graph: each chosen call a node, or each operation, and a value for each storage that
outlives the node that made it or that a backward reads.

What a node cannot be run again for is read off the trace: it writes in place what was there before the step, or a
storage is written in place after the node that made it, so that a second run would find or leave other bytes. Bytes
are those of the trace and never less; where every operation is a node, keeping everything gives the trace's own levels
in both passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regrad.core.errors import InvalidPlan
from regrad.core.graph import Graph, Node, Value
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.trace import BACKWARD, GRADIENTS, NO_HOOK, OPTIMIZER, Storage, Trace

LEAF_SEQUENCE = 1 << 62
"""Nodes that accumulate a weight's gradient have numbers above this; they run right after the node before."""
GENERATOR_BYTES = 5056
BETWEEN = "it lies between the calls that were chosen"


@dataclass(frozen=True, slots=True)
class _Group:
    """Forward operations ``start`` … ``stop - 1``, which make one node."""

    name: str
    start: int
    stop: int
    reason: str
    inputs: tuple[int, ...] = ()


def graph_of_trace(
    trace: Trace,
    calls: Sequence[int] | None = None,
    *,
    reasons: Mapping[int, str] | None = None,
    generator_bytes: int = GENERATOR_BYTES,
) -> Graph:
    """The graph of a recorded step, for example of a U-Net.

    ``calls`` are indices into ``trace.calls``, none inside another: each is a node, and what lies between two is one
    that is only kept. Without ``calls`` every operation of the forward pass is a node. ``reasons`` says for calls why
    they must be kept although the trace does not show it. A node that draws random numbers holds ``generator_bytes``
    until its backward ends. Raises :class:`InvalidPlan` for calls that overlap. Cost: one pass over the trace.
    """
    return _Reading(trace, _groups(trace, calls, reasons or {}), generator_bytes).graph()


def _groups(trace: Trace, calls: Sequence[int] | None, reasons: Mapping[int, str]) -> list[_Group]:
    end = trace.phase_starts[BACKWARD]
    if calls is None:
        names = [f"{operation.name}@{index}" for index, operation in enumerate(trace.operations[:end])]
        return [_Group(name, index, index + 1, "") for index, name in enumerate(names)]
    found: list[_Group] = []
    at = 0
    for index in sorted(calls, key=lambda index: trace.calls[index].start):
        call = trace.calls[index]
        if call.start < at:
            raise InvalidPlan(f"call {call.count} of {call.module!r} overlaps the chosen call before it")
        if call.start > at:
            found.append(_Group(f"before {call.module}#{call.count}", at, call.start, BETWEEN))
        if call.stop > call.start:
            name = f"{call.module}#{call.count}"
            found.append(_Group(name, call.start, call.stop, reasons.get(index, ""), call.inputs))
        at = call.stop
    if at < end:
        found.append(_Group("the rest", at, end, BETWEEN))
    return found


class _Reading:
    """Reads nodes and values off a trace that is cut into groups."""

    def __init__(self, trace: Trace, groups: list[_Group], generator_bytes: int) -> None:
        self.trace = trace
        self.groups = groups
        self.generator_bytes = generator_bytes
        self.forward_stop = trace.phase_starts[BACKWARD]
        self.optimizer_start = trace.phase_starts[OPTIMIZER]
        self.starts = [group.start for group in groups]
        self.owners = self._owners()
        self.readers, self.writers = self._accesses()
        self.born: list[list[Storage]] = [[] for _ in trace.operations]
        for storage in trace.storages:
            if storage.birth >= 0:
                self.born[storage.birth].append(storage)

    def _group_of(self, operation: int) -> int:
        return bisect_right(self.starts, operation) - 1

    def _owners(self) -> list[int]:
        """For each operation of the backward pass the group whose backward it belongs to."""
        # the autograd node of an operation is made before the operation runs: numbers from that of the last
        # operation of the group before on are of this group
        operations = self.trace.operations
        numbers = [operations[group.start - 1].sequence if group.start else 0 for group in self.groups]
        owners, at = [], len(self.groups) - 1
        for operation in operations[self.forward_stop : self.optimizer_start]:
            if 0 <= operation.sequence < LEAF_SEQUENCE:
                at = min(at, max(0, bisect_right(numbers, operation.sequence) - 1))
            owners.append(at)
        return owners

    def _accesses(self) -> tuple[list[set[int]], list[set[int]]]:
        """For each storage the groups that read it in the forward pass (or are given it), and that write it."""
        readers: list[set[int]] = [set() for _ in self.trace.storages]
        writers: list[set[int]] = [set() for _ in self.trace.storages]
        for at, group in enumerate(self.groups):
            for storage in group.inputs:
                readers[storage].add(at)
            for operation in self.trace.operations[group.start : group.stop]:
                for storage in (*operation.reads, *operation.writes):
                    readers[storage].add(at)
                for storage in operation.writes:
                    writers[storage].add(at)
        return readers, writers

    def graph(self) -> Graph:
        """The graph; see :func:`graph_of_trace`."""
        reasons = self._reasons()
        bases, most, gradients = self._backward()
        values = self._values()
        nodes = []
        for at, group in enumerate(self.groups):
            operations = self.trace.operations[group.start : group.stop]
            later = sum(gradients[at + 1 :])
            if not reasons[at] and any(operation.draws for operation in operations):
                name = f"generator state of {group.name}"
                values.append(Value(name, self.generator_bytes, at, needed_by=(at,), pinned=at))
            nodes.append(
                Node(
                    group.name,
                    sum(operation.seconds for operation in operations),
                    forward_bytes=self._forward_bytes(group),
                    flow_bytes=bases[at] - later,
                    transient_bytes=most[at] - bases[at],
                    gradient_bytes=gradients[at],
                    reason=reasons[at],
                )
            )
        persistent = sum(storage.bytes for storage in self.trace.storages if storage.birth < 0)
        eager = TraceArithmetic(self.trace).levels()
        optimizer = max(eager.during[self.optimizer_start :], default=0) - persistent - sum(gradients)
        seconds = sum(operation.seconds for operation in self.trace.operations)
        return Graph(tuple(nodes), tuple(values), persistent, max(0, optimizer), seconds)

    def _reasons(self) -> list[str]:
        reasons = [group.reason for group in self.groups]
        for index, storage in enumerate(self.trace.storages):
            late = self.writers[index]
            if 0 <= storage.birth < self.forward_stop:
                late = late - {self._group_of(storage.birth)}
                touched = {self._group_of(storage.birth)} | {
                    at for at in self.readers[index] if at <= max(late, default=-1)
                }
                why = "a storage that it makes or reads is written in place later on"
            else:
                touched, why = set(late), "it writes in place what was there before the step"
            for at in touched if late else ():
                reasons[at] = reasons[at] or why
        return reasons

    def _values(self) -> list[Value]:
        values = []
        for index, storage in enumerate(self.trace.storages):
            if not 0 <= storage.birth < self.forward_stop:
                continue
            made = self._group_of(storage.birth)
            stop = self.groups[made].stop
            leaves = storage.drop is None or storage.drop > stop or bool(self.readers[index] - {made})
            if not (storage.saved_by or leaves):
                continue
            pins = [self._group_of(save.operation) for save in storage.saved_by if save.position == NO_HOOK]
            if storage.drop is None:
                pins.append(self._dead_by(storage.death))
            values.append(
                Value(
                    f"{self.trace.operations[storage.birth].name}:{index}",
                    storage.bytes,
                    made,
                    consumers=tuple(sorted(self.readers[index] - {made})),
                    needed_by=tuple(sorted({self._group_of(save.operation) for save in storage.saved_by})),
                    held_through=None if storage.drop is None else max(made, self._group_of(storage.drop - 1)),
                    pinned=min(pins, default=None),
                    category=storage.category,
                )
            )
        return values

    def _dead_by(self, death: int | None) -> int:
        """The group until the end of whose backward a storage lives that is freed before operation ``death``."""
        if death is None or death > self.optimizer_start:
            return 0
        return self.owners[death - 1 - self.forward_stop] if death > self.forward_stop else len(self.groups) - 1

    def _forward_bytes(self, group: _Group) -> int:
        """The most bytes of its own storages and workspace while the operations of ``group`` run."""
        size = group.stop - group.start
        change = [0] * (size + 1)
        for at in range(group.start, group.stop):
            for storage in self.born[at]:
                change[at - group.start] += storage.bytes
                kept = storage.saved_by or storage.drop is None or storage.drop > group.stop
                if not kept and storage.drop is not None:
                    change[max(storage.drop, at + 1) - group.start] -= storage.bytes
        level = most = 0
        for at in range(size):
            level += change[at]
            most = max(most, level + self.trace.operations[group.start + at].workspace_bytes)
        return most

    def _backward(self) -> tuple[list[int], list[int], list[int]]:
        """For each group: bytes born in the backward pass as its turn comes, the most of them, its weight gradients."""
        stop, count = self.forward_stop, len(self.owners)
        change = [0] * (count + 1)
        gradients = [0] * len(self.groups)
        for storage in self.trace.storages:
            born = storage.birth - stop
            if 0 <= born < count:
                change[born] += storage.bytes
                stays = storage.death is None or storage.death >= self.optimizer_start
                if stays and storage.category == GRADIENTS:
                    gradients[self.owners[born]] += storage.bytes
                if storage.death is not None and storage.death - stop <= count:
                    change[storage.death - stop] -= storage.bytes
        before: list[int | None] = [None] * len(self.groups)
        most = [0] * len(self.groups)
        level = 0
        for at, owner in enumerate(self.owners):
            level += change[at]
            if before[owner] is None:
                before[owner] = level - sum(storage.bytes for storage in self.born[stop + at])
            most[owner] = max(most[owner], level + self.trace.operations[stop + at].workspace_bytes)
        return self._filled(before, most, level + change[count], gradients)

    def _filled(
        self, before: list[int | None], most: list[int], end: int, gradients: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Groups whose backward runs nothing find what the next one finds."""
        bases, following = [0] * len(before), end
        for at, found in enumerate(before):
            following = following if found is None else found
            bases[at] = following
            most[at] = max(most[at], following)
        return bases, most, gradients
