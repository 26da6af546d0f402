"""``Optimal`` with spans on cases with known answers, its limits, and what it costs; ``Portfolio`` on long chains."""

import random
import time

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Choice, Status
from regrad.core.simulate import simulate
from regrad.planners import Exhaustive, Optimal, Portfolio

NESTED = Optimal(nested=True)


def segment(name="s", *, keep=10, again=4, boundary=1, seconds=1.0, **more):
    options = (
        Option(KEEP, keep, 2, forward_bytes=keep, holds_input=True),
        Option(RECOMPUTE, again, keep, forward_bytes=keep, holds_input=True, added_seconds=seconds, recomputes=True),
    )
    return Segment(name, options, boundary_bytes=boundary, forward_seconds=seconds, **more)


def odd_chain(count, seed, *, scale=1):
    """Two options each, nothing alike, sizes of up to ``scale`` times a dozen."""
    rng = random.Random(seed)

    def draw(low, high):
        return rng.randint(low * scale, high * scale)

    return Chain(
        tuple(
            segment(
                f"s{i}",
                keep=draw(8, 20),
                again=draw(4, 8),
                boundary=draw(1, 4),
                seconds=rng.randint(1, 9),
                gradient_bytes=draw(0, 2),
            )
            for i in range(count)
        )
    )


def test_the_ends_of_a_small_curve():
    problem = Problem(Chain((segment(gradient_bytes=1),) * 4))
    curve = NESTED.curve(problem)
    # all kept: 40 held and 2 more in the last backward
    assert curve.points()[-1] == (42, 0.0)
    assert curve.least_bytes == Exhaustive(nested=True)(problem, 0).least_bytes < Optimal()(problem, 0).least_bytes
    plan = curve.at(curve.least_bytes).plan
    assert any(choice.is_span for choice in plan)
    assert simulate(plan, problem.chain).peak_bytes == curve.least_bytes


def test_a_segment_that_can_only_be_kept_ends_spans():
    only = Segment("only", (Option(KEEP, 3, 1),), reason="it counts its calls")
    chain = Chain((segment(), segment(), only, segment(), segment()))
    for budget, _ in NESTED.curve(Problem(chain)).points():
        plan = NESTED(Problem(chain), budget).plan
        assert Choice(2, 3, KEEP) in plan
        assert all(choice.stop <= 2 or choice.start >= 2 for choice in plan)


def test_a_chain_of_one_segment_and_one_of_nothing_to_choose():
    assert NESTED(Problem(Chain((segment(),))), 100).added_seconds == 0
    fixed = Problem(Chain((Segment("a", (Option(KEEP, 5, 1, 7),)),), persistent_bytes=3, optimizer_bytes=20))
    solution = NESTED(fixed, 23)
    assert (solution.peak_bytes, solution.least_bytes, solution.status) == (23, 23, Status.OPTIMAL)
    assert NESTED(fixed, 22).status is Status.INFEASIBLE
    nothing = Problem(Chain((Segment("a", (Option(KEEP, 0, 0), Option(RECOMPUTE, 0, 0))),) * 3))
    assert NESTED(nothing, 0).plan is not None


def test_bytes_in_large_units_are_solved_exactly():
    """64 layers of a GiB each: a unit that divides every figure loses nothing."""
    gib = 1 << 30
    one = Segment(
        "layer",
        (Option(KEEP, gib, 0, holds_input=True), Option(RECOMPUTE, gib, 0, holds_input=True, added_seconds=1.0)),
        boundary_bytes=gib,
        forward_seconds=1.0,
        tail_seconds=0.0,
    )
    curve = NESTED.curve(Problem(Chain((one,) * 64, persistent_bytes=12_345)))
    assert (curve.loss_bytes, curve.unit_bytes) == (0, gib)
    assert curve.at(8 * gib + 12_345).added_seconds == 84
    assert curve.at(8 * gib + 12_344).added_seconds > 84


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundary": -1}, "segment 's' holds less than nothing: -1 bytes"),
        ({"keep": 1 << 58}, r"need .* bytes; 2\*\*58 is the limit"),
        ({"seconds": float("inf")}, "segment 's' has times that cannot be added up"),
        ({"tail_seconds": -1.0}, "segment 's' has times that cannot be added up"),
    ],
)
def test_figures_that_cannot_be_added_up_are_refused(change, message):
    with pytest.raises(PlannerMismatch, match=message):
        NESTED(Problem(Chain((segment(**change),))), 100)


def test_beyond_its_limits_it_says_so_and_gives_the_best_plan_of_one_level():
    small = Optimal(nested=True, most_work=3 * 10**6)
    problem = Problem(odd_chain(30, 1))
    flat = Optimal()(problem, 200)
    limited = small(problem, 200)
    assert (limited.status, limited.plan) == (Status.LIMIT, flat.plan)
    assert limited.lower_bound <= NESTED(problem, 200).added_seconds <= limited.added_seconds
    assert limited.planner == "Optimal(nested=True, most_work=3000000)"
    assert (small(problem, 1).status, small(problem, 1).plan) == (Status.LIMIT, None)
    with pytest.raises(PlannerMismatch, match="30 segments make 4,960 different beginnings of plans, more than 750"):
        small.curve(problem)
    with pytest.raises(PlannerMismatch, match="1,001 segments are more than 1,000"):
        NESTED.curve(Problem(Chain((segment(),) * 1001)))
    # where segments are alike the same limit is far away
    assert small(Problem(Chain((segment(),) * 30)), 200).status is Status.OPTIMAL


def test_where_the_whole_curve_is_too_much_each_budget_gets_a_grid_of_its_own():
    """Never over the budget, within 1 % of the best, never slower for more memory, across all the grids that answer."""
    chain = odd_chain(24, 1, scale=10**6 + 3)
    problem, short = Problem(chain), Optimal(nested=True, most_work=3 * 10**7)
    with pytest.raises(PlannerMismatch, match=r"a unit of .* bytes takes .* cells"):
        short.curve(problem)
    whole = Optimal(nested=True, most_work=10**12).curve(problem)
    flat, before = Optimal().curve(problem), float("inf")
    top, statuses = flat.points()[-1][0], set()
    for budget in range(whole.least_bytes, top + 10**7, (top - whole.least_bytes) // 40):
        solution, best, single = short(problem, budget), whole.at(budget), flat.at(budget)
        assert simulate(solution.plan, chain).peak_bytes == solution.peak_bytes <= budget
        assert solution.least_bytes == whole.least_bytes
        assert solution.lower_bound <= best.added_seconds <= solution.added_seconds
        assert solution.added_seconds <= before
        assert single.plan is None or solution.added_seconds <= single.added_seconds
        poorer = whole.at(budget - budget // 100)
        assert poorer.plan is None or solution.added_seconds <= poorer.added_seconds
        statuses.add(solution.status)
        before = solution.added_seconds
    assert statuses == {Status.FEASIBLE, Status.OPTIMAL}
    assert short(problem, whole.least_bytes - 1).status is Status.INFEASIBLE


def test_where_not_even_that_can_be_had_it_says_limit_and_stays_monotone():
    chain = odd_chain(24, 1, scale=10**6 + 3)
    problem, short = Problem(chain), Optimal(nested=True, most_work=12 * 10**6)
    flat, before, statuses = Optimal().curve(problem), float("inf"), []
    exact = Optimal(nested=True, most_work=10**12).curve(problem)
    top = flat.points()[-1][0]
    for budget in range(exact.least_bytes, top + 1, (top - exact.least_bytes) // 40):
        solution = short(problem, budget)
        statuses.append(solution.status)
        if solution.plan is None:
            assert flat.at(budget).plan is None
            continue
        assert simulate(solution.plan, chain).peak_bytes == solution.peak_bytes <= budget
        assert solution.lower_bound <= exact.at(budget).added_seconds <= solution.added_seconds <= before
        before = solution.added_seconds
    assert statuses.count(Status.LIMIT) > 5


def test_spans_that_nest_a_thousand_deep_are_walked():
    unit = Segment(
        "unit",
        (Option(KEEP, 1, 0, holds_input=True), Option(RECOMPUTE, 1, 0)),
        boundary_bytes=1,
        forward_seconds=1.0,
        tail_seconds=0.0,
    )
    for count, planner in ((1000, NESTED), (400, Portfolio(spans=True))):
        solution = planner(Problem(Chain((unit,) * count)), 2)
        assert (solution.peak_bytes, solution.added_seconds) == (2, count * (count - 1) / 2 - (count - 1))


def test_ninety_six_segments_two_options_eight_hundred_levels_within_two_seconds():
    problem = Problem(odd_chain(96, 2))
    began = time.process_time()
    curve = NESTED.curve(problem)
    seconds = time.process_time() - began
    least, most = curve.points()[0][0], curve.points()[-1][0]
    assert (curve.unit_bytes, curve.loss_bytes) == (1, 0)
    assert most - least >= 800
    assert seconds < 2, f"{seconds:.2f} s of processor time"
    for budget in (least, (least + most) // 2, most):
        solution = curve.at(budget)
        assert simulate(solution.plan, problem.chain).peak_bytes == solution.peak_bytes <= budget


def test_portfolio_on_four_hundred_segments_takes_a_fraction_of_a_second():
    problem = Problem(odd_chain(400, 3, scale=10_007))
    least = Portfolio()(problem, 0).least_bytes
    for planner, most_seconds in ((Portfolio(), 0.5), (Portfolio(spans=True), 2)):
        began = time.process_time()
        solution = planner(problem, 2 * least)
        assert solution.plan is not None
        assert time.process_time() - began < most_seconds
