"""Options with states for planners that know one way to recompute, and fewer engines where they would be too many."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.state import (
    JOURNAL,
    READ_SET,
    SNAPSHOT,
    STAYS_BACK,
    Bandwidth,
    LogEntry,
    Moves,
    StateCost,
    StateUse,
    StateVariable,
)
from regrad.core.state_options import only, undominated, with_states
from regrad.planners import FirstK, Optimal, RecomputeAll

ENGINES = (SNAPSHOT, READ_SET, JOURNAL)


def chain(count: int, big: int = 40) -> Chain:
    options = (Option(KEEP, big, 2, big), Option(RECOMPUTE, 3, big, big, added_seconds=1.0, recomputes=True))
    return Chain(tuple(Segment(f"s{i}", options, forward_seconds=1.0) for i in range(count)))


def variable(draw: random.Random, name: str, count: int) -> StateVariable:
    nbytes = draw.randint(1, 40)
    entries = []
    for writer in range(count):
        if draw.random() < 0.7:
            size = draw.randint(1, nbytes)
            entries.append(LogEntry(writer, name, draw.randint(0, nbytes - size), size, draw.randint(0, 2)))
    costs = []
    for i in range(count):
        costs.append(StateCost(i, JOURNAL, 0, 0, seconds=draw.choice([0.0, 0.25])))
        if draw.random() < 0.6:
            size = draw.randint(0, nbytes)
            costs.append(StateCost(i, READ_SET, size, size + 1, Moves(size), Moves(size, 2 * size)))
    return StateVariable(
        name,
        nbytes,
        tuple(entries),
        touched_by=tuple(range(count)),
        costs=tuple(costs),
        bandwidth=Bandwidth(16.0, 16.0),
    )


def test_the_usual_combination_keeps_the_name_and_stands_last():
    draw = random.Random(3)
    variables = [variable(draw, "a", 3), variable(draw, "b", 3)]
    full = with_states(chain(3), variables, (SNAPSHOT, JOURNAL), usual={"a": JOURNAL, "b": SNAPSHOT})
    plain = with_states(chain(3), variables, (SNAPSHOT, JOURNAL))
    for segment, other in zip(full.segments, plain.segments, strict=True):
        assert segment.options[0].name == KEEP
        last = segment.options[-1]
        assert (last.name, [use.engine for use in last.states]) == (RECOMPUTE, [JOURNAL, SNAPSHOT])
        named = other.option("recompute, a by journal, b by snapshot")
        assert replace(last, name=named.name) == named
        assert len(segment.options) == len(other.options) == 5
    problem = Problem(full, states=tuple(variables))
    assert [choice.option for choice in RecomputeAll()(problem, 1 << 40).plan] == [RECOMPUTE] * 3
    assert [choice.option for choice in FirstK(1)(problem, 1 << 40).plan] == [RECOMPUTE, KEEP, KEEP]


def test_fewer_options_keep_the_usual_one_and_cost_nothing_by_dominance():
    """On 150 random chains the whole time-memory curve is the same without the engines that others beat."""
    draw, fewer = random.Random(11), 0
    for _ in range(150):
        count = draw.randint(1, 4)
        one = variable(draw, "q", count)
        problem = Problem(with_states(chain(count), [one], ENGINES), states=(one,))
        segments = []
        for i, segment in enumerate(problem.chain.segments):
            if i not in one.touching:
                segments.append(segment)
                continue
            offered = [option.states[0] for option in segment.options if option.states]
            left = undominated(one, i, offered)
            fewer += len(offered) - len(left)
            options = tuple(o for o in segment.options if not o.states or o.states[0] in left)
            segments.append(replace(segment, options=options))
        small = replace(problem, shape=replace(problem.chain, segments=tuple(segments)))
        assert Optimal().curve(small).points() == Optimal().curve(problem).points()
    assert fewer > 100


def test_a_planted_rule_that_drops_the_journal_by_its_cost_alone_is_wrong_somewhere():
    """Shared entries make it cheaper than it is alone: the comparison above would notice."""
    draw, worse = random.Random(11), 0
    for _ in range(150):
        count = draw.randint(2, 4)
        one = variable(draw, "q", count)
        problem = Problem(with_states(chain(count), [one], ENGINES), states=(one,))
        without = only(problem.chain, (SNAPSHOT, READ_SET))
        assert without is not None
        worse += Optimal().curve(replace(problem, shape=without)).points() != Optimal().curve(problem).points()
    assert worse > 10


def test_nothing_is_said_of_the_journal_where_staying_back_is_offered():
    entries = (LogEntry(0, "q", 0, 1, 0),)
    one = StateVariable("q", 100, entries, touched_by=(0,))
    copy = StateUse("q", SNAPSHOT, 100, 100, 1.0)
    assert undominated(one, 0, [copy, StateUse("q", JOURNAL)]) == [StateUse("q", JOURNAL)]
    both = [copy, StateUse("q", JOURNAL), StateUse("q", STAYS_BACK)]
    assert undominated(one, 0, both) == both


@pytest.mark.parametrize("most", [1, 2, 9, 27])
def test_many_states_never_make_more_options_than_allowed(most):
    draw = random.Random(5)
    variables = [variable(draw, f"v{k}", 2) for k in range(14)]
    usual = {one.name: JOURNAL for one in variables}
    made = with_states(chain(2), variables, ENGINES, usual=usual, most_options=most)
    for segment in made.segments:
        assert 1 <= sum(option.recomputes for option in segment.options) <= most
        assert segment.options[-1].name == RECOMPUTE
        assert {use.engine for use in segment.options[-1].states} == {JOURNAL}
