"""What holds for every planner on any chain."""

import random
from dataclasses import replace
from itertools import pairwise
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.plan import one_level
from regrad.core.schedule import schedule_of
from regrad.core.simulate import walk
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
)
from regrad.planners.exhaustive import all_nested

STATEFUL = (Frontier(), StateAgnostic(), KeepOrSnapshot())
ONE_LEVEL = (KeepAll(), RecomputeAll(), FirstK(), FirstK(1), EveryK(), EveryK(2), Optimal(), Portfolio(), *STATEFUL)
SPANNING = (SqrtN(), Uniform(1), Uniform(2), Uniform(), Binomial(), Binomial(1), Optimal(nested=True))
ALL = (*ONE_LEVEL, *SPANNING, Exhaustive(), Portfolio(spans=True))

small = st.integers(0, 12)


@st.composite
def options(draw, name):
    seconds = 0.0 if name == KEEP else float(draw(st.integers(0, 5)))
    figures = [draw(small) for _ in range(3)]
    return Option(name, *figures, added_seconds=seconds, holds_input=draw(st.booleans()), recomputes=name != KEEP)


@st.composite
def segments(draw):
    names = draw(st.sampled_from([(KEEP, RECOMPUTE), (KEEP, RECOMPUTE, "offload"), (KEEP,)]))
    choices = tuple(draw(options(name)) for name in names)
    boundary = draw(st.integers(0, min(option.retained_bytes for option in choices)))
    return Segment(
        "s",
        choices,
        draw(small),
        float(draw(st.integers(0, 5))),
        boundary,
        draw(st.sampled_from([None, 0.0])),
        draw(small),
    )


problems = st.builds(
    lambda parts, persistent, optimizer, rule: Problem(Chain(tuple(parts), persistent, optimizer), rule),
    # two that can be recomputed, so that every planner has something to do
    st.lists(segments(), min_size=2, max_size=4).map(lambda parts: [*parts, FIXED, FIXED]),
    small,
    small,
    st.sampled_from(["timeline", "static"]),
)
FIXED = Segment("f", (Option(KEEP, 9, 1), Option(RECOMPUTE, 2, 8, added_seconds=1.0, recomputes=True)), 1, 1.0, 2)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problem=problems, budget=st.integers(0, 120))
def test_what_a_planner_says_is_what_its_schedule_does(problem, budget):
    for planner in ALL:
        if problem.rule not in planner.rules:
            continue
        solution = planner(problem, budget)
        if solution.plan is None:
            assert budget < solution.least_bytes
            continue
        walked = walk(schedule_of(solution.plan, problem.chain), problem.chain, problem.rule)
        assert walked.peak_bytes == solution.peak_bytes <= budget
        assert walked.added_seconds == solution.added_seconds
        assert solution.lower_bound <= solution.added_seconds
        assert solution.least_bytes <= solution.peak_bytes
        assert planner.nested or not any(choice.is_span for choice in solution.plan)
        assert planner(problem, solution.least_bytes).peak_bytes == solution.least_bytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems)
def test_portfolio_is_never_worse_than_a_baseline_and_larger_budgets_never_slower(problem):
    baselines = [planner for planner in ONE_LEVEL if problem.rule in planner.rules]
    least = Portfolio()(problem, 0).least_bytes
    before = {}
    for budget in range(max(least - 2, 0), least + 40, 3):
        best = Portfolio()(problem, budget)
        for planner in baselines:
            solution = planner(problem, budget)
            if solution.plan is not None:
                assert best.added_seconds <= solution.added_seconds
                assert solution.added_seconds <= before.get(planner, solution.added_seconds), planner.label
                before[planner] = solution.added_seconds
        spanning = Portfolio(spans=True)(problem, budget)
        if best.plan is not None:
            assert spanning.added_seconds <= best.added_seconds
        for planner in (planner for planner in SPANNING if problem.rule in planner.rules):
            solution = planner(problem, budget)
            if solution.plan is not None:
                assert spanning.added_seconds <= solution.added_seconds <= before.get(planner, inf), planner.label
                before[planner] = solution.added_seconds


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problem=problems, data=st.data())
def test_every_backward_that_the_static_rule_admits_the_timeline_rule_admits(problem, data):
    chain = problem.chain
    picked = [data.draw(st.sampled_from(segment.options)).name for segment in chain.segments]

    schedule = schedule_of(one_level(picked), chain)
    static, timeline = walk(schedule, chain, "static"), walk(schedule, chain, "timeline")
    backward = timeline.levels[len(chain) :]
    assert len(backward) == len(chain) + 1
    assert max(backward) <= static.peak_bytes
    assert (static.added_seconds, static.recomputes) == (timeline.added_seconds, timeline.recomputes)


def test_curves_of_large_chains_never_rise_and_their_plans_fit(random_chain):
    rng = random.Random(11)
    for count, planner in (
        (96, Optimal()),
        (96, Optimal(max_points=0)),
        (200, Optimal(max_points=500, max_work=10**6)),
    ):
        problem = Problem(random_chain(rng, count, most_options=4, scale=10**7 + 19))
        curve = planner.curve(problem)
        assert curve.loss_bytes <= 0.011 * curve.points()[-1][0]
        for (low, slower), (high, faster) in pairwise(curve.points()):
            assert low < high
            assert slower > faster
        assert curve.points()[0][0] == curve.least_bytes
        before = None
        for budget in range(
            curve.least_bytes, curve.points()[-1][0], (curve.points()[-1][0] - curve.least_bytes) // 25
        ):
            solution = curve.at(budget)
            assert solution.peak_bytes <= budget
            assert before is None or solution.added_seconds <= before
            before = solution.added_seconds


def algebra(choice, chain):
    """MODEL's algebra of (retained, peak with its own retained, gradients, seconds) for the plans of segment ranges."""
    if not choice.is_span:
        segment = chain.segments[choice.start]
        option = segment.option(choice.option)
        retained = option.retained_bytes
        return retained, retained + option.transient_bytes, segment.gradient_bytes, option.added_seconds
    retained, peak, gradients, seconds = series([algebra(inner, chain) for inner in choice.inner])
    boundary = chain.segments[choice.start].boundary_bytes
    first = choice.inner[0]
    shared = first.is_span or chain.segments[choice.start].option(first.option).holds_input
    *body, last = chain.segments[choice.start : choice.stop]
    tail = last.forward_seconds if last.tail_seconds is None else last.tail_seconds
    again = sum(segment.forward_seconds for segment in body) + tail
    return boundary, boundary + peak - (boundary if shared else 0), gradients, again + seconds


def series(parts):
    retained, peak, gradients, seconds = parts[0]
    for r, p, g, c in parts[1:]:
        retained, peak, gradients, seconds = retained + r, max(peak + g, retained + p), gradients + g, seconds + c
    return retained, peak, gradients, seconds


def test_walked_nested_plans_agree_with_the_algebra(random_chain):
    """The oracle's prices against the algebra of nested plans, where forwards and replays add no peak of their own."""

    rng = random.Random(12)
    compared = 0
    for _ in range(12):
        chain = random_chain(rng, 3, most_options=2, spans=True)
        parts = tuple(
            replace(
                s,
                replay_bytes=0,
                options=tuple(replace(o, forward_bytes=0, transient_bytes=o.transient_bytes + 2) for o in s.options),
            )
            for s in chain.segments
        )
        chain = replace(chain, segments=parts, optimizer_bytes=0)
        for plan in all_nested(chain):
            walked = walk(schedule_of(plan, chain), chain)
            _, peak, gradients, seconds = series([algebra(choice, chain) for choice in plan])
            assert walked.peak_bytes == chain.persistent_bytes + max(peak, gradients)
            assert walked.added_seconds == seconds
            compared += 1
    assert compared == 12 * 384


def test_exhaustive_nested_is_never_worse_than_one_level_or_uniform_spans(random_chain):
    rng = random.Random(13)
    better = 0
    for _ in range(25):
        problem = Problem(random_chain(rng, 3, most_options=2, spans=True))
        nested = Exhaustive(nested=True)
        prices = nested.prices(problem)
        least = nested.choose(prices, 0).least_bytes
        for budget in (least, least + 5, least + 20):
            best = nested.choose(prices, budget)
            for other in (Exhaustive(), SqrtN(), Uniform(1), Portfolio(spans=True)):
                solution = other(problem, budget)
                assert solution.plan is None or best.added_seconds <= solution.added_seconds
            better += Exhaustive()(problem, budget).plan is None
    assert better > 0
