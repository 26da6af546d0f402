"""``Optimal`` against ``Exhaustive`` with state in the plan: engines, both accountings, staying rolled back."""

import random
from dataclasses import replace
from math import inf

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.errors import IllegalSchedule, PlannerMismatch
from regrad.core.plan import Status
from regrad.core.simulate import simulate
from regrad.core.state import (
    JOURNAL,
    READ_SET,
    SNAPSHOT,
    STAYS_BACK,
    UNION,
    Bandwidth,
    LogEntry,
    StateVariable,
)
from regrad.core.state_options import only, with_states
from regrad.planners import (
    EveryK,
    Exhaustive,
    FirstK,
    Frontier,
    KeepAll,
    KeepOrSnapshot,
    Optimal,
    Portfolio,
    RecomputeAll,
    SqrtN,
    StateAgnostic,
    _transitions,
)
from regrad.planners.exhaustive import count_plans

PROBLEMS = 5_000
# the longer the rarer, because the oracle walks every plan; all of 1 … 8
LENGTHS = (1,) * 4 + (2,) * 24 + (3,) * 36 + (4,) * 20 + (5,) * 8 + (6,) * 4 + (7,) * 3 + (8,)
# by accounting: the shared log whose replays return or may stay back, and the union; with other engines beside
OFFERS = ((SNAPSHOT, JOURNAL), (JOURNAL, STAYS_BACK), (SNAPSHOT, READ_SET, UNION), (JOURNAL,), (STAYS_BACK, SNAPSHOT))
MOST_PLANS = 700


def problems(state_problem, count, *, seed, lengths=LENGTHS, offers=OFFERS, **more):
    rng = random.Random(seed)
    for index in range(count):
        length = lengths[index % len(lengths)]
        states = (1, 1, 2, 0, 1, 2, 3)[index % 7]
        engines = offers[index % len(offers)]
        while True:
            most = 3 if states == 0 else 2
            problem = state_problem(rng, length, states=states, engines=engines, most_options=most, **more)
            if count_plans(problem.chain, nested=False) <= MOST_PLANS:
                break
            states = max(states - 1, min(states, 1))
        yield problem, rng


def budgets(prices, rng):
    peaks = sorted({priced.peak_bytes for priced in prices})
    some = [peak + rng.choice([-1, 0, 0, 1]) for peak in rng.sample(peaks, min(3, len(peaks)))]
    return [max(peaks[0] - 1, 0), peaks[0], peaks[-1], peaks[-1] + 1000, *some]


def differences(planner: Optimal, problem: Problem, rng: random.Random) -> list[str]:
    """Where ``planner`` and the oracle disagree, in words; empty if nowhere."""
    oracle = Exhaustive()
    prices = oracle.frontier(problem)
    curve = planner.curve(problem)
    found, loss = [], curve.loss_bytes
    for budget in {*budgets(prices, rng), *(point for point, _ in curve.points()[:8])}:
        ours, best = curve.at(budget), oracle.choose(prices, budget)
        if ours.least_bytes != best.least_bytes:
            found.append(f"least {ours.least_bytes} instead of {best.least_bytes}")
        if (ours.plan is None) != (best.plan is None):
            found.append(f"at {budget}: {ours.status} instead of {best.status}")
        elif ours.plan is not None:
            walked = simulate(ours.plan, problem.chain, problem.rule, problem.states)
            if (walked.peak_bytes, walked.added_seconds) != (ours.peak_bytes, ours.added_seconds):
                found.append(f"at {budget}: says {ours.peak_bytes}, {ours.added_seconds}, walks as {walked}")
            if walked.peak_bytes > budget:
                found.append(f"at {budget}: peaks at {walked.peak_bytes}")
            poorer = oracle.choose(prices, budget - loss)
            worst = inf if poorer.plan is None else poorer.added_seconds
            if not best.added_seconds <= walked.added_seconds <= worst:
                found.append(f"at {budget}: {walked.added_seconds} s, best {best.added_seconds}, loss {loss}")
            if ours.lower_bound > best.added_seconds:
                found.append(f"at {budget}: bound {ours.lower_bound} above {best.added_seconds}")
            if not loss and (ours.status, ours.peak_bytes) != (Status.OPTIMAL, best.peak_bytes):
                found.append(f"at {budget}: {ours.status}, peak {ours.peak_bytes} instead of {best.peak_bytes}")
    return found


def test_optimal_equals_exhaustive_on_five_thousand_problems_with_states(state_problem):
    lengths, logs, engines, stays = set(), 0, set(), 0
    for index, (problem, rng) in enumerate(problems(state_problem, PROBLEMS, seed=51)):
        assert differences(Optimal(), problem, rng) == [], f"problem {index}: {problem}"
        least = Optimal().curve(problem).least_bytes
        uses = [
            u
            for c, s in zip(Optimal()(problem, least).plan, problem.chain.segments, strict=True)
            for u in s.option(c.option).states
        ]
        lengths.add(len(problem.chain))
        engines.update(use.engine for use in uses)
        logs += sum(use.needs_log for use in uses) > 1
        stays += sum(use.stays_back for use in uses) > 1
    assert lengths == set(range(1, 9))
    assert engines == {SNAPSHOT, READ_SET, UNION, JOURNAL, STAYS_BACK}
    assert logs > 150
    assert stays > 20


def test_a_larger_budget_never_gives_a_slower_plan(state_problem):
    for problem, _ in problems(state_problem, 30, seed=52, lengths=(3, 5, 7)):
        for rule, planners in (("timeline", (Optimal(), Portfolio())), ("static", (Frontier(),))):
            ruled = replace(problem, rule=rule)
            for planner in (*planners, StateAgnostic(), KeepOrSnapshot()):
                try:
                    least = planner(ruled, 0).least_bytes
                except PlannerMismatch:  # no copies are offered
                    assert isinstance(planner, KeepOrSnapshot)
                    continue
                before = inf
                for budget in range(least, least + 60, 4):
                    solution = planner(ruled, budget)
                    assert solution.peak_bytes <= budget
                    assert solution.added_seconds <= before, planner.label
                    before = solution.added_seconds


def test_controls_are_never_better_than_the_exact_planners_and_say_true_costs(state_problem):
    """Every schedule of every planner passes the walk; what a control leaves out it pays for."""
    dearer = dict.fromkeys([StateAgnostic, KeepOrSnapshot], 0)
    for problem, rng in problems(state_problem, 150, seed=53, lengths=(2, 3, 4, 5)):
        for rule, exact in (("timeline", Optimal()), ("static", Frontier())):
            ruled = replace(problem, rule=rule)
            frontier = Exhaustive().frontier(ruled)
            budget = rng.choice(frontier).peak_bytes + rng.choice([0, 3])
            best = exact(ruled, budget)
            for planner in (StateAgnostic(), KeepOrSnapshot(), KeepAll(), RecomputeAll(), FirstK(), EveryK(), SqrtN()):
                if isinstance(planner, KeepOrSnapshot) and only(problem.chain, (SNAPSHOT,)) is None:
                    continue
                solution = planner(ruled, budget)
                if solution.plan is None:
                    assert budget < solution.least_bytes
                    dearer[type(planner)] = dearer.get(type(planner), 0) + 1
                    continue
                walked = simulate(solution.plan, problem.chain, rule, problem.states)
                assert walked.peak_bytes == solution.peak_bytes <= budget
                assert walked.added_seconds == solution.added_seconds
                assert solution.lower_bound <= best.added_seconds
                if not planner.nested:
                    assert best.added_seconds <= solution.added_seconds
                dearer[type(planner)] = dearer.get(type(planner), 0) + (best.added_seconds < solution.added_seconds)
    assert dearer[StateAgnostic] > 30
    assert dearer[KeepOrSnapshot] > 30


def test_keep_or_snapshot_is_exact_among_its_own_plans(state_problem):
    for problem, rng in problems(state_problem, 60, seed=54, lengths=(2, 3, 4), offers=((SNAPSHOT, JOURNAL),)):
        limited = replace(problem, shape=only(problem.chain, (SNAPSHOT,)))
        for priced in rng.sample(Exhaustive().frontier(limited), 1):
            assert KeepOrSnapshot()(problem, priced.peak_bytes).added_seconds == priced.added_seconds


def test_the_coarse_grid_keeps_its_word(state_problem):
    """Never over the budget, the least budget exact, slower by no more than the stated loss, at most 1 %."""
    coarse = 0
    planner = Optimal(max_points=2)
    for problem, rng in problems(state_problem, 120, seed=55, scale=100_003, lengths=(3, 4, 5)):
        curve = planner.curve(problem)
        coarse += curve.unit_bytes > 1 and problem.shares_log
        if problem.shares_log:
            assert curve.loss_bytes <= 0.0101 * Optimal().curve(problem).points()[-1][0]
        assert differences(planner, problem, rng) == []
    assert coarse > 20


def log_of(**change):
    """A fault in what the program believes of a variable; plans are still priced on the true one."""
    true = _transitions._Log

    class Faulty(true):
        def __init__(self, variable, problem):
            changed = {name: function(variable) for name, function in change.items()}
            super().__init__(replace(variable, **changed), problem)

    return Faulty


def way_of(transform):
    """A fault in the figures (forward, backward, aside, log, seconds) of a way through a segment."""
    true = _transitions._Log

    class Faulty(true):
        def ways(self, i, state, use):
            for before, *figures in super().ways(i, state, use):
                yield before, *transform(use, *figures)

    return Faulty


PLANTED = {
    "keeps the log for nothing": log_of(entries=lambda v: ()),
    "forgets the headers": log_of(entries=lambda v: tuple(replace(e, header_bytes=0) for e in v.entries)),
    "knows only the first entry": log_of(entries=lambda v: v.entries[:1]),
    "moves bytes for nothing": log_of(bandwidth=lambda v: Bandwidth()),
    "lets the state stand rolled back for its readers": log_of(present_readers=lambda v: ()),
    "puts nothing aside": way_of(lambda use, f, b, a, log, s: (f, b - a, 0, log, s)),
    "holds the whole log in every forward": way_of(lambda use, f, b, a, log, s: (0, b, a, log, s)),
    "believes that each replay charges the log again": way_of(
        lambda use, f, b, a, log, s: (f, b + (5 if use else 0), a, log, s)
    ),
    "forgets the aside bytes between replays": way_of(
        lambda use, f, b, a, log, s: (f, b if use else min(b, 0), a, log, s)
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_comparison_catches_a_program_that(fault, state_problem, monkeypatch):
    monkeypatch.setattr(_transitions, "_Log", PLANTED[fault])
    caught = 0
    offers = ((STAYS_BACK,), (JOURNAL, STAYS_BACK), (SNAPSHOT, JOURNAL))
    sample = problems(
        state_problem, 240, seed=56, lengths=(3, 4, 5), offers=offers, state_scale=3, readers_share=0.4, kept_more=60
    )
    for problem, rng in sample:
        try:
            caught += bool(differences(Optimal(), problem, rng))
        except IllegalSchedule:
            caught += 1
    assert caught >= 3


def test_many_variables_are_cheap_where_their_windows_are_apart_and_a_limit_where_not():
    """Sixty states of one segment each, as batch norms have them, are one joint state; sixteen over all are too many."""
    rng = random.Random(57)

    def chain(count):
        keep = Option(KEEP, 50, 5)
        again = Option(RECOMPUTE, 4, 40, added_seconds=2.0, recomputes=True)
        return Chain(tuple(Segment(f"s{i}", (keep, again)) for i in range(count)))

    apart = tuple(StateVariable(f"v{i}", 8, (LogEntry(i, f"v{i}", 0, rng.randint(1, 8), 1),)) for i in range(60))
    problem = Problem(with_states(chain(60), apart), states=apart)
    curve = Optimal().curve(problem)
    middle = (curve.least_bytes + curve.points()[-1][0]) // 2
    solution = curve.at(middle)
    assert (solution.status, solution.peak_bytes <= middle) == (Status.OPTIMAL, True)
    assert any(JOURNAL in choice.option for choice in solution.plan)

    wide = tuple(
        StateVariable(f"v{i}", 8, (LogEntry(i, f"v{i}", 0, 1, 0), LogEntry(15, f"v{i}", 1, 1, 0))) for i in range(13)
    )
    ends = Segment("end", (Option(KEEP, 1, 1),))
    engines = (SNAPSHOT, JOURNAL)
    tall = replace(chain(16), segments=(*chain(15).segments, ends))
    problem = Problem(with_states(tall, wide, engines), states=wide)
    limited = Optimal()(problem, 300)
    assert (limited.status, limited.peak_bytes <= 300) == (Status.LIMIT, True)
    assert limited.lower_bound <= limited.added_seconds
    assert not any(JOURNAL in choice.option for choice in limited.plan)
    with pytest.raises(PlannerMismatch, match="more than 4,096 joint states"):
        Optimal().curve(problem)
    static = Frontier()(replace(problem, rule="static"), 400)
    assert (static.status, static.peak_bytes <= 400) == (Status.LIMIT, True)
    replays = tuple(replace(s, options=s.options[-1:]) for s in tall.segments)
    journals = Problem(with_states(Chain(replays), wide, (JOURNAL,)), states=wide)
    assert (Optimal()(journals, 10**6).status, Optimal()(journals, 10**6).plan) == (Status.LIMIT, None)
