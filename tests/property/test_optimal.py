"""``Optimal`` against ``Exhaustive``, exactly, and the same comparison against planners that are wrong on purpose."""

import random
from dataclasses import replace
from math import inf

import pytest

from regrad.core.chain import Chain, Problem
from regrad.core.plan import Status
from regrad.core.simulate import simulate
from regrad.planners import Exhaustive, Optimal, _flat, _grid, _items, _staircase

CHAINS = 2_000
# segments of a chain: all of 4 … 10, the longer the rarer, because the oracle walks every plan
LENGTHS = (4,) * 60 + (5,) * 20 + (6,) * 10 + (7,) * 5 + (8,) * 3 + (9,) + (10,)
# exact staircases; the grid with its unit of one byte, which these small chains get
EXACT = (Optimal(), Optimal(max_points=0))
COARSE = Optimal(max_points=0, max_work=1)


def chains(random_chain, count, *, seed, scale=1):
    rng = random.Random(seed)
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        yield random_chain(rng, length, most_options=3 if length <= 6 else 2, scale=scale), rng


def budgets(prices, rng):
    """Below the least, at it, at what keeping all needs and above, and at, under and between peaks of plans."""
    peaks = sorted({priced.peak_bytes for priced in prices})
    some = [peak + rng.choice([-1, 0, 0, 1]) for peak in rng.sample(peaks, min(3, len(peaks)))]
    return [max(peaks[0] - 1, 0), peaks[0], peaks[-1], peaks[-1] + 1000, *some]


def differences(planner: Optimal, chain: Chain, rng: random.Random) -> list[str]:
    """Where ``planner`` and the oracle disagree on ``chain``, in words; empty if nowhere."""
    problem, oracle = Problem(chain), Exhaustive()
    prices = oracle.prices(problem)
    curve = planner.curve(problem)
    found = []
    for budget in budgets(prices, rng):
        ours, best = curve.at(budget), oracle.choose(prices, budget)
        if ours.least_bytes != best.least_bytes:
            found.append(f"least {ours.least_bytes} instead of {best.least_bytes}")
        if (ours.plan is None) != (best.plan is None):
            found.append(f"at {budget}: {ours.status} instead of {best.status}")
        elif ours.plan is not None:
            walked = simulate(ours.plan, chain)
            if walked.peak_bytes != ours.peak_bytes or walked.added_seconds != ours.added_seconds:
                found.append(f"at {budget}: says {ours.peak_bytes}, {ours.added_seconds}, walks as {walked}")
            if walked.peak_bytes > budget:
                found.append(f"at {budget}: peaks at {walked.peak_bytes}")
            loss = curve.loss_bytes
            poorer = oracle.choose(prices, budget - loss)  # no plan if the budget is within the loss of the least
            worst = inf if poorer.plan is None else poorer.added_seconds
            if not best.added_seconds <= walked.added_seconds <= worst:
                found.append(f"at {budget}: {walked.added_seconds} s, best {best.added_seconds}, loss {loss}")
            if ours.lower_bound > best.added_seconds:
                found.append(f"at {budget}: bound {ours.lower_bound} above {best.added_seconds}")
            if not loss and (ours.status, ours.peak_bytes) != (Status.OPTIMAL, best.peak_bytes):
                found.append(f"at {budget}: {ours.status}, peak {ours.peak_bytes} instead of {best.peak_bytes}")
    return found


def test_optimal_equals_exhaustive_on_two_thousand_chains(random_chain):
    lengths, infeasible = set(), 0
    for index, (chain, rng) in enumerate(chains(random_chain, CHAINS, seed=1)):
        assert differences(EXACT[index % 2], chain, rng) == [], f"chain {index}: {chain}"
        lengths.add(len(chain))
        infeasible += Optimal()(Problem(chain), 0).plan is None
    assert lengths == set(range(4, 11))
    assert infeasible > CHAINS * 0.99


def test_the_coarse_grid_keeps_its_word(random_chain):
    """Never over the budget, the least budget exact, slower by no more than the stated loss, which is at most 1 %."""
    gaps = coarse = 0
    for index, (chain, rng) in enumerate(chains(random_chain, 300, seed=2, scale=100_003)):
        curve = COARSE.curve(Problem(chain))
        coarse += curve.unit_bytes > 1
        assert curve.unit_bytes <= curve.points()[-1][0] / (100 * len(chain))
        assert curve.loss_bytes <= 0.0101 * curve.points()[-1][0]
        assert differences(COARSE, chain, rng) == [], f"chain {index}: {chain}"
        exact = dict(Optimal().curve(Problem(chain)).points())
        gaps += any(exact.get(budget) != seconds for budget, seconds in curve.points())
    assert coarse > 290  # where one plan is all there is, the grid has nothing to put on it
    assert gaps > 200, "a grid that coarse must lose something, or this test looked at an exact curve"


def changed(transform):
    """The solver's items made from a chain that ``transform`` changed; plans are still priced on the true one."""
    true_items = _items.items_of
    return lambda chain: true_items(replace(chain, segments=transform(chain.segments)))


def options(segment, **change):
    """``segment`` with a field of its options changed by a function of the option."""
    return replace(
        segment,
        options=tuple(replace(o, **{name: function(o) for name, function in change.items()}) for o in segment.options),
    )


def without_earlier_transients(segments):
    return (*(options(s, transient_bytes=lambda o: 0) for s in segments[:-1]), segments[-1])


PLANTED = {
    "ignores the transient bytes of all segments but the last": without_earlier_transients,
    "ignores gradients": lambda segments: tuple(replace(s, gradient_bytes=0) for s in segments),
    "ignores the forward's own peak": lambda s: tuple(options(x, forward_bytes=lambda o: 0) for x in s),
    "frees a segment before its backward": lambda s: tuple(
        options(x, transient_bytes=lambda o: o.transient_bytes - o.retained_bytes) for x in s
    ),
    "charges retained bytes twice": lambda s: tuple(
        options(x, retained_bytes=lambda o: 2 * o.retained_bytes) for x in s
    ),
    "forgets what recomputing costs": lambda s: tuple(options(x, added_seconds=lambda o: 0.0) for x in s),
    "knows two options at most": lambda s: tuple(replace(x, options=x.options[:2]) for x in s),
}


@pytest.mark.parametrize("planner", EXACT, ids=["staircase", "grid"])
@pytest.mark.parametrize("fault", PLANTED)
def test_the_comparison_catches_a_planner_that(fault, planner, random_chain, monkeypatch):
    monkeypatch.setattr(_flat, "items_of", changed(PLANTED[fault]))
    caught = sum(bool(differences(planner, chain, rng)) for chain, rng in chains(random_chain, 60, seed=3))
    assert caught >= 6


def test_the_comparison_catches_a_grid_that_rounds_down(random_chain, monkeypatch):
    def rounded_down(items, unit):
        floored = [tuple((it.extra // unit, it.need // unit, it.seconds) for it in s) for s in items.segments]
        least, enough = [_items.LOWEST], [_items.LOWEST]
        for segment in reversed(floored):
            quickest = min(seconds for *_, seconds in segment)
            least.append(min(max(least[-1] + e, need) for e, need, _ in segment))
            enough.append(min(max(enough[-1] + e, need) for e, need, s in segment if s <= quickest))
        return _grid._Cells(tuple(floored), tuple(reversed(least)), tuple(reversed(enough)))

    monkeypatch.setattr(_grid, "_scale", rounded_down)
    sample = chains(random_chain, 60, seed=4, scale=100_003)
    found = [difference for chain, rng in sample for difference in differences(COARSE, chain, rng)]
    assert any("peaks at" in difference for difference in found)


def test_the_comparison_catches_a_staircase_that_drops_a_point(random_chain, monkeypatch):
    true_staircase = _flat.staircase

    def lossy(items, most_slack, max_points):
        solved = true_staircase(items, most_slack, max_points)
        return replace(solved, slack=solved.slack[1:], seconds=solved.seconds[1:])

    monkeypatch.setattr(_flat, "staircase", lossy)
    caught = sum(bool(differences(Optimal(), chain, rng)) for chain, rng in chains(random_chain, 30, seed=5))
    assert caught > 10


def test_both_solvers_give_the_same_curve_on_long_chains(random_chain):
    """The grid keeps one row in about √n, so plans are read back across rows that are made again."""
    rng = random.Random(6)
    for count in (15, 16, 17, 35, 36, 71, 120):
        problem = Problem(random_chain(rng, count, most_options=4))
        exact, gridded = (planner.curve(problem) for planner in EXACT)
        assert gridded.unit_bytes == 1
        assert exact.points() == gridded.points()
        assert len(exact.points()) > 5
        steps = _staircase.staircase(_items.items_of(problem.chain), None, 10**6)
        assert all(steps.slack[1:] > steps.slack[:-1])
        assert all(steps.seconds[1:] < steps.seconds[:-1])
        for budget, seconds in exact.points()[:: max(1, len(exact.points()) // 12)]:
            for curve in (exact, gridded):
                solution = curve.at(budget)
                assert (solution.peak_bytes, solution.added_seconds) == (budget, seconds)
                assert simulate(solution.plan, problem.chain).peak_bytes == budget


def test_a_curve_up_to_a_limit_is_the_whole_curve_cut_there(random_chain):
    rng = random.Random(7)
    for index in range(60):
        problem = Problem(random_chain(rng, 12))
        planner = EXACT[index % 2]
        whole = planner.curve(problem)
        top = whole.points()[-1][0]
        for limit in (0, whole.least_bytes - 1, whole.least_bytes, (whole.least_bytes + top) // 2, top, top + 5):
            cut = planner.curve(problem, limit_bytes=limit)
            assert cut.points() == tuple(point for point in whole.points() if point[0] <= limit)
            assert cut.least_bytes == whole.least_bytes
            for budget in (limit - 1, limit):
                ours, true = cut.at(budget), whole.at(budget)
                assert (ours.plan is None, ours.added_seconds) == (true.plan is None, true.added_seconds)
            beyond = cut.at(top + 100)
            assert beyond.lower_bound <= whole.at(top + 100).added_seconds


def test_single_budgets_lose_about_a_hundredth_of_themselves_and_larger_ones_are_never_slower(random_chain):
    """Grids that end near the budget answer where the whole curve's would lose more; across them seconds never rise."""
    rng = random.Random(8)
    finer = 0
    for _ in range(6):
        chain = random_chain(rng, 30, most_options=4, scale=10_007)
        # what is kept is large beside what else there is, so that the least budget is far below the fastest plan's
        heavy = (
            options(s, retained_bytes=lambda o: o.retained_bytes * (9 if o.name == "keep" else 1))
            for s in chain.segments
        )
        problem = Problem(replace(chain, segments=tuple(s for s in heavy if len(s.options) > 1)))
        exact, whole = Optimal().curve(problem), COARSE.curve(problem)
        top, before = whole.points()[-1][0], inf
        for budget in range(whole.least_bytes, top + top // 10, max((top - whole.least_bytes) // 120, 1)):
            solution, best = COARSE(problem, budget), exact.at(budget)
            assert simulate(solution.plan, problem.chain).peak_bytes == solution.peak_bytes <= budget
            assert solution.lower_bound <= best.added_seconds <= solution.added_seconds <= before
            assert solution.status is not Status.OPTIMAL or solution.added_seconds == best.added_seconds
            poorer = exact.at(budget - budget * 12 // 1000 - 15)
            assert poorer.plan is None or solution.added_seconds <= poorer.added_seconds
            finer += solution.added_seconds < whole.at(budget).added_seconds
            before = solution.added_seconds
    assert finer > 20
