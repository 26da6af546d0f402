"""Each planner on small cases with known answers, and what each refuses."""

from dataclasses import FrozenInstanceError

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.errors import InfeasibleBudget, InvalidQuantity, PlannerMismatch
from regrad.core.plan import Status, leaves
from regrad.core.simulate import simulate
from regrad.planners import (
    Binomial,
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
    Uniform,
    closed_form_peak,
    require,
)
from regrad.planners.exhaustive import all_nested, count_plans

CONTROLS = (StateAgnostic(), KeepOrSnapshot())
FLAT = (KeepAll(), RecomputeAll(), FirstK(), EveryK(), Optimal(), Exhaustive(), Portfolio(), *CONTROLS)
SPANNING = (Uniform(2), Uniform(), SqrtN(), Binomial(2), Binomial(), Optimal(nested=True), Portfolio(spans=True))
PLANNERS = (*FLAT, *SPANNING)
ROOMY = 10**9


def block(name, *, only_keep=False):
    """10 bytes kept or 1 and 9 more in its backward, one second."""
    keep = Option(KEEP, 10, 0, holds_input=True)
    again = Option(RECOMPUTE, 1, 9, holds_input=True, added_seconds=1.0, recomputes=True)
    more = {"boundary_bytes": 1, "forward_seconds": 1.0}
    return Segment(name, (keep,) if only_keep else (keep, again), **more)


def chain(count, only_keep=()):
    return Chain(tuple(block(f"h.{i}", only_keep=i in only_keep) for i in range(count)), persistent_bytes=5)


def options(solution):
    return "".join(leaf.option[0] for leaf in leaves(solution.plan))


@pytest.mark.parametrize(
    ("planner", "budget", "plan", "peak", "seconds"),
    [
        (KeepAll(), ROOMY, "kkkkkk", 65, 0),
        (RecomputeAll(), ROOMY, "rrkrrr", 29, 5),
        (FirstK(2), ROOMY, "rrkkkk", 47, 2),
        (FirstK(0), ROOMY, "kkkkkk", 65, 0),
        (FirstK(), ROOMY, "kkkkkk", 65, 0),
        (FirstK(), 46, "rrkrkk", 38, 3),
        (EveryK(1), ROOMY, "rrkrrr", 29, 5),
        (EveryK(2), ROOMY, "rkkrkr", 47, 3),
        (EveryK(), 64, "rkkkkk", 56, 1),
        (Optimal(), 38, "rrkrkk", 38, 3),
        (Optimal(), 46, "rrkrkk", 38, 3),
        (Portfolio(), 64, "rkkkkk", 56, 1),
    ],
)
def test_one_level_plans(planner, budget, plan, peak, seconds):
    solution = planner(Problem(chain(6, only_keep={2})), budget)
    assert (options(solution), solution.peak_bytes, solution.added_seconds) == (plan, peak, seconds)
    assert solution.planner == ("Optimal" if isinstance(planner, Portfolio) else planner.label)


def test_uniform_takes_the_fastest_number_of_spans_that_fits():
    problem = Problem(chain(12, only_keep={5}))
    every = [Uniform(k)(problem, ROOMY) for k in range(1, 12)]
    for budget in (40, 50, 60, 80, ROOMY):
        fits = [s for s in every if s.peak_bytes <= budget]
        best = min(fits, key=lambda s: (s.added_seconds, s.peak_bytes), default=None)
        found = Uniform()(problem, budget)
        assert found.plan == (best and best.plan)
        assert found.least_bytes == min(s.peak_bytes for s in every)
    nothing = Uniform()(Problem(chain(2, only_keep={0, 1})), ROOMY)
    assert [choice.is_span for choice in nothing.plan] == [False, False]


def test_uniform_spans_stay_within_runs_of_what_can_be_recomputed():
    solution = Uniform(2)(Problem(chain(7, only_keep={3})), ROOMY)
    # six can be recomputed: parts 0 1 2 and 4 5 6, with the kept one between them
    assert [(c.start, c.stop, c.is_span) for c in solution.plan] == [(0, 3, True), (3, 4, False), (4, 7, True)]
    assert options(solution) == "kkkkkkk"
    solution = Uniform(2)(Problem(chain(7, only_keep={1})), ROOMY)
    # parts 0 2 3 and 4 5 6: the first one is cut by the kept one
    spans = [(c.start, c.stop) for c in solution.plan if c.is_span]
    assert spans == [(0, 1), (2, 4), (4, 7)]


def test_sqrt_n_takes_about_root_n_spans_and_beats_one_span_and_single_segments():
    keep, again = Option(KEEP, 1, 0, holds_input=True), Option(RECOMPUTE, 1, 0, holds_input=True)
    unit = Segment("unit", (keep, again), boundary_bytes=1, forward_seconds=1.0)
    problem = Problem(Chain((unit,) * 64))
    solution = SqrtN()(problem, ROOMY)
    assert [c.stop - c.start for c in solution.plan] == [8] * 8
    assert solution.added_seconds == 64
    # one unit less than the closed form: the boundary that a span shares with its first segment counts once
    assert solution.peak_bytes == closed_form_peak(64, 8) - 1
    assert Uniform(1)(problem, ROOMY).peak_bytes == Uniform(64)(problem, ROOMY).peak_bytes == 64
    assert not SqrtN()(Problem(chain(2, only_keep={0, 1})), ROOMY).plan[0].is_span


def test_chens_closed_form():
    assert closed_form_peak(64, 8) == 16
    assert closed_form_peak(64, 64) == 65
    assert closed_form_peak(10_000, 100) == 200
    assert min(closed_form_peak(10_000, s) for s in range(1, 10_001)) == 200
    for n, s in ((4, 5), (4, 0), (0, 0)):
        with pytest.raises(PlannerMismatch, match=f"{s} spans over {n} segments"):
            closed_form_peak(n, s)


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.label)
def test_a_budget_that_cannot_be_met_is_infeasible_and_the_least_one_is_not(planner):
    problem = Problem(chain(4))
    none = planner(problem, 5)
    assert (none.status, none.plan, none.peak_bytes) == (Status.INFEASIBLE, None, 0)
    least = planner(problem, none.least_bytes)
    assert least.plan is not None
    assert least.peak_bytes == none.least_bytes == least.least_bytes
    assert planner(problem, none.least_bytes - 1).plan is None


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.label)
def test_planners_are_values_and_refuse_what_they_cannot_take(planner):
    problem = Problem(chain(4))
    assert planner == type(planner)(**{name: getattr(planner, name) for name in planner.__dataclass_fields__})
    with pytest.raises(FrozenInstanceError):
        planner.extra = 1
    with pytest.raises(PlannerMismatch, match="not 'hopeful'"):
        planner(Problem(problem.chain, rule="hopeful"), ROOMY)
    with pytest.raises(InvalidQuantity, match="negative"):
        planner(problem, -1)
    assert set(planner.rules) <= {"timeline", "static"}


def test_the_flags_say_what_the_plans_hold():
    assert [p for p in PLANNERS if p.nested] == list(SPANNING)
    assert {type(p) for p in PLANNERS if p.options} == {Optimal, Exhaustive, Portfolio, StateAgnostic, KeepOrSnapshot}
    assert {type(p) for p in PLANNERS if p.rules == ("timeline",)} == {Optimal}
    assert (Frontier().rules, Frontier().options, Frontier().nested) == (("static",), True, False)
    assert Exhaustive(nested=True).nested
    assert SPANNING[-2].label == "Optimal(nested=True)"


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (FirstK(7), "FirstK.k=7.: this chain has 6 segments"),
        (FirstK(-1), "FirstK.k=-1."),
        (EveryK(0), "EveryK.k=0.: k must be 1 or more"),
        (Uniform(0), "Uniform.k=0.: this chain has 6"),
        (Uniform(7), "Uniform.k=7.: this chain has 6"),
        (Binomial(0), "Binomial.slots=0.: 6 segments take one slot"),
        (Exhaustive(nested=True), "takes 100,000 plans, this chain has 1,613,824"),
        (Exhaustive(max_plans=63), "takes 63 plans, this chain has 64"),
    ],
)
def test_settings_that_do_not_suit_the_chain_are_refused_with_the_numbers(planner, message):
    with pytest.raises(PlannerMismatch, match=message):
        planner(Problem(chain(6)), ROOMY)


def test_exhaustive_refuses_long_chains_and_optimal_the_static_rule():
    with pytest.raises(PlannerMismatch, match="takes 6 segments in nested plans, this chain has 7"):
        Exhaustive(nested=True, max_plans=10**9)(Problem(chain(7)), ROOMY)
    with pytest.raises(PlannerMismatch, match="takes 10 segments in one-level plans, this chain has 11"):
        Exhaustive()(Problem(chain(11)), ROOMY)
    with pytest.raises(PlannerMismatch, match="Optimal plans under the rule timeline, not 'static'"):
        Optimal()(Problem(chain(3), rule="static"), ROOMY)


def test_optimal_refuses_seconds_and_bytes_that_it_cannot_add_up():
    for option, message in (
        (Option(KEEP, 1, 1, added_seconds=float("nan")), "takes nan seconds"),
        (Option(KEEP, 1 << 60, 1), "2..59 is the limit"),
    ):
        with pytest.raises(PlannerMismatch, match=message):
            Optimal()(Problem(Chain((Segment("a", (option,)),))), ROOMY)


def test_exhaustive_counts_and_makes_every_plan_once():
    # two options a segment: 4 plans for one segment, and T(n) = 2 Σ_{k<n} I(k) T(n-k)
    for count, plans in ((1, 4), (2, 32), (3, 384), (4, 5632)):
        made = list(all_nested(chain(count)))
        assert len(made) == len(set(made)) == plans == count_plans(chain(count), nested=True)
    assert count_plans(chain(3, only_keep={1}), nested=False) == 4
    for count in range(1, 7):
        assert count_plans(chain(count), nested=True) == (2, 8, 48, 352, 2_880, 25_216)[count - 1] * 2**count
    # a kept segment: nothing spans it
    made = list(all_nested(chain(3, only_keep={1})))
    assert len(made) == count_plans(chain(3, only_keep={1}), nested=True) == 16
    with pytest.raises(PlannerMismatch, match="takes 5,000 plans, this chain has 5,632"):
        Exhaustive(nested=True, max_plans=5_000)(Problem(chain(4)), ROOMY)


def test_exhaustives_frontier_answers_as_all_its_prices_do():
    for rule in ("timeline", "static"):
        problem, oracle = Problem(chain(4, only_keep={2}), rule), Exhaustive(nested=True)
        prices, frontier = oracle.prices(problem), oracle.frontier(problem)
        assert len(frontier) < len(prices) / 10
        for budget in range(60):
            assert oracle.choose(frontier, budget) == oracle.choose(prices, budget) == oracle(problem, budget)


def test_require_raises_with_the_least_budget_its_plan_and_what_holds_it():
    problem = Problem(chain(4))
    assert require(Portfolio(), problem, ROOMY).added_seconds == 0
    with pytest.raises(InfeasibleBudget) as caught:
        require(Portfolio(), problem, 7)
    error = caught.value
    assert (error.budget_bytes, error.least_bytes) == (7, Optimal().curve(problem).least_bytes)
    assert simulate(error.plan, problem.chain).peak_bytes == error.least_bytes
    assert error.holder == "the backward of segment 'h.3', by the timeline rule"


def test_portfolio_offers_distinct_plans_that_fit_the_best_first():
    problem = Problem(chain(6))
    candidates = Portfolio().candidates(problem, 46)
    assert len({c.plan for c in candidates}) == len(candidates) >= 2
    assert [c.added_seconds for c in candidates] == sorted(c.added_seconds for c in candidates)
    assert all(c.peak_bytes <= 46 for c in candidates)
    assert not any(choice.is_span for c in candidates for choice in c.plan)
    assert candidates[0].plan == Portfolio()(problem, 46).plan
    assert Portfolio().candidates(problem, 1) == ()
    spanning = Portfolio(spans=True).candidates(problem, 46)
    assert any(choice.is_span for c in spanning for choice in c.plan)
    assert {"Optimal(nested=True)", "Binomial", "Uniform", "SqrtN"} & {c.planner for c in spanning}
    assert Portfolio(spans=True)(Problem(chain(64)), 70).status is Status.OPTIMAL
    assert Portfolio()(Problem(chain(64)), 70).plan is None


def test_portfolio_takes_the_static_rule_with_what_its_members_can():
    problem = Problem(chain(6), rule="static")
    solution = Portfolio()(problem, 50)
    assert solution.plan is not None
    assert simulate(solution.plan, problem.chain, "static").peak_bytes == solution.peak_bytes <= 50
    assert solution.added_seconds >= Exhaustive()(problem, 50).added_seconds
