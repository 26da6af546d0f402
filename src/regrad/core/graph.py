"""A model that is not a chain, as a graph: long skips, several outputs, modules that are called more than once.

Nodes are operations or module calls in the order of the forward pass; the backward runs them in reverse. Values are the
storages between and inside them, each counted once from its making to its last use. A chain charges every segment for
what it retains; a graph charges every storage, whoever reads it. Plans and their peaks: ``graph_plan``,
``graph_simulate``; from a recorded step: ``graph_trace``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Segment
from regrad.core.errors import InvalidPlan, PlannerMismatch
from regrad.core.trace import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Value:
    """A storage that the forward pass makes.

    producer      the node that makes it
    consumers     nodes whose forward reads it, rising: they cannot run, or run again, without it
    needed_by     nodes whose backward reads it
    held_through  the last node during whose first forward the model's own code holds it; None: its last consumer
    pinned        the node until the end of whose backward it is held whatever the plan, such as 0 for a result that the
                  caller keeps; None if the plan decides
    category      as of a storage of a trace
    """

    name: str
    bytes: int
    producer: int
    consumers: tuple[int, ...] = ()
    needed_by: tuple[int, ...] = ()
    held_through: int | None = None
    pinned: int | None = None
    category: str = ACTIVATIONS

    @property
    def forward_end(self) -> int:
        """The last node of the forward pass that it is there for."""
        last = self.consumers[-1] if self.consumers else self.producer
        return last if self.held_through is None else max(last, self.held_through)


@dataclass(frozen=True, slots=True)
class Node:
    """An operation, or one call of a module; a module that is called twice is two nodes.

    forward_seconds  one run of its forward
    forward_bytes    the most above what is held at its entry while its forward runs, the values that it makes included
                     (if it is less than those, they count)
    flow_bytes       gradients of values that are alive as its backward begins, and during a replay before it
    transient_bytes  the most above all that while its backward runs, its own new gradients included
    gradient_bytes   g: gradients of weights that come into being in its backward and stay
    reason           why it cannot be run again, where that is so
    """

    name: str
    forward_seconds: float = 0.0
    forward_bytes: int = 0
    flow_bytes: int = 0
    transient_bytes: int = 0
    gradient_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Graph:
    """Nodes in execution order and the values between them.

    persistent_bytes  P: there whatever the plan; the batch belongs to it
    optimizer_bytes   o: the most above P and all gradients while the optimizer steps
    eager_seconds     one eager step

    Raises :class:`InvalidPlan` for what is not well formed: a value that is read before it is made, negative figures.
    """

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    persistent_bytes: int = 0
    optimizer_bytes: int = 0
    eager_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InvalidPlan("a graph needs at least one node")
        for node in self.nodes:
            figures = (node.forward_bytes, node.flow_bytes, node.transient_bytes, node.gradient_bytes)
            if min(figures) < 0 or not isfinite(node.forward_seconds) or node.forward_seconds < 0:
                raise InvalidPlan(f"node {node.name!r} has a negative figure: {node}")
        for value in self.values:
            self._check(value)
        if min(self.persistent_bytes, self.optimizer_bytes) < 0:
            raise InvalidPlan(f"a graph has negative bytes: {self.persistent_bytes}, {self.optimizer_bytes}")

    def _check(self, value: Value) -> None:
        count, made = len(self.nodes), value.producer
        if value.bytes < 0 or not 0 <= made < count:
            raise InvalidPlan(f"value {value.name!r} of {value.bytes} bytes is made by node {made} of {count}")
        readers = value.consumers
        if any(not made < node < count for node in readers) or list(readers) != sorted(set(readers)):
            raise InvalidPlan(f"value {value.name!r} of node {made} is read by {readers}: not later nodes in order")
        ends = [*value.needed_by, *(end for end in [value.held_through] if end is not None)]
        if any(not made <= node < count for node in ends):
            raise InvalidPlan(f"value {value.name!r} of node {made} is wanted by {ends}, which must not come before it")
        if value.pinned is not None and not 0 <= value.pinned < count:
            raise InvalidPlan(f"value {value.name!r} is pinned to node {value.pinned} of {count}")

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def made_by(self) -> tuple[tuple[int, ...], ...]:
        """For each node the values that it makes."""
        return self._by_node([(value.producer,) for value in self.values])

    @cached_property
    def read_by(self) -> tuple[tuple[int, ...], ...]:
        """For each node the values that its forward reads."""
        return self._by_node([value.consumers for value in self.values])

    @cached_property
    def needed_by(self) -> tuple[tuple[int, ...], ...]:
        """For each node the values that its backward reads."""
        return self._by_node([tuple(set(value.needed_by)) for value in self.values])

    def _by_node(self, nodes_of: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.nodes]
        for index, nodes in enumerate(nodes_of):
            for node in nodes:
                found[node].append(index)
        return tuple(tuple(indices) for indices in found)

    @cached_property
    def run_bytes(self) -> tuple[int, ...]:
        """For each node the most above what is held at its entry while its forward runs."""
        return tuple(
            max(node.forward_bytes, sum(self.values[v].bytes for v in made))
            for node, made in zip(self.nodes, self.made_by, strict=True)
        )

    @cached_property
    def gradient_bytes(self) -> int:
        """Σ g."""
        return sum(node.gradient_bytes for node in self.nodes)

    @cached_property
    def backward_base_bytes(self) -> tuple[int, ...]:
        """For each node what is there above P as its backward begins, whatever the plan: later g and the flow."""
        found, total = [], 0
        for node in reversed(self.nodes):
            found.append(total + node.flow_bytes)
            total += node.gradient_bytes
        return tuple(reversed(found))

    @classmethod
    def of_chain(cls, chain: Chain) -> Graph:
        """A chain of keep and recompute as a graph: node 0 makes the input, node i + 1 is segment i.

        What a segment keeps beyond its boundary is one value, and each boundary another one. Node seconds are
        ``forward_seconds``; the bytes of recompute follow from the lives of values. Peaks are those of the chain where
        its ``forward_bytes`` count what enters a segment and what it makes, and its recompute option what a replay
        takes; otherwise the graph's may be higher. Raises :class:`PlannerMismatch` for a chain with other options,
        with tails, or with figures that storages cannot have.
        """
        nodes, values = [Node("input", reason="it is the input of the chain")], []
        for index, segment in enumerate(chain.segments):
            keep, own = _keep_of(segment)
            b = segment.boundary_bytes
            reason = "" if segment.can(RECOMPUTE) else segment.reason or "it can only be kept"
            transients = max(0, keep.forward_bytes - b), 0, keep.transient_bytes, segment.gradient_bytes
            nodes.append(Node(segment.name, segment.forward_seconds, *transients, reason))
            needed = (index + 1,) if keep.holds_input else ()
            values.append(Value(f"input of {segment.name}", b, index, (index + 1,), needed))
            values.append(Value(f"kept by {segment.name}", own, index + 1, (), (index + 1,)))
        return cls(tuple(nodes), tuple(values), chain.persistent_bytes, chain.optimizer_bytes, chain.eager_seconds)


def _keep_of(segment: Segment) -> tuple[Option, int]:
    """The keep option of a segment and what it retains beside the segment's boundary."""
    others = [option.name for option in segment.options if option.name not in (KEEP, RECOMPUTE)]
    if others or not segment.can(KEEP):
        raise PlannerMismatch(f"segment {segment.name!r} must have keep, and recompute at most beside it: {others}")
    if segment.tail_seconds not in (None, segment.forward_seconds):
        raise PlannerMismatch(f"segment {segment.name!r} has a tail of {segment.tail_seconds} s: a node runs whole")
    keep = segment.option(KEEP)
    own = keep.retained_bytes - (segment.boundary_bytes if keep.holds_input else 0)
    if min(own, keep.transient_bytes) < 0:
        raise PlannerMismatch(f"segment {segment.name!r} keeps {own} bytes of its own and needs {keep.transient_bytes}")
    return keep, own
