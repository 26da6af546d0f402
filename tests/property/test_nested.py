"""``Optimal`` with spans against every nested plan, exactly, and the same comparison against faults put in on purpose."""

import random
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from regrad.core.chain import RECOMPUTE, Chain, Problem
from regrad.core.plan import Status, leaves
from regrad.core.schedule import schedule_of
from regrad.core.simulate import walk
from regrad.planners import Exhaustive, Optimal, Portfolio, _extent, _figures, _nested, optimal

CHAINS = 2_000
# segments of a chain: the longer the rarer, because the oracle walks every plan (5,632 for four of two options)
LENGTHS = (1,) * 5 + (2,) * 67 + (3,) * 26 + (4,) * 2
EXACT = Optimal(nested=True)
FINE = Optimal(nested=True, max_work=10**6)
COARSE = Optimal(nested=True, max_work=1)


def chains(span_chain, count, *, seed, scale=1, lengths=LENGTHS):
    rng = random.Random(seed)
    for index in range(count):
        length = lengths[index % len(lengths)]
        most = 3 if length <= 2 or (length == 3 and index % 5 == 0) else 2
        yield span_chain(rng, length, most_options=most, scale=scale, kept_share=0.06), rng


def budgets(frontier, rng):
    """Below the least, at it, at what the fastest plan needs and above, and at, under and between peaks of plans."""
    peaks = sorted(priced.peak_bytes for priced in frontier)
    some = [peak + rng.choice([-1, 0, 0, 1]) for peak in rng.sample(peaks, min(4, len(peaks)))]
    return [max(peaks[0] - 1, 0), peaks[0], peaks[-1], peaks[-1] + 1000, *some]


def differences(planner: Optimal, chain: Chain, rng: random.Random) -> list[str]:
    """Where ``planner`` and the oracle disagree on ``chain``, in words; empty if nowhere."""
    problem, oracle = Problem(chain), Exhaustive(nested=True, max_plans=30_000)
    frontier = oracle.frontier(problem)
    curve = planner.curve(problem)
    found = []
    for budget in budgets(frontier, rng):
        ours, best = curve.at(budget), oracle.choose(frontier, budget)
        if ours.least_bytes != best.least_bytes:
            found.append(f"least {ours.least_bytes} instead of {best.least_bytes}")
        if (ours.plan is None) != (best.plan is None):
            found.append(f"at {budget}: {ours.status} instead of {best.status}")
        elif ours.plan is not None:
            walked = walk(schedule_of(ours.plan, chain), chain)
            if walked.peak_bytes != ours.peak_bytes or walked.added_seconds != ours.added_seconds:
                found.append(f"at {budget}: says {ours.peak_bytes}, {ours.added_seconds}, walks as {walked}")
            if walked.peak_bytes > budget:
                found.append(f"at {budget}: peaks at {walked.peak_bytes}")
            loss = curve.loss_bytes
            poorer = oracle.choose(frontier, budget - loss)  # no plan if the budget is within the loss of the least
            worst = inf if poorer.plan is None else poorer.added_seconds
            if not best.added_seconds <= walked.added_seconds <= worst:
                found.append(f"at {budget}: {walked.added_seconds} s, best {best.added_seconds}, loss {loss}")
            if ours.lower_bound > best.added_seconds:
                found.append(f"at {budget}: bound {ours.lower_bound} above {best.added_seconds}")
            if not loss and (ours.status, ours.peak_bytes) != (Status.OPTIMAL, best.peak_bytes):
                found.append(f"at {budget}: {ours.status}, peak {ours.peak_bytes} instead of {best.peak_bytes}")
    return found


def depth(choices) -> int:
    return max((1 + depth(choice.inner) for choice in choices if choice.is_span), default=0)


@pytest.mark.slow
def test_nested_equals_exhaustive_on_two_thousand_chains(span_chain):
    lengths, infeasible, depths = set(), 0, []
    for index, (chain, rng) in enumerate(chains(span_chain, CHAINS, seed=21)):
        assert differences(EXACT, chain, rng) == [], f"chain {index}: {chain}"
        curve = EXACT.curve(Problem(chain))
        infeasible += curve.at(curve.least_bytes - 1).plan is None
        depths.append(depth(curve.at(curve.least_bytes).plan))
        lengths.add(len(chain))
    assert lengths == {1, 2, 3, 4}
    assert infeasible == CHAINS
    # the least peak is really one of spans in spans often enough
    assert sum(d >= 1 for d in depths) > 800
    assert sum(d >= 2 for d in depths) > 40


@pytest.mark.slow
@pytest.mark.parametrize("index", range(10))
def test_nested_equals_exhaustive_on_ten_chains_of_up_to_six_segments(span_chain, index):
    """At most 30,000 plans each: five or six segments of one option, or of more where one can only be kept."""
    rng = random.Random(100 + index)
    count = 5 + index % 2
    chain = span_chain(rng, count, most_options=2)
    single = range(count) if index < 2 else rng.sample(range(count), count - 3)
    kept = rng.choice(range(1, count - 1)) if index >= 2 and count == 6 else None
    segments = [
        replace(s, options=s.options[:1] if i == kept else s.options[1:] if i in single else s.options)
        for i, s in enumerate(chain.segments)
    ]
    assert all(segment.can(RECOMPUTE) for i, segment in enumerate(segments) if i != kept)
    assert differences(EXACT, replace(chain, segments=tuple(segments)), rng) == []


def test_the_coarse_grid_keeps_its_word(span_chain):
    """Never over the budget, the least budget exact, slower by no more than the stated loss, at most 1 % of it."""
    gaps = coarse = 0
    lengths = (2,) * 14 + (3,) * 5 + (4,)
    for index, (chain, rng) in enumerate(chains(span_chain, 160, seed=22, scale=100_003, lengths=lengths)):
        curve = COARSE.curve(Problem(chain))
        coarse += curve.unit_bytes > 1
        assert curve.unit_bytes <= curve.least_bytes / (100 * len(chain))
        assert curve.loss_bytes <= 0.01 * curve.least_bytes
        assert differences(COARSE, chain, rng) == [], f"chain {index}: {chain}"
        fine = dict(FINE.curve(Problem(chain)).points())
        gaps += any(fine.get(budget) != seconds for budget, seconds in curve.points())
    assert coarse > 150
    assert gaps > 100, "a grid that coarse must lose something, or this test looked at exact curves"


def segments(transform):
    """A fault in what the solver believes of each segment; plans are still priced on the true chain."""
    true_figures = _figures.figures_of
    return lambda chain: true_figures(replace(chain, segments=tuple(transform(s) for s in chain.segments)))


def each_option(segment, **change):
    return replace(segment, options=tuple(replace(o, **{k: f(o) for k, f in change.items()}) for o in segment.options))


def parts(transform):
    """A fault in the figures themselves."""
    true_figures = _figures.figures_of

    def faulty(chain):
        figures = true_figures(chain)
        return replace(figures, parts=tuple(transform(part) for part in figures.parts))

    return faulty


def short_spans(chain):
    figures = _figures.figures_of(chain)
    return replace(figures, reach=tuple(min(reach, i + 1) for i, reach in enumerate(figures.reach)))


PLANTED = {
    "ignores what a replay holds while nothing is kept": segments(lambda s: replace(s, replay_bytes=0)),
    "runs the tail of a span in full": segments(lambda s: replace(s, tail_seconds=None)),
    "skips the last segment of a span": segments(lambda s: replace(s, tail_seconds=0.0)),
    "ignores gradients": segments(lambda s: replace(s, gradient_bytes=0)),
    "ignores what backwards need": segments(lambda s: each_option(s, transient_bytes=lambda o: 0)),
    "ignores the forward's own peak": segments(lambda s: each_option(s, forward_bytes=lambda o: 0)),
    "holds no boundary": segments(lambda s: replace(s, boundary_bytes=0)),
    "counts the shared boundary twice": segments(lambda s: each_option(s, holds_input=lambda o: False)),
    "believes that every option holds its input": segments(lambda s: each_option(s, holds_input=lambda o: True)),
    "runs spans again for nothing": segments(lambda s: replace(s, forward_seconds=0.0, tail_seconds=0.0)),
    "knows two options at most": segments(lambda s: replace(s, options=s.options[:2])),
    "forgets the boundary under the first forward of a replay": parts(
        lambda p: replace(p, first=tuple(replace(leaf, run=leaf.run - p.boundary) for leaf in p.first))
    ),
    "never begins a span with a plain option": parts(
        lambda p: replace(p, first=tuple(replace(leaf, seconds=leaf.seconds + 3) for leaf in p.first))
    ),
    "knows no span of more than one segment": short_spans,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_comparison_catches_a_planner_that(fault, span_chain, monkeypatch):
    monkeypatch.setattr(optimal, "figures_of", PLANTED[fault])
    sample = chains(span_chain, 90, seed=23, lengths=(2, 2, 3))
    caught = sum(bool(differences(EXACT, chain, rng)) for chain, rng in sample)
    assert caught >= 3


def test_the_comparison_catches_a_grid_that_rounds_down(span_chain, monkeypatch):
    for module in (_figures, _nested):
        monkeypatch.setattr(module, "up", lambda size, unit: size // unit)
    sample = chains(span_chain, 60, seed=24, scale=100_003, lengths=(2, 3))
    found = [difference for chain, rng in sample for difference in differences(COARSE, chain, rng)]
    assert any("peaks at" in difference for difference in found)


def test_the_comparison_catches_a_least_budget_that_knows_no_nesting(span_chain, monkeypatch):
    true_least = _extent.Extent._least
    monkeypatch.setattr(_extent.Extent, "_least", lambda self, start, stop: (true_least(self, start, stop)[0], 1 << 60))
    sample = chains(span_chain, 24, seed=26, lengths=(2, 3))
    found = [difference for chain, rng in sample for difference in differences(EXACT, chain, rng)]
    assert any(difference.startswith("least") for difference in found)


def test_curves_of_longer_chains_never_rise_and_their_plans_fit(span_chain):
    rng = random.Random(27)
    deepest = 0
    for count, planner, scale in ((24, EXACT, 1), (40, FINE, 10**6 + 3), (40, COARSE, 10**7 + 19), (30, COARSE, 997)):
        chain = span_chain(rng, count, scale=scale, kept_share=0.02)
        problem = Problem(chain)
        curve, flat = planner.curve(problem), Optimal().curve(problem)
        assert curve.loss_bytes <= 0.01 * curve.least_bytes
        assert curve.points()[0][0] == curve.least_bytes < flat.least_bytes
        for (low, slower), (high, faster) in pairwise(curve.points()):
            assert low < high
            assert slower > faster
        before, top = inf, flat.points()[-1][0]
        for budget in range(curve.least_bytes, top + 1, max(1, (top - curve.least_bytes) // 40)):
            solution = curve.at(budget)
            walked = walk(schedule_of(solution.plan, chain), chain)
            assert walked.peak_bytes == solution.peak_bytes <= budget
            assert solution.lower_bound <= walked.added_seconds == solution.added_seconds <= before
            assert len(list(leaves(solution.plan))) == count
            poorer = flat.at(budget - curve.loss_bytes)
            assert poorer.plan is None or solution.added_seconds <= poorer.added_seconds
            deepest, before = max(deepest, depth(solution.plan)), solution.added_seconds
    assert deepest >= 3


def test_equal_segments_share_their_rows_and_change_nothing(span_chain):
    """Chains of few kinds of segments, solved with sharing and with every range on its own."""
    rng = random.Random(28)
    for _ in range(6):
        kinds = span_chain(rng, 3, most_options=2).segments
        chain = Chain(tuple(rng.choice(kinds) for _ in range(14)), 7)
        named = Chain(tuple(replace(s, name=f"{i}") for i, s in enumerate(chain.segments)), 7)
        assert len(_figures.figures_of(named).classes[1]) < 14 * 15 // 2
        points = EXACT.curve(Problem(named)).points()
        apart = replace(chain, segments=tuple(unlike(s, i) for i, s in enumerate(chain.segments)))
        assert len(_figures.figures_of(apart).classes[1]) == 14 * 15 // 2
        assert EXACT.curve(Problem(apart)).points() == points


def unlike(segment, index):
    """The same for any plan, but not equal to another one: an option that is never worth taking tells them apart."""
    useless = replace(
        segment.options[0], name="useless", added_seconds=1e6 + index, retained_bytes=0, transient_bytes=500
    )
    return replace(segment, options=(*segment.options, useless))


def test_a_curve_up_to_a_limit_is_the_whole_curve_cut_there(span_chain):
    for index, (chain, _) in enumerate(chains(span_chain, 30, seed=29, lengths=(2, 5, 9))):
        problem, planner = Problem(chain), (EXACT, COARSE)[index % 2]
        whole = planner.curve(problem)
        top = whole.points()[-1][0]
        for limit in (0, whole.least_bytes - 1, whole.least_bytes, (whole.least_bytes + top) // 2, top, top + 5):
            cut = planner.curve(problem, limit_bytes=limit)
            assert cut.points() == tuple(point for point in whole.points() if point[0] <= limit)
            assert cut.least_bytes == whole.least_bytes
            ours, true = cut.at(limit), whole.at(limit)
            assert (ours.plan is None, ours.added_seconds) == (true.plan is None, true.added_seconds)
            assert cut.at(top + 100).lower_bound <= whole.at(top + 100).added_seconds


def test_times_that_floats_cannot_add_exactly_leave_the_curve_monotone(span_chain):
    rng = random.Random(30)
    for _ in range(15):
        chain = span_chain(rng, 12, most_options=3)
        odd = [
            replace(
                each_option(s, added_seconds=lambda o: o.added_seconds * 0.1),
                forward_seconds=rng.choice([0.1, 0.2, 0.3]),
                tail_seconds=rng.choice([None, 0.1, 0.0]),
            )
            for s in chain.segments
        ]
        curve = EXACT.curve(Problem(replace(chain, segments=tuple(odd))))
        seconds = [curve.at(budget).added_seconds for budget, _ in curve.points()]
        assert all(slower > faster for slower, faster in pairwise(seconds))
        assert {curve.at(budget).status for budget, _ in curve.points()} == {Status.OPTIMAL}


def test_portfolio_with_spans_is_never_worse_than_the_nested_program(span_chain):
    for chain, rng in chains(span_chain, 25, seed=31, lengths=(3, 6, 10)):
        problem = Problem(chain)
        curve, before = EXACT.curve(problem), inf
        for budget in sorted(curve.least_bytes + rng.randint(0, 60) for _ in range(5)):
            best = Portfolio(spans=True)(problem, budget)
            assert best.peak_bytes <= budget
            assert best.added_seconds == curve.at(budget).added_seconds <= before
            assert best.status is Status.OPTIMAL
            before = best.added_seconds
        assert Portfolio(spans=True)(problem, curve.least_bytes - 1).plan is None
