"""``Frontier`` against ``Exhaustive`` under the static rule, its set against all plans, and what it must not drop."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from regrad.core.chain import KEEP, Chain, Option, Problem, Segment
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Status, one_level
from regrad.core.simulate import simulate
from regrad.core.state import JOURNAL, READ_SET, SNAPSHOT, STAYS_BACK, UNION
from regrad.planners import Exhaustive, Frontier, Portfolio, _pareto
from regrad.planners.exhaustive import count_plans

PROBLEMS = 1_200
LENGTHS = (1,) * 4 + (2,) * 24 + (3,) * 36 + (4,) * 20 + (5,) * 8 + (6,) * 4 + (7,) * 3 + (8,)
OFFERS = ((SNAPSHOT, JOURNAL), (JOURNAL, STAYS_BACK), (SNAPSHOT, READ_SET, UNION), (JOURNAL,), (STAYS_BACK, SNAPSHOT))


def problems(state_problem, count, *, seed):
    rng = random.Random(seed)
    for index in range(count):
        states = (0, 1, 1, 2)[index % 4]
        while True:
            problem = state_problem(
                rng,
                LENGTHS[index % len(LENGTHS)],
                states=states,
                engines=OFFERS[index % len(OFFERS)],
                most_options=3 if states == 0 else 2,
            )
            if count_plans(problem.chain, nested=False) <= 700:
                break
        yield replace(problem, rule="static"), rng


def differences(problem: Problem, rng: random.Random) -> list[str]:
    """Where ``Frontier`` and the oracle disagree, in words; empty if nowhere."""
    oracle, planner = Exhaustive(), Frontier()
    frontier = oracle.frontier(problem)
    peaks = sorted(priced.peak_bytes for priced in frontier)
    found = []
    for budget in [max(peaks[0] - 1, 0), peaks[0], peaks[-1], *rng.sample(peaks, min(3, len(peaks)))]:
        ours, best = planner(problem, budget), oracle.choose(frontier, budget)
        if ours.least_bytes != best.least_bytes:
            found.append(f"least {ours.least_bytes} instead of {best.least_bytes}")
        if (ours.status, ours.peak_bytes, ours.added_seconds) != (best.status, best.peak_bytes, best.added_seconds):
            found.append(f"at {budget}: {ours} instead of {best}")
        if ours.plan is not None:
            walked = simulate(ours.plan, problem.chain, "static", problem.states)
            if (walked.peak_bytes, walked.added_seconds) != (ours.peak_bytes, ours.added_seconds):
                found.append(f"at {budget}: says {ours.peak_bytes}, {ours.added_seconds}, walks as {walked}")
    return found


def test_frontier_equals_exhaustive_under_the_static_rule(state_problem):
    lengths, infeasible = set(), 0
    for index, (problem, rng) in enumerate(problems(state_problem, PROBLEMS, seed=61)):
        assert differences(problem, rng) == [], f"problem {index}: {problem}"
        infeasible += Frontier()(problem, 0).status is Status.INFEASIBLE
        lengths.add(len(problem.chain))
    assert lengths == set(range(1, 9))
    assert infeasible > PROBLEMS * 0.99


def test_its_set_is_that_of_all_plans(random_chain):
    """(Σ retained, max transient, seconds) of every plan, worked out plainly, less what another one matches."""
    rng = random.Random(62)
    for _ in range(60):
        chain = random_chain(rng, 4)
        every = []
        for options in product(*(s.options for s in chain.segments)):
            transient = max(0, *(o.transient_bytes for o in options))
            every.append((sum(o.retained_bytes for o in options), transient, sum(o.added_seconds for o in options)))
        unbeaten = {
            p for p in every if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in every)
        }
        points = Frontier().points(Problem(chain, rule="static"))
        assert {(p.retained_bytes, p.transient_bytes, p.added_seconds) for p in points} == unbeaten
        assert len(points) == len(unbeaten)
        for point in points:
            picked = [s.option(c.option) for s, c in zip(chain.segments, point.plan, strict=True)]
            assert sum(o.retained_bytes for o in picked) == point.retained_bytes


def by_summed_memory(retained, transient, seconds):
    """The planted fault: a set on the sum of the two kinds of memory and seconds."""
    total = retained + np.maximum(transient, 0)
    order = np.lexsort((seconds, total))
    kept, best = [], np.inf
    for point in order.tolist():
        if seconds[point] < best:
            best = seconds[point]
            kept.append(point)
    return np.array(kept, dtype=np.int64)


def test_the_comparison_catches_a_set_on_summed_memory(state_problem, monkeypatch):
    monkeypatch.setattr(_pareto, "undominated", by_summed_memory)
    wrong = [p for p, rng in problems(state_problem, 200, seed=63) if differences(p, rng)]
    assert len(wrong) >= 20
    # one that it found, made small: both options of b sum up to 10, and a needs 10 in its backward anyway
    a = Segment("a", (Option(KEEP, 0, 10),))
    b = Segment("b", (Option("holds", 10, 0), Option("needs", 0, 10, added_seconds=0.0)))
    problem = Problem(Chain((a, b)), rule="static")
    assert Frontier()(problem, 100).peak_bytes == 20
    monkeypatch.undo()
    solution = Frontier()(problem, 100)
    assert ([choice.option for choice in solution.plan], solution.peak_bytes) == ([KEEP, "needs"], 10)


@pytest.mark.parametrize("name", ["retained", "transient", "seconds"])
def test_the_comparison_catches_a_set_that_forgets(name, state_problem, monkeypatch):
    true = _pareto.undominated

    def faulty(retained, transient, seconds):
        columns = {"retained": retained, "transient": transient, "seconds": seconds}
        columns[name] = columns[name] * 0
        return true(*columns.values())

    monkeypatch.setattr(_pareto, "undominated", faulty)
    assert sum(bool(differences(p, rng)) for p, rng in problems(state_problem, 60, seed=64)) >= 5


def wide(count):
    """A chain whose set has m^n points: what one option holds less it needs more, and takes another time."""

    def options(i):
        figures = ((3**i * k, 2**i * (2 - k) * 7, float((2 - k) * 5**i % 97)) for k in range(3))
        return tuple(Option(f"o{k}", r, t, added_seconds=s) for k, (r, t, s) in enumerate(figures))

    return Problem(Chain(tuple(Segment(f"s{i}", options(i)) for i in range(count))), rule="static")


def test_beyond_its_limit_it_says_so_and_never_drops_points_in_silence():
    problem, small = wide(9), Frontier(max_points=20)
    exact, budget = Frontier(), 40_000
    full = exact.points(problem)
    assert len(full) > 20
    limited = small(problem, budget)
    assert limited.status is Status.LIMIT
    assert limited.plan is not None
    assert limited.lower_bound <= exact(problem, budget).added_seconds <= limited.added_seconds
    assert simulate(limited.plan, problem.chain, "static").peak_bytes == limited.peak_bytes <= budget
    with pytest.raises(PlannerMismatch, match="more points than that"):
        small.points(problem)
    # larger budgets are never answered worse, by the limited answers too
    before = np.inf
    for step in range(0, 60_000, 500):
        solution = small(problem, step)
        if solution.plan is not None:
            assert solution.added_seconds <= before
            before = solution.added_seconds


def test_portfolio_takes_it_under_the_static_rule(state_problem):
    for problem, rng in problems(state_problem, 40, seed=65):
        frontier = Exhaustive().frontier(problem)
        for priced in rng.sample(frontier, min(2, len(frontier))):
            found = Portfolio()(problem, priced.peak_bytes)
            assert (found.added_seconds, found.status) == (priced.added_seconds, Status.OPTIMAL)


def test_figures_that_the_static_rule_cannot_add_up_are_refused():
    for option, message in (
        (Option(KEEP, -1, 0), "retains -1 bytes"),
        (Option(KEEP, 1, 0, added_seconds=float("inf")), "takes inf seconds"),
        (Option(KEEP, 1 << 60, 0), "2..59 bytes or more"),
    ):
        with pytest.raises(PlannerMismatch, match=message):
            Frontier()(Problem(Chain((Segment("a", (option,)),)), rule="static"), 10)
    plan = one_level([KEEP])
    assert Frontier()(Problem(Chain((Segment("a", (Option(KEEP, 1, 1),)),)), rule="static"), 2).plan == plan
