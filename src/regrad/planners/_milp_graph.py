"""What runs again before each backward of a graph as a mixed-integer program; the maths stands in ``milp.md``."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from regrad.core.graph import Graph
from regrad.core.graph_plan import Free, GraphPlan, Run, RunBackward, graph_schedule_of, keep_everything
from regrad.core.graph_simulate import simulate_graph
from regrad.planners._milp_model import Formulation, Model, Units

NEVER = 1 << 60
Terms = list[tuple[int, float]]


def formulate_graph(graph: Graph) -> Formulation[GraphPlan]:
    """The program for ``graph`` under the timeline rule.

    Cost: about n² / 2 whole columns, n V + n E columns in all and O(n² V) terms for n nodes, V values and E reads.
    """
    program = _Program(graph)

    def read(values: NDArray[np.float64]) -> GraphPlan:
        again: list[list[int]] = [[] for _ in graph.nodes]
        for (stage, node), column in program.runs.items():
            if values[column] > 0.5:
                again[stage].append(node)
        return GraphPlan(tuple(tuple(sorted(nodes)) for nodes in again))

    def price(plan: GraphPlan) -> tuple[int, float]:
        simulation = simulate_graph(plan, graph)
        return simulation.peak_bytes, simulation.added_seconds

    seconds = {column: graph.nodes[node].forward_seconds for (_, node), column in program.runs.items()}
    return Formulation(
        program.model, seconds, program.room, program.units, 0.0, read, price, program.blame, _simple(graph, program)
    )


def _simple(graph: Graph, program: _Program) -> tuple[GraphPlan, ...]:
    """Keep everything; run a node again before its own backward; run everything again before every backward."""
    count = len(graph)
    own = tuple((node,) if (node, node) in program.runs else () for node in range(count))
    every = tuple(tuple(node for node in range(stage + 1) if (stage, node) in program.runs) for stage in range(count))
    return keep_everything(graph), GraphPlan(own), GraphPlan(every)


class _Program:
    """The columns and rows. A stage t is the backward of node t with what runs again before it.

    runs    R[t, i]: node i runs again in stage t
    holds   S[t, v]: value v is there as stage t begins
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        figures = [graph.optimizer_bytes, *graph.run_bytes, *(value.bytes for value in graph.values)]
        for one in graph.nodes:
            figures += [one.flow_bytes, one.transient_bytes, one.gradient_bytes]
        self.units = Units.of(figures, graph.persistent_bytes)
        self.model = Model()
        self.room = self.model.column(upper=inf)
        self.rerun_from, self.useful_from = self._useful()
        self.runs: dict[tuple[int, int], int] = {}
        self.holds: dict[tuple[int, int], int] = {}
        self.causes: dict[tuple[int, Run | RunBackward], dict[int, int]] = {}
        """For each moment, with its stage (n in the forward pass), the columns of the values that may be held at it."""
        for stage in range(len(graph)):
            for node in range(stage + 1):
                if stage >= self.rerun_from[node]:
                    self.runs[stage, node] = self.model.column(whole=True)
            for index in range(len(graph.values)):
                if stage >= self.useful_from[index] and not self._pinned(stage, index):
                    self.holds[stage, index] = self.model.column()
        self._forward()
        for stage in range(len(graph)):
            self._presence(stage)
            self._levels(stage)
        self.model.row([(self.room, 1.0)], lower=self.units.weight(graph.gradient_bytes + graph.optimizer_bytes))

    def _useful(self) -> tuple[list[int], list[int]]:
        """The first stage at which a node may run again to some purpose, and from which a value may be wanted."""
        rerun, useful = [NEVER] * len(self.graph), [NEVER] * len(self.graph.values)
        for node in reversed(range(len(self.graph))):
            for index in self.graph.made_by[node]:
                value = self.graph.values[index]
                useful[index] = min([*value.needed_by, *(rerun[reader] for reader in value.consumers)], default=NEVER)
            if not self.graph.nodes[node].reason:
                rerun[node] = min((useful[index] for index in self.graph.made_by[node]), default=NEVER)
        return rerun, useful

    def _pinned(self, stage: int, index: int) -> bool:
        pin = self.graph.values[index].pinned
        return pin is not None and stage >= pin

    def _there(self, stage: int, index: int) -> Terms:
        """Whether a value that is not pinned can be used in a stage: it was held, or its maker runs in it."""
        terms = [(self.holds[stage, index], 1.0)] if (stage, index) in self.holds else []
        run = self.runs.get((stage, self.graph.values[index].producer))
        return terms if run is None else [*terms, (run, 1.0)]

    def _presence(self, stage: int) -> None:
        """Nothing is used, or held on for the next stage, that is not there."""
        for node in range(stage + 1):
            run = self.runs.get((stage, node))
            for index in self.graph.read_by[node] if run is not None else ():
                if run is not None and not self._pinned(stage, index):
                    self.model.row([*self._there(stage, index), (run, -1.0)], lower=0.0)
        for index in self.graph.needed_by[stage]:
            if not self._pinned(stage, index):
                self.model.row(self._there(stage, index), lower=1.0)
        for index in range(len(self.graph.values)):
            later = self.holds.get((stage - 1, index))
            if later is not None and not self._pinned(stage, index):
                self.model.row([*self._there(stage, index), (later, -1.0)], lower=0.0)

    def _levels(self, stage: int) -> None:
        graph, weight = self.graph, self.units.weight
        slots = [node for node in range(stage + 1) if (stage, node) in self.runs]
        fixed = [graph.backward_base_bytes[stage]] * (len(slots) + 1)
        fixed[-1] += graph.nodes[stage].transient_bytes
        terms: list[Terms] = [[(self.runs[stage, node], weight(graph.run_bytes[node]))] for node in slots] + [[]]
        moments: list[Run | RunBackward] = [*map(Run, slots), RunBackward(stage)]
        causes: list[dict[int, int]] = [self.causes.setdefault((stage, moment), {}) for moment in moments]
        for index, value in enumerate(graph.values):
            for at, alive in enumerate(self._alive(stage, index, slots)):
                if alive is True:
                    fixed[at] += value.bytes
                elif alive is not None:
                    terms[at].append((alive, weight(value.bytes)))
                    causes[at][index] = alive
        for row, constant in zip(terms, fixed, strict=True):
            self.model.row([*row, (self.room, -1.0)], upper=-weight(constant))

    def _alive(self, stage: int, index: int, slots: list[int]) -> list[int | bool | None]:
        """For each slot of a stage, and for its backward, the column that says whether a value is alive; True if it is
        in any plan, None if in none."""
        value = self.graph.values[index]
        if self._pinned(stage, index):
            return [True] * (len(slots) + 1)
        end: int | bool | None = True if stage in value.needed_by else self.holds.get((stage - 1, index))
        if self._pinned(stage - 1, index):
            end = True
        found: list[int | bool | None] = [end]
        for node in reversed(slots):
            if node <= value.producer:  # it can only be there from the stage before, and then it is for some use
                found.append(self.holds.get((stage, index)))
                continue
            if node in value.consumers and end is not True:
                run = self.runs[stage, node]
                alive = self.model.column()
                self.model.row([(alive, 1.0), (run, -1.0)], lower=0.0)
                if end is not None:
                    self.model.row([(alive, 1.0), (end, -1.0)], lower=0.0)
                end = alive
            found.append(end)
        return found[::-1]

    def _forward(self) -> None:
        """The forward pass holds what it still reads, and what the first backward stage will find."""
        last = len(self.graph) - 1
        for node in range(len(self.graph)):
            fixed, terms = self.graph.run_bytes[node], Terms()
            causes = self.causes.setdefault((last + 1, Run(node)), {})
            for index, value in enumerate(self.graph.values):
                if value.producer >= node:
                    continue
                held = self.holds.get((last, index))
                if value.forward_end >= node or self._pinned(last, index):
                    fixed += value.bytes
                elif held is not None:
                    terms.append((held, self.units.weight(value.bytes)))
                    causes[index] = held
            self.model.row([*terms, (self.room, -1.0)], upper=-self.units.weight(fixed))

    def blame(self, plan: GraphPlan) -> list[int]:
        """The columns that make the highest moment of ``plan`` so high: what is held at it, and the rerun if it is one."""
        levels = simulate_graph(plan, self.graph).levels
        highest, stage = levels.index(max(levels)), len(self.graph)
        held: set[int] = set()
        at = 0
        for action in graph_schedule_of(plan, self.graph):
            if isinstance(action, Free):
                held.discard(action.value)
                continue
            if at == len(self.graph):
                stage -= 1
            if at == highest:
                run = [self.runs[stage, action.node]] if isinstance(action, Run) and stage < len(self.graph) else []
                return run + [column for index, column in self.causes[stage, action].items() if index in held]
            at += 1
            if isinstance(action, Run):
                held.update(self.graph.made_by[action.node])
            else:
                stage -= 1
        return []  # the optimizer's step: no plan is lower
