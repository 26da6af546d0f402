"""``Milp`` against every plan of small graphs, exactly, against every nesting of spans on chains as graphs, and the same
comparison against programs that are wrong on purpose."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product
from math import inf

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.errors import UsageError
from regrad.core.graph import Graph, Node, Value
from regrad.core.graph_plan import GraphPlan
from regrad.core.graph_simulate import simulate_graph
from regrad.core.plan import Status, leaves
from regrad.core.schedule import Backward, Recompute, schedule_of
from regrad.core.simulate import simulate
from regrad.planners import Exhaustive, milp
from regrad.planners._milp_model import Units
from regrad.planners.exhaustive import all_nested
from regrad.planners.milp import Milp

pytest.importorskip("highspy", reason="the extra milp is not installed")

GRAPHS = 150
SCALES = (1, 1, 1, 1_003, (1 << 31) + 11)


def random_graph(rng: random.Random, count: int, scale: int = 1) -> Graph:
    """Skips of any length, results that nothing reads, pins, nodes that cannot run again."""
    nodes, values = [], []
    for i in range(count):
        run = rng.choice([0, rng.randint(0, 30 * scale)])
        bytes_ = run, rng.randint(0, 8 * scale), rng.randint(0, 10 * scale), rng.randint(0, 5 * scale)
        nodes.append(Node(f"n{i}", float(rng.randint(0, 9)), *bytes_, "it writes" if rng.random() < 0.15 else ""))
        for which in range(rng.choice([1, 1, 2])):
            readers = [j for j in range(i + 1, count) if which == 0 and (j == i + 1 or rng.random() < 0.35)]
            needed = [j for j in (i, *readers) if rng.random() < 0.7]
            held = rng.choice([None, None, rng.randint(i, count - 1)])
            pinned = rng.choice([None] * 6 + [rng.randint(0, count - 1)])
            size = rng.randint(0, 20 * scale)
            values.append(Value(f"v{i}.{which}", size, i, tuple(readers), tuple(needed), held, pinned))
    return Graph(tuple(nodes), tuple(values), rng.randint(0, 20), rng.choice([0, rng.randint(0, 60 * scale)]))


def every_plan(graph: Graph):
    """All reruns before all backwards."""
    per_stage = []
    for stage in range(len(graph)):
        can = [node for node in range(stage + 1) if not graph.nodes[node].reason]
        per_stage.append([some for size in range(len(can) + 1) for some in combinations(can, size)])
    for reruns in product(*per_stage):
        yield GraphPlan(reruns)


def prices(graph: Graph) -> list[tuple[int, float]]:
    """Peak and seconds of every plan."""
    found = (simulate_graph(plan, graph) for plan in every_plan(graph))
    return sorted({(simulation.peak_bytes, simulation.added_seconds) for simulation in found})


def differences(
    graph: Graph, every: list[tuple[int, float]], rng: random.Random, planner: Milp | None = None
) -> list[str]:
    """Where ``planner`` and the walk of every plan disagree, in words; empty if nowhere."""
    planner, found = planner or Milp(), []
    peaks = sorted({peak for peak, _ in every})
    for budget in sorted({peaks[0] - 1, peaks[0], peaks[-1], rng.choice(peaks), rng.choice(peaks) - 1}):
        if budget < 0:
            continue
        best = min((seconds for peak, seconds in every if peak <= budget), default=inf)
        ours = planner.graph(Problem(graph), budget)
        if ours.status is not (Status.INFEASIBLE if best == inf else Status.OPTIMAL):
            found.append(f"at {budget}: {ours.status}, best {best}")
        if ours.least_bytes != peaks[0]:
            found.append(f"at {budget}: least {ours.least_bytes} instead of {peaks[0]}")
        if ours.graph_plan is not None:
            walked = simulate_graph(ours.graph_plan, graph)
            if (walked.peak_bytes, walked.added_seconds) != (ours.peak_bytes, ours.added_seconds):
                found.append(f"at {budget}: says {ours.peak_bytes}, {ours.added_seconds}, walks as {walked}")
            if walked.peak_bytes > budget:
                found.append(f"at {budget}: peaks at {walked.peak_bytes}, over the budget")
            if walked.added_seconds != best or ours.lower_bound > best:
                found.append(f"at {budget}: {walked.added_seconds} s, bound {ours.lower_bound}, best {best}")
    return found


def node(name: str, **more) -> Node:
    return Node(name, float(len(name)), **more)


def unet() -> Graph:
    """Two down, the middle, two up; each up reads what the down of its level made. The last is only kept."""
    nodes = (
        node("down", forward_bytes=45, flow_bytes=16, transient_bytes=20, gradient_bytes=2),
        node("deeper", flow_bytes=12, transient_bytes=9, gradient_bytes=3),
        node("middle", flow_bytes=12, transient_bytes=8, gradient_bytes=4),
        node("up", flow_bytes=8, transient_bytes=14, gradient_bytes=3),
        node("last", transient_bytes=25, gradient_bytes=1, reason="the loss"),
    )
    values = (
        Value("skip", 16, 0, (1, 4), (1, 4)),
        Value("inside down", 30, 0, (), (0,)),
        Value("deep skip", 8, 1, (2, 3), (2, 3)),
        Value("inside deeper", 18, 1, (), (1,)),
        Value("bottom", 4, 2, (3,), (3,)),
        Value("inside middle", 11, 2, (), (2,)),
        Value("top", 8, 3, (4,), (4,)),
        Value("inside up", 13, 3, (), (3,)),
    )
    return Graph(nodes, values, 10, 5)


def two_outputs() -> Graph:
    """A trunk with two heads; the caller keeps the result of the first one."""
    nodes = (node("trunk"), node("mixing"), node("head", transient_bytes=6), node("other", transient_bytes=9))
    values = (
        Value("features", 20, 0, (1, 2), (1, 2)),
        Value("mixed", 15, 1, (2, 3), (3,)),
        Value("inside mixing", 25, 1, (), (1,)),
        Value("first", 7, 2, (), (2,), pinned=0),
        Value("second", 5, 3, (), (3,)),
        Value("inside trunk", 30, 0, (), (0,)),
    )
    return Graph(nodes, values, 3)


def shared_module() -> Graph:
    """One module called twice with something between: a node per call, its gradient born in the backward of the last."""
    nodes = (
        node("module#0", transient_bytes=8),
        node("between", transient_bytes=3, gradient_bytes=2),
        node("module#1", transient_bytes=8, gradient_bytes=12),
        node("loss", reason="the loss"),
    )
    values = (
        Value("once", 9, 0, (1, 3), (1,)),
        Value("inside once", 21, 0, (), (0,)),
        Value("turned", 9, 1, (2,), (2,)),
        Value("twice", 9, 2, (3,), (3,)),
        Value("inside twice", 21, 2, (), (2,)),
    )
    return Graph(nodes, values, 30)


SHAPES = {"U-Net": unet, "two outputs": two_outputs, "shared module": shared_module}


@pytest.fixture(scope="module")
def shape_prices():
    return {name: prices(make()) for name, make in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_milp_equals_every_plan_of(name, shape_prices):
    every = shape_prices[name]
    rng = random.Random(43)
    assert len({peak for peak, _ in every}) > 3
    for _ in range(4):
        assert differences(SHAPES[name](), every, rng) == []


def test_milp_equals_every_plan_of_random_graphs():
    rng = random.Random(44)
    choices = 0
    for index in range(GRAPHS):
        graph = random_graph(rng, rng.choice([1, 2, 3, 3, 4]), SCALES[index % len(SCALES)])
        every = prices(graph)
        choices += len({peak for peak, _ in every}) > 1
        assert differences(graph, every, rng) == [], f"graph {index}: {graph}"
    assert choices > GRAPHS / 2


def values_of(graph: Graph, change) -> Graph:
    return replace(graph, values=tuple(change(value) for value in graph.values))


def nodes_of(graph: Graph, **change) -> Graph:
    return replace(graph, nodes=tuple(replace(one, **change) for one in graph.nodes))


def without_skips(value: Value) -> Value:
    near = tuple(reader for reader in value.consumers if reader == value.producer + 1)
    return replace(value, consumers=near, needed_by=tuple(n for n in value.needed_by if n <= value.producer + 1))


PLANTED = {
    "counts a storage once for each reader": lambda graph: values_of(
        graph, lambda value: replace(value, bytes=value.bytes * max(1, len(value.consumers)))
    ),
    "counts every storage twice": lambda graph: values_of(graph, lambda value: replace(value, bytes=2 * value.bytes)),
    "forgets the skips": lambda graph: values_of(graph, without_skips),
    "frees what a backward needs": lambda graph: values_of(graph, lambda value: replace(value, needed_by=())),
    "lets go of what the caller holds": lambda graph: values_of(graph, lambda value: replace(value, pinned=None)),
    "forgets the gradients that flow": lambda graph: nodes_of(graph, flow_bytes=0),
    "forgets weight gradients": lambda graph: nodes_of(graph, gradient_bytes=0),
    "runs again what cannot": lambda graph: nodes_of(graph, reason=""),
    "forgets what a forward takes": lambda graph: nodes_of(graph, forward_bytes=0),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_comparison_catches_a_program_that(fault, monkeypatch, shape_prices):
    true_program = milp.formulate_graph

    def wrong(graph):
        """The program of a graph that is not the one given; its plans are still priced on the true one."""
        true = true_program(graph)
        return replace(true_program(PLANTED[fault](graph)), price=true.price, simple=true.simple)

    monkeypatch.setattr(milp, "formulate_graph", wrong)
    monkeypatch.setattr(milp, "MOST_REPAIRS", 1)  # else plans over the budget are cut off until the answer is right
    rng = random.Random(45)
    caught = 0
    for name, make in SHAPES.items():
        caught += _caught(make(), shape_prices[name], rng)
    for _ in range(40):
        graph = random_graph(rng, 3)
        caught += _caught(graph, prices(graph), rng)
    assert caught >= 3


def _caught(graph: Graph, every: list[tuple[int, float]], rng: random.Random) -> bool:
    try:
        return bool(differences(graph, every, rng))
    except UsageError:  # a plan that the graph does not allow does not get past the simulator
        return True


def test_a_solver_that_sees_too_much_room_never_gets_a_plan_through(monkeypatch):
    """What does not fit by exact bytes is cut off and solved again: the answers stay right."""
    true_room = Units.room_of
    monkeypatch.setattr(Units, "room_of", lambda self, budget: true_room(self, budget) + 3 / self.scale)
    rng = random.Random(46)
    for _ in range(40):
        graph = random_graph(rng, 3)
        assert differences(graph, prices(graph), rng) == []


def test_more_memory_is_never_slower():
    graph = unet()
    seconds = [Milp().graph(Problem(graph), budget).added_seconds for budget in range(120, 180, 3)]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) >= 3


# -- chains as graphs -------------------------------------------------------------------------------------------------


def chain_of_storages(rng: random.Random, count: int) -> Chain:
    """A chain whose figures follow from storages, so that its graph says the same."""
    enters = [rng.randint(1, 6) for _ in range(count)] + [0]
    segments = []
    for i in range(count):
        own, transient, seconds = rng.randint(0, 20), rng.randint(0, 8), float(rng.randint(1, 9))
        b, run = enters[i], max(rng.randint(0, 12), own + enters[i + 1])
        keep = Option(KEEP, own + b, transient, b + run, 0.0, holds_input=True)
        again = Option(RECOMPUTE, b, max(run, own + transient), b + run, seconds, holds_input=True, recomputes=True)
        segments.append(Segment(f"s{i}", (keep, again), rng.randint(0, 4), seconds, b, None, b + run))
    return Chain(tuple(segments), rng.randint(0, 20), rng.choice([0, 30]))


def as_graph_plan(choices, chain: Chain) -> GraphPlan:
    """The reruns of nested choices; what runs twice before one backward runs once."""
    options = {choice.start: choice.option for choice in leaves(choices)}
    reruns: list[set[int]] = [set() for _ in range(len(chain) + 1)]
    pending: set[int] = set()
    for action in schedule_of(choices, chain).actions:
        if isinstance(action, Recompute):
            pending.add(action.segment + 1)
        elif isinstance(action, Backward):
            if options[action.segment] == RECOMPUTE:
                pending.add(action.segment + 1)
            reruns[action.segment + 1], pending = pending, set()
    return GraphPlan(tuple(tuple(sorted(nodes)) for nodes in reruns))


def test_milp_is_never_worse_than_every_nesting_of_spans():
    """Each nested plan is a plan of the graph, no slower and no larger; so the best of the graph is no worse than the
    best of them, and with one segment, or where nothing need run again, they are equal."""
    rng = random.Random(47)
    oracle = Exhaustive(nested=True)
    compared = equal = 0
    for index in range(60):
        count = (1, 2, 2, 3, 3, 3, 3, 3, 3, 4)[index % 10]
        chain = chain_of_storages(rng, count)
        graph = Graph.of_chain(chain)
        for choices in all_nested(chain) if count < 4 or index < 10 else ():
            theirs, ours = simulate(choices, chain), simulate_graph(as_graph_plan(choices, chain), graph)
            assert ours.peak_bytes <= theirs.peak_bytes
            assert ours.added_seconds <= theirs.added_seconds
        frontier = oracle.frontier(Problem(chain))
        for priced in (frontier[0], frontier[-1], *rng.sample(frontier, min(3, len(frontier)))):
            best = oracle.choose(frontier, priced.peak_bytes)
            found = Milp().graph(Problem(graph), priced.peak_bytes)
            assert found.status is Status.OPTIMAL
            assert found.added_seconds <= best.added_seconds
            assert found.least_bytes <= best.least_bytes
            if count == 1 or best.added_seconds == 0:
                assert (found.added_seconds, found.least_bytes <= best.least_bytes) == (best.added_seconds, True)
            compared += 1
            equal += found.added_seconds == best.added_seconds
    assert compared > 150
    assert equal > 0.8 * compared
