"""Graphs by hand: levels, lives of values, what a schedule may not do, and graphs read off chains and traces."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.errors import IllegalSchedule, InvalidPlan, PlannerMismatch
from regrad.core.graph import Graph, Node, Value
from regrad.core.graph_plan import (
    Free,
    GraphPlan,
    Run,
    RunBackward,
    graph_schedule_of,
    keep_everything,
    kept_values,
)
from regrad.core.graph_simulate import simulate_graph, walk_graph
from regrad.core.graph_trace import BETWEEN, graph_of_trace
from regrad.core.plan import one_level
from regrad.core.simulate import simulate
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.trace import NO_HOOK, Call, Operation, Save, Storage, Trace
from regrad.planners import (
    Binomial,
    EveryK,
    Exhaustive,
    FirstK,
    KeepAll,
    Optimal,
    Portfolio,
    RecomputeAll,
    SqrtN,
    Uniform,
)

# down, middle, up: up reads what down made. P = 100, Σ g = 6, o = 7
U = Graph(
    (
        Node("down", 1.0, 12, 3, 5, 1),
        Node("middle", 2.0, 30, 4, 6, 2),
        Node("up", 4.0, 0, 0, 8, 3),
    ),
    (
        Value("skip", 10, 0, (1, 2), (2,)),
        Value("deep", 20, 1, (2,), (2,)),
        Value("inside", 5, 1, (), (1,)),
        Value("loss", 1, 2, (), (), pinned=2),
    ),
    100,
    7,
)


def test_the_eager_step_by_hand():
    found = simulate_graph(keep_everything(U), U)
    # forward 100+12, 110+30, 135+1; backward 136+8, then 105+6+3+4, then 100+5+5+3; optimizer 100+6+7
    assert found.levels == (112, 140, 136, 144, 118, 113, 113)
    assert (found.peak_bytes, found.moment, found.added_seconds) == (144, ("backward", 2), 0.0)
    assert kept_values(keep_everything(U), U) == ((), (2,), (0, 1, 2, 3))


def test_a_value_that_is_made_again_is_counted_once_in_each_life():
    plan = GraphPlan(((), (0, 1), ()))
    found = simulate_graph(plan, U)
    # inside goes at once; before the backward of middle: down over 100+3+4, middle with skip over that, then its own 5
    assert found.levels == (112, 140, 131, 139, 119, 147, 118, 113, 113)
    assert (found.added_seconds, found.recomputes) == (3.0, (1, 1, 0))
    assert kept_values(plan, U) == ((), (), (0, 1, 3))
    actions = graph_schedule_of(plan, U)
    assert actions[:4] == (Run(0), Run(1), Free(2), Run(2))
    assert actions.count(Free(0)) == 2


def test_a_skip_is_held_across_what_lies_between_or_made_again():
    again = simulate_graph(GraphPlan(((), (), (0,))), U)
    held = simulate_graph(keep_everything(U), U)
    assert again.levels[:3] == held.levels[:3]  # up reads the skip in the forward pass, so it is there in any plan
    assert again.added_seconds == 1.0


def test_a_pinned_value_is_there_twice_while_its_node_runs_again():
    pinned = replace(U, values=(replace(U.values[0], pinned=0), *U.values[1:]))
    found = simulate_graph(GraphPlan(((), (0, 1), ())), pinned)
    # as above, with 10 more wherever the skip had gone, and both copies while down runs
    assert found.levels == (112, 140, 131, 139, 100 + 10 + 12 + 7, 147, 128, 123, 113)


@pytest.mark.parametrize(
    ("actions", "position", "why"),
    [
        ([Run(1)], 0, "it reads skip, which is not held"),
        ([Run(0), Run(0)], 1, "the forward pass stands at node 1"),
        ([Run(0), Free(0)], 1, "the forward pass holds skip through node 2"),
        ([Run(0), Free(1)], 1, "it is not held"),
        ([Run(0), Free(9)], 1, "there is no such value"),
        ([Run(7)], 0, "there is no such node"),
        ([Run(0), RunBackward(0)], 1, "the forward pass has only reached node 1"),
        ([Run(0), Run(1), Run(2), RunBackward(1)], 3, "the backward pass stands at node 2"),
        ([Run(0), Run(1), Run(2), Free(1), RunBackward(2)], 4, "it reads deep, which is not held"),
        ([Run(0), Run(1), Run(2), Free(3)], 3, "loss is held until the backward of node 2 ends"),
        ([Run(0), Run(1), Run(2), Run(0)], 3, "it makes skip, which is held already"),
        ([Run(0), Run(1), Run(2), RunBackward(2), Run(2)], 4, "its backward has run already"),
        ([Run(0), Run(1), Run(2)], 3, "the backward of node 2 never ran"),
        ([Run(0), Run(1), Run(2), RunBackward(2), RunBackward(1), RunBackward(0)], 6, "were never freed"),
    ],
)
def test_a_schedule_that_is_not_legal(actions, position, why):
    with pytest.raises(IllegalSchedule, match=why) as caught:
        walk_graph(actions, U)
    assert caught.value.position == position


def test_a_node_that_may_not_run_again():
    fixed = replace(U, nodes=(replace(U.nodes[0], reason="it writes a buffer"), *U.nodes[1:]))
    with pytest.raises(InvalidPlan, match="'down' cannot run again: it writes a buffer"):
        simulate_graph(GraphPlan(((), (0,), ())), fixed)
    actions = [Run(0), Run(1), Run(2), Free(0), Run(0)]
    with pytest.raises(IllegalSchedule, match="it writes a buffer"):
        walk_graph(actions, fixed)


@pytest.mark.parametrize(
    ("reruns", "why"),
    [
        (((), ()), "for a graph of 2 nodes, this one has 3"),
        (((), (1, 0), ()), "not in order"),
        (((1,), (), ()), "node 1 cannot run again before the backward of node 0"),
    ],
)
def test_a_plan_that_is_not_well_formed(reruns, why):
    with pytest.raises(InvalidPlan, match=why):
        simulate_graph(GraphPlan(reruns), U)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"nodes": ()}, "at least one node"),
        ({"nodes": (replace(U.nodes[0], transient_bytes=-1), *U.nodes[1:])}, "negative figure"),
        ({"nodes": (replace(U.nodes[0], forward_seconds=float("nan")), *U.nodes[1:])}, "negative figure"),
        ({"values": (replace(U.values[0], producer=3),)}, "made by node 3 of 3"),
        ({"values": (replace(U.values[0], bytes=-1),)}, "of -1 bytes"),
        ({"values": (replace(U.values[0], consumers=(0, 1)),)}, "not later nodes in order"),
        ({"values": (replace(U.values[0], consumers=(2, 1)),)}, "not later nodes in order"),
        ({"values": (replace(U.values[1], needed_by=(0,)),)}, "must not come before it"),
        ({"values": (replace(U.values[1], held_through=0),)}, "must not come before it"),
        ({"values": (replace(U.values[0], pinned=3),)}, "pinned to node 3 of 3"),
        ({"optimizer_bytes": -1}, "negative bytes"),
    ],
)
def test_a_graph_that_is_not_well_formed(change, why):
    with pytest.raises(InvalidPlan, match=why):
        replace(U, **change)


PLANNERS = [
    Binomial(),
    EveryK(),
    Exhaustive(),
    Exhaustive(nested=True),
    FirstK(),
    KeepAll(),
    Optimal(),
    Optimal(nested=True),
    Portfolio(),
    Portfolio(spans=True),
    RecomputeAll(),
    SqrtN(),
    Uniform(),
]


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.label)
def test_a_chain_planner_refuses_a_graph(planner):
    with pytest.raises(PlannerMismatch, match="takes a chain, and the problem is a graph of 3 nodes"):
        planner(Problem(U), 1000)


# -- chains as graphs -------------------------------------------------------------------------------------------------


def segment(name, b, own, run, transient, *, after, g=0, only_keep=False):
    """A segment whose figures are those of storages: ``b`` enters, ``own`` is kept beside it, ``after`` leaves."""
    run = max(run, own + after)
    keep = Option(KEEP, own + b, transient, b + run, holds_input=True)
    again = Option(RECOMPUTE, b, max(run, own + transient), b + run, 2.0, holds_input=True, recomputes=True)
    return Segment(name, (keep,) if only_keep else (keep, again), g, 2.0, b, None, b + run, "tied" if only_keep else "")


CHAIN = Chain(
    (
        segment("a", 4, 20, 9, 3, after=6, g=2),
        segment("b", 6, 11, 40, 2, after=5, g=1),
        segment("c", 5, 8, 0, 9, after=0, only_keep=True),
    ),
    50,
    3,
)


@pytest.mark.parametrize("again", [(), (0,), (1,), (0, 1)])
def test_a_chain_as_a_graph_has_the_same_peak_and_seconds(again):
    graph = Graph.of_chain(CHAIN)
    reruns = GraphPlan(tuple((node,) if node - 1 in again else () for node in range(4)))
    chain = simulate(one_level([RECOMPUTE if i in again else KEEP for i in range(3)]), CHAIN)
    found = simulate_graph(reruns, graph)
    assert (found.peak_bytes, found.added_seconds) == (chain.peak_bytes, chain.added_seconds)
    assert found.recomputes == (0, *chain.recomputes)
    assert graph.nodes[3].reason == "tied"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tail_seconds": 1.0}, "has a tail of 1.0 s"),
        ({"options": (CHAIN.segments[0].options[1],)}, "must have keep"),
        ({"options": (*CHAIN.segments[0].options, Option("packed", 3, 1))}, r"\['packed'\]"),
        ({"options": (replace(CHAIN.segments[0].options[0], transient_bytes=-1),)}, "needs -1"),
        ({"boundary_bytes": 30}, "keeps -6 bytes of its own"),
    ],
)
def test_a_chain_that_storages_cannot_say_is_refused(change, why):
    with pytest.raises(PlannerMismatch, match=why):
        Graph.of_chain(replace(CHAIN, segments=(replace(CHAIN.segments[0], **change), *CHAIN.segments[1:])))


# -- traces as graphs -------------------------------------------------------------------------------------------------


def random_trace(rng: random.Random, count: int) -> Trace:
    """``count`` forward operations with skips, saves and temporaries, each with one or two backward operations."""
    storages = [Storage(rng.randint(0, 30), "weights", -1)]
    operations, out = [], []
    for i in range(count):
        reads = tuple(sorted({out[j] for j in range(i) if j == i - 1 or rng.random() < 0.25}))
        for storage in reads:
            storages[storage].drop = i + 1
            if rng.random() < 0.6:
                storages[storage].saved_by += (Save(i, 10 + i, i),)
        out.append(len(storages))
        kept = rng.random() < 0.15
        mine = (Save(i, 10 + i, i + 1),) if rng.random() < 0.4 else ()
        storages.append(
            Storage(rng.randint(1, 50), "activations", i, None, saved_by=mine, drop=None if kept else i + 1)
        )
        if rng.random() < 0.5:
            storages.append(Storage(rng.randint(1, 50), "activations", i, i + 1, drop=i + 1))
        work = rng.choice([0, 0, rng.randint(1, 40)])
        operations.append(Operation(f"f{i}", "forward", i, 11 + i, (0, *reads), seconds=1.0, workspace_bytes=work))
    for storage in storages[1:]:
        if storage.drop is not None and rng.random() < 0.1:
            storage.drop = min(count, storage.drop + 1)
    for i in reversed(range(count)):
        for _ in range(rng.choice([1, 1, 2])):
            at = len(operations)
            storages.append(Storage(rng.randint(0, 20), "temporaries", at, at + rng.randint(1, 3)))
            if rng.random() < 0.5:
                storages.append(Storage(rng.randint(0, 9), "gradients", at))
            operations.append(Operation(f"b{i}", "backward", -1, 10 + i, workspace_bytes=rng.choice([0, 7])))
    end = len(operations)
    for storage in storages:
        if storage.birth >= count and storage.death is not None:
            storage.death = min(storage.death, end)
    operations.append(Operation("step", "optimizer", -1, -1, workspace_bytes=rng.choice([0, 200])))
    calls = [Call("m", "M", i, i, i + 1, -1, 10 + i, 11 + i) for i in range(count)]
    return Trace(operations, storages, calls, "fake", "fresh", "cpu")


@pytest.mark.parametrize("seed", range(60))
def test_keeping_everything_gives_the_levels_of_the_trace(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    trace = random_trace(rng, count)
    graph = graph_of_trace(trace)
    levels = simulate_graph(keep_everything(graph), graph).levels
    true = TraceArithmetic(trace).levels()
    assert list(levels[:count]) == true.during[:count]
    backward: dict[str, int] = {}
    for operation, level in zip(trace.operations[count:-1], true.during[count:-1], strict=True):
        backward[operation.name] = max(level, backward.get(operation.name, 0))
    assert list(levels[count:-1]) == list(backward.values())
    assert levels[-1] >= true.during[-1]


@pytest.mark.parametrize("seed", range(20))
def test_calls_are_never_cheaper_than_their_operations(seed):
    rng = random.Random(seed)
    trace = random_trace(rng, 8)
    trace.calls = [Call("m", "M", 0, 1, 4, -1, 11, 14), Call("m", "M", 1, 4, 6, -1, 14, 16)]
    graph = graph_of_trace(trace, [1, 0], reasons={1: "said by hand"})
    assert [node.name for node in graph.nodes] == ["before m#0", "m#0", "m#1", "the rest"]
    assert [node.reason for node in graph.nodes] == [BETWEEN, "", "said by hand", BETWEEN]
    assert [node.forward_seconds for node in graph.nodes] == [1.0, 3.0, 2.0, 2.0]
    assert simulate_graph(keep_everything(graph), graph).peak_bytes >= TraceArithmetic(trace).levels().peak_bytes


def test_calls_that_overlap_are_refused():
    trace = random_trace(random.Random(1), 6)
    trace.calls = [Call("m", "M", 0, 1, 4, -1, 11, 14), Call("m.0", "M", 0, 2, 3, 0, 12, 13)]
    with pytest.raises(InvalidPlan, match=r"'m.0' overlaps"):
        graph_of_trace(trace, [0, 1])


def plain_trace(count: int = 4) -> Trace:
    """Operation i makes storage i + 1, which operation i + 1 reads and saves."""
    storages = [Storage(8, "buffers", -1)]
    operations = []
    for i in range(count):
        saved = (Save(i + 1, 11 + i, i + 1),) if i + 1 < count else ()
        storages.append(Storage(10, "activations", i, None, saved_by=saved, drop=i + 2 if i + 1 < count else i + 1))
        operations.append(Operation(f"f{i}", "forward", i, 11 + i, (i,) if i else ()))
    operations += [Operation(f"b{i}", "backward", -1, 10 + i) for i in reversed(range(count))]
    return Trace(operations, storages, [], "fake", "fresh", "cpu")


def reasons(trace: Trace) -> list[bool]:
    return [bool(node.reason) for node in graph_of_trace(trace).nodes]


def test_in_place_writes_keep_what_they_touch():
    trace = plain_trace()
    assert reasons(trace) == [False] * 4
    trace.operations[2].writes = (2,)  # made by 1, read by 2
    assert reasons(trace) == [False, True, True, False]
    trace.operations[2].writes = (0,)  # a buffer
    assert reasons(trace) == [False, False, True, False]
    trace.operations[2].writes = (3,)  # its own
    assert reasons(trace) == [False] * 4


def test_random_draws_hold_the_state_of_their_generator():
    trace = plain_trace()
    trace.operations[1].draws = True
    state = graph_of_trace(trace, generator_bytes=33).values[-1]
    assert (state.bytes, state.producer, state.needed_by, state.pinned) == (33, 1, (1,), 1)


def test_what_no_hook_can_ask_for_is_held_whatever_the_plan():
    trace = plain_trace()
    trace.storages[2].saved_by = (Save(2, 12, NO_HOOK),)
    graph = graph_of_trace(trace)
    assert [value.pinned for value in graph.values] == [None, 2, None]
    assert 1 in kept_values(GraphPlan(((), (), (1,), ())), graph)[2]
