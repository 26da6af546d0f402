"""Plans of graphs: which nodes run again, and when; from that follows which values are kept, and until when.

The plan space is that of Jain et al. 2020 ("Checkmate: breaking the memory wall with optimal tensor
rematerialization") with the forward pass run once and as it is: before the backward of each node any nodes may run
again, in order. It holds every nesting of spans of a chain, and more.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from regrad.core.errors import InvalidPlan
from regrad.core.graph import Graph
from regrad.core.plan import Solution


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """``reruns[t]``: the nodes that run again right before the backward of node ``t``, rising, none after ``t``."""

    reruns: tuple[tuple[int, ...], ...]

    @property
    def total_reruns(self) -> int:
        """Extra forwards of the step."""
        return sum(map(len, self.reruns))


@dataclass(frozen=True, slots=True)
class GraphSolution(Solution):
    """A solution for a graph. Choices cannot say its plan, so that ``plan`` is None and ``graph_plan`` takes its place.

    ``graph_plan`` is None only if INFEASIBLE, or LIMIT with nothing found.
    """

    graph_plan: GraphPlan | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a node's forward: the first of the step in the forward pass, a further one in the backward pass."""

    node: int


@dataclass(frozen=True, slots=True)
class RunBackward:
    """The backward of a node; its gradients come into being."""

    node: int


@dataclass(frozen=True, slots=True)
class Free:
    """The memory of a value is given back."""

    value: int


GraphAction = Run | RunBackward | Free


def keep_everything(graph: Graph) -> GraphPlan:
    """The plan of the eager step."""
    return GraphPlan(((),) * len(graph))


def check_graph_plan(plan: GraphPlan, graph: Graph) -> None:
    """Raise :class:`InvalidPlan` unless every rerun of ``plan`` is one that ``graph`` allows."""
    if len(plan.reruns) != len(graph):
        raise InvalidPlan(f"the plan is for a graph of {len(plan.reruns)} nodes, this one has {len(graph)}")
    for before, nodes in enumerate(plan.reruns):
        if list(nodes) != sorted(set(nodes)):
            raise InvalidPlan(
                f"the nodes that run again before the backward of node {before} are not in order: {nodes}"
            )
        for node in nodes:
            if not 0 <= node <= before:
                raise InvalidPlan(
                    f"node {node} cannot run again before the backward of node {before}, nothing needs it"
                )
            if graph.nodes[node].reason:
                raise InvalidPlan(f"node {graph.nodes[node].name!r} cannot run again: {graph.nodes[node].reason}")


def graph_schedule_of(plan: GraphPlan, graph: Graph) -> tuple[GraphAction, ...]:
    """The actions that carry out ``plan`` (checked first), with every value freed after its last use.

    A value that is made again has one life for each making, and none of them overlap: what comes after a making uses
    that one. A pinned value has one life until its pin ends. Cost: O(runs x values).
    """
    check_graph_plan(plan, graph)
    moments: list[Run | RunBackward] = [Run(node) for node in range(len(graph))]
    runs: list[list[int]] = [[node] for node in range(len(graph))]
    backward = [0] * len(graph)
    for node in reversed(range(len(graph))):
        for again in plan.reruns[node]:
            runs[again].append(len(moments))
            moments.append(Run(again))
        backward[node] = len(moments)
        moments.append(RunBackward(node))
    frees: list[list[int]] = [[] for _ in moments]
    for index, value in enumerate(graph.values):
        uses = sorted([at for node in value.consumers for at in runs[node]] + [backward[n] for n in value.needed_by])
        held = value.forward_end if value.pinned is None else max(value.forward_end, backward[value.pinned])
        makings = [value.producer, *(at for at in runs[value.producer][1:] if at > held)]
        for making, following in zip(makings, [*makings[1:], len(moments)], strict=True):
            last = uses[bisect_left(uses, following) - 1] if uses and uses[0] < following else making
            frees[max(last, making, held if making == value.producer else 0)].append(index)
    return tuple(
        action for at, moment in enumerate(moments) for action in (moment, *(Free(value) for value in frees[at]))
    )


def kept_values(plan: GraphPlan, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each node the values that are held as its turn in the backward pass comes, before anything runs again."""
    held: set[int] = set()
    found: dict[int, tuple[int, ...]] = {}
    turn, ran = len(graph) - 1, 0
    for action in graph_schedule_of(plan, graph):
        if isinstance(action, Free):
            held.discard(action.value)
            continue
        if ran == len(graph) and turn not in found:
            found[turn] = tuple(sorted(held))
        if isinstance(action, RunBackward):
            turn -= 1
        else:
            held.update(graph.made_by[action.node])
            ran += ran < len(graph)
    return tuple(found[node] for node in range(len(graph)))
