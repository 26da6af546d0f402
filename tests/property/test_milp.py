"""``Milp`` against ``Optimal`` and ``Exhaustive`` on chains, exactly; its limits, gaps and refusals."""

from __future__ import annotations

import random
import subprocess
import sys
from math import inf

import pytest

from regrad.core.chain import RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.errors import PlannerMismatch, UsageError
from regrad.core.graph import Graph, Node, Value
from regrad.core.graph_plan import GraphPlan
from regrad.core.graph_simulate import simulate_graph
from regrad.core.plan import Status
from regrad.core.simulate import simulate
from regrad.core.state import JOURNAL, LogEntry, StateUse, StateVariable
from regrad.planners import Exhaustive, Optimal
from regrad.planners.milp import Milp

pytest.importorskip("highspy", reason="the extra milp is not installed")

CHAINS = 300
SCALES = (1, 1, 1, 1_003, (1 << 31) + 11)

# -- chains -----------------------------------------------------------------------------------------------------------


def test_milp_equals_optimal_on_three_hundred_chains(random_chain):
    rng = random.Random(41)
    compared = infeasible = 0
    for index in range(CHAINS):
        chain = random_chain(rng, rng.randint(1, 8), most_options=4, scale=SCALES[index % len(SCALES)])
        problem = Problem(chain)
        curve = Optimal().curve(problem)
        points = [budget for budget, _ in curve.points()]
        for budget in {points[0] - 1, points[0], points[-1], rng.choice(points), rng.choice(points) - 1}:
            best, ours = curve.at(budget), Milp()(problem, budget)
            found = ours.status, ours.added_seconds, ours.least_bytes
            assert found == (best.status, best.added_seconds, best.least_bytes), f"{chain} at {budget}"
            if ours.plan is not None:
                walked = simulate(ours.plan, chain)
                assert (walked.peak_bytes, walked.added_seconds) == (ours.peak_bytes, ours.added_seconds)
                assert walked.peak_bytes <= budget
            compared += 1
            infeasible += ours.status is Status.INFEASIBLE
    assert compared > 2.5 * CHAINS
    assert CHAINS <= infeasible < compared - CHAINS


def test_milp_equals_exhaustive_under_the_static_rule(random_chain):
    rng = random.Random(42)
    for _ in range(100):
        problem = Problem(random_chain(rng, rng.randint(1, 5)), rule="static")
        frontier = Exhaustive().frontier(problem)
        for priced in (frontier[0], frontier[-1], rng.choice(frontier)):
            for budget in (priced.peak_bytes, max(0, priced.peak_bytes - 1)):
                best, ours = Exhaustive().choose(frontier, budget), Milp()(problem, budget)
                found = ours.status, ours.added_seconds, ours.least_bytes
                assert found == (best.status, best.added_seconds, best.least_bytes)


# -- limits, gaps and refusals ----------------------------------------------------------------------------------------


def deep_unet(depth: int) -> Graph:
    """``2 depth + 1`` nodes of a few MiB: more than a solver proves in no time."""
    last, mib = 2 * depth, 1 << 20
    nodes, values = [], []
    for i in range(last + 1):
        size = max(1, 16 >> min(i, last - i)) * mib
        nodes.append(Node(f"n{i}", 1.0 + i % 3, 0, size, 2 * size, mib))
        readers = tuple(sorted({j for j in (i + 1, last - i) if i < j <= last}))
        values += [Value(f"out{i}", size, i, readers, readers), Value(f"inside{i}", 2 * size, i, (), (i,))]
    return Graph(tuple(nodes), tuple(values))


def line(count: int) -> Graph:
    """One node after the other, all different, each with much that only its own backward reads."""
    rng, nodes, values = random.Random(0), [], []
    for i in range(count):
        size, after = rng.randint(1, 1000), (i + 1,) if i + 1 < count else ()
        nodes.append(Node(f"n{i}", float(rng.randint(1, 9)), 0, size, 2 * size, rng.randint(0, 100)))
        inside = Value(f"inside{i}", rng.randint(1, 3000), i, (), (i,))
        values += [Value(f"out{i}", size, i, after, after), inside]
    return Graph(tuple(nodes), tuple(values))


def test_no_time_gives_the_limit_with_a_plan_that_fits_and_a_bound():
    graph = deep_unet(12)
    problem = Problem(graph)
    eager = simulate_graph(GraphPlan(((),) * len(graph)), graph)
    budget = eager.peak_bytes * 7 // 10
    cut = Milp(time_limit_seconds=0).graph(problem, budget)
    assert cut.status is Status.LIMIT
    assert cut.graph_plan is not None
    assert simulate_graph(cut.graph_plan, graph).peak_bytes == cut.peak_bytes <= budget
    proved = Milp().graph(problem, budget)
    assert proved.status is Status.OPTIMAL
    assert 0.0 <= cut.lower_bound <= proved.added_seconds < cut.added_seconds


def test_no_time_proves_nothing_about_a_budget_that_is_too_small():
    problem = Problem(deep_unet(12))
    found = Milp(time_limit_seconds=0).graph(problem, 1000)
    assert (found.status, found.graph_plan, found.lower_bound) == (Status.LIMIT, None, 0.0)
    assert found.least_bytes > 1000
    again = Milp(time_limit_seconds=0).graph(problem, found.least_bytes)
    assert again.graph_plan is not None  # the least budget that is named can be met
    assert Milp().graph(problem, 1000).status is Status.INFEASIBLE


def test_a_solver_that_runs_out_of_time_gives_what_it_has():
    graph = line(40)  # not proved within half a minute
    eager = simulate_graph(GraphPlan(((),) * len(graph)), graph).peak_bytes
    found = Milp(time_limit_seconds=2.0).graph(Problem(graph), eager * 3 // 10)
    assert found.status is Status.LIMIT
    assert 0.0 < found.lower_bound < found.added_seconds
    assert simulate_graph(found.graph_plan, graph).peak_bytes == found.peak_bytes <= eager * 3 // 10


def test_keeping_everything_needs_no_proof():
    graph = deep_unet(12)
    peak = simulate_graph(GraphPlan(((),) * len(graph)), graph).peak_bytes
    found = Milp(time_limit_seconds=0).graph(Problem(graph), peak)
    assert (found.status, found.added_seconds) == (Status.OPTIMAL, 0.0)


def test_a_gap_ends_early_within_it():
    graph = deep_unet(5)
    peak = simulate_graph(GraphPlan(((),) * len(graph)), graph).peak_bytes
    best = Milp().graph(Problem(graph), peak // 2)
    near = Milp(gap_ratio=0.5).graph(Problem(graph), peak // 2)
    assert near.lower_bound <= best.added_seconds <= near.added_seconds
    assert near.added_seconds - near.lower_bound <= 0.5 * near.added_seconds + 1e-9
    assert near.status is (Status.OPTIMAL if near.added_seconds == near.lower_bound else Status.FEASIBLE)


@pytest.mark.parametrize(
    "settings", [{"time_limit_seconds": -1}, {"time_limit_seconds": float("nan")}, {"gap_ratio": -0.1}]
)
def test_settings_that_make_no_sense(settings):
    with pytest.raises(PlannerMismatch, match="must not be negative"):
        Milp(**settings)(Problem(deep_unet(2)), 1000)


def test_problems_that_it_refuses(random_chain):
    with pytest.raises(PlannerMismatch, match="under the timeline rule, not 'static'"):
        Milp()(Problem(deep_unet(2), rule="static"), 1000)
    chain = random_chain(random.Random(1), 3)
    with pytest.raises(PlannerMismatch, match="no chain here"):
        Milp().graph(Problem(chain), 1000)
    endless = Option("endless", 1, 1, added_seconds=inf)
    with pytest.raises(PlannerMismatch, match="not finite"):
        Milp()(Problem(Chain((Segment("s", (endless,)),))), 1000)


def test_state_that_couples_segments_is_refused():
    variable = StateVariable("queue", 8, (LogEntry(0, "queue", 0, 4, 1),), touched_by=(0,))
    with pytest.raises(PlannerMismatch, match="cannot charge the state variables of a graph"):
        Milp()(Problem(deep_unet(2), states=(variable,)), 1000)
    logged = Option(RECOMPUTE, 1, 1, states=(StateUse("queue", JOURNAL),))
    with pytest.raises(PlannerMismatch, match="couples them: take Optimal"):
        Milp()(Problem(Chain((Segment("s", (logged,)),)), states=(variable,)), 1000)


def test_a_solver_that_is_not_installed(random_chain, monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(UsageError, match=r"pip install 'regrad\[milp\]'"):
        Milp()(Problem(random_chain(random.Random(1), 3)), 1000)


def test_the_solver_is_imported_when_it_is_needed_and_says_nothing():
    program = (
        "import sys; from regrad.planners.milp import Milp; assert 'highspy' not in sys.modules\n"
        "from regrad.core.chain import *\n"
        "found = Milp()(Problem(Chain((Segment('s', (Option(KEEP, 9, 1), Option(RECOMPUTE, 1, 2, 0, 3.0))),))), 5)\n"
        "assert 'highspy' in sys.modules and found.added_seconds == 3.0"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
