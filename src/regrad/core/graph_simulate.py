"""Walks the schedule of a graph's plan, judges whether it is legal and prices it in exact integer bytes.

The timeline rule with storages in place of retained bytes; H are the bytes of all values held at the moment:

    run of i             P + H + max(f_i, what i makes)
    run of i before the  P + H + max(f_i, what i makes) + Σ_{j>t} g_j + flow_t
      backward of t
    backward of t        P + H + t_t + Σ_{j>t} g_j + flow_t
    optimizer            P + Σ g + o
"""

from __future__ import annotations

from collections.abc import Iterable

from regrad.core.errors import IllegalSchedule
from regrad.core.graph import Graph
from regrad.core.graph_plan import Free, GraphAction, GraphPlan, Run, RunBackward, graph_schedule_of
from regrad.core.simulate import Simulation


def simulate_graph(plan: GraphPlan, graph: Graph) -> Simulation:
    """Price ``plan``; segments of the simulation are nodes. Raises :class:`InvalidPlan` for a plan of another graph."""
    return walk_graph(graph_schedule_of(plan, graph), graph)


def walk_graph(actions: Iterable[GraphAction], graph: Graph) -> Simulation:
    """Price any schedule. Raises :class:`IllegalSchedule` where it uses what is not there or leaves a thing undone."""
    walker = _Walker(graph)
    position = -1
    for position, action in enumerate(actions):
        problem = walker.act(action)
        if problem:
            raise IllegalSchedule(position, action, problem)
    problem = walker.finish()
    if problem:
        raise IllegalSchedule(position + 1, "end", problem)
    return walker.result()


class _Walker:
    """The state of a step on a graph: which values are held, and how far the two passes have come."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.held: set[int] = set()
        self.bytes = 0
        self.ran_forward = 0
        self.next_backward = len(graph) - 1
        self.recomputes = [0] * len(graph)
        self.seconds = 0.0
        self.levels: list[int] = []
        self.moments: list[tuple[str, int]] = []

    @property
    def _in_forward(self) -> bool:
        return self.ran_forward < len(self.graph)

    def act(self, action: GraphAction) -> str:
        """Carry out ``action``; what is wrong with it, or nothing."""
        if isinstance(action, Free):
            return self._free(action.value) if 0 <= action.value < len(self.graph.values) else "there is no such value"
        if not 0 <= action.node < len(self.graph):
            return f"there is no such node; the graph has {len(self.graph)}"
        return self._run(action.node) if isinstance(action, Run) else self._backward(action)

    def _mark(self, phase: str, node: int, above: int) -> None:
        base = self.graph.persistent_bytes + (0 if phase == "forward" else self._base())
        self.levels.append(base + self.bytes + above)
        self.moments.append((phase, node))

    def _base(self) -> int:
        if self.next_backward < 0:
            return self.graph.gradient_bytes
        return self.graph.backward_base_bytes[self.next_backward]

    def _missing(self, values: Iterable[int]) -> str:
        names = [self.graph.values[v].name for v in values if v not in self.held]
        return f"it reads {', '.join(names)}, which is not held" if names else ""

    def _run(self, node: int) -> str:
        missing = self._missing(self.graph.read_by[node])
        if missing:
            return missing
        again = not self._in_forward
        if not again and node != self.ran_forward:
            return f"the forward pass stands at node {self.ran_forward}"
        if again and node > self.next_backward:
            return "its backward has run already"
        if again and self.graph.nodes[node].reason:
            return f"it cannot run again: {self.graph.nodes[node].reason}"
        for index in self.graph.made_by[node]:
            if index in self.held and not self._pinned(index):
                return f"it makes {self.graph.values[index].name}, which is held already"
        self._mark("backward" if again else "forward", node, self.graph.run_bytes[node])
        for index in self.graph.made_by[node]:
            if index not in self.held:  # of a pinned one the second copy goes at the end of the run
                self.held.add(index)
                self.bytes += self.graph.values[index].bytes
        if again:
            self.recomputes[node] += 1
            self.seconds += self.graph.nodes[node].forward_seconds
        else:
            self.ran_forward += 1
        return ""

    def _pinned(self, index: int) -> bool:
        pin = self.graph.values[index].pinned
        return pin is not None and self.next_backward >= pin

    def _backward(self, action: RunBackward) -> str:
        if self._in_forward:
            return f"the forward pass has only reached node {self.ran_forward}"
        if action.node != self.next_backward:
            return f"the backward pass stands at node {self.next_backward}"
        missing = self._missing(self.graph.needed_by[action.node])
        if missing:
            return missing
        self._mark("backward", action.node, self.graph.nodes[action.node].transient_bytes)
        self.next_backward -= 1
        return ""

    def _free(self, index: int) -> str:
        if index not in self.held:
            return "it is not held"
        value = self.graph.values[index]
        if self.ran_forward <= value.forward_end:
            return f"the forward pass holds {value.name} through node {value.forward_end}"
        if self._pinned(index):
            return f"{value.name} is held until the backward of node {value.pinned} ends"
        self.held.discard(index)
        self.bytes -= value.bytes
        return ""

    def finish(self) -> str:
        """Mark the optimizer's step; what is left undone, or nothing."""
        if self.next_backward >= 0:
            return f"the backward of node {self.next_backward} never ran"
        if self.held:
            return f"values {sorted(self.held)} were never freed"
        self._mark("optimizer", -1, self.graph.optimizer_bytes)
        return ""

    def result(self) -> Simulation:
        """The figures of the schedule that was walked."""
        peak = max(self.levels)
        moment = self.moments[self.levels.index(peak)]
        return Simulation(peak, moment, self.seconds, tuple(self.recomputes), tuple(self.levels))
