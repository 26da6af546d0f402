"""The order of actions for known plans, and illegal schedules, each caught at the action that is wrong."""

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Segment
from regrad.core.errors import IllegalSchedule, InvalidPlan
from regrad.core.plan import Choice, one_level
from regrad.core.schedule import Backward, Drop, Forward, Recompute, Restore, Save, Schedule, schedule_of
from regrad.core.simulate import walk

BOTH = (Option(KEEP, 4, 1, holds_input=True), Option(RECOMPUTE, 1, 5, holds_input=True, recomputes=True))
CHAIN = Chain(tuple(Segment(name, BOTH, boundary_bytes=1) for name in "abc"))


def kept(start, stop):
    return tuple(Choice(i, i + 1, KEEP) for i in range(start, stop))


def test_one_level():
    assert schedule_of(one_level([KEEP, RECOMPUTE, KEEP]), CHAIN).actions == (
        Forward(0, KEEP),
        Forward(1, RECOMPUTE),
        Forward(2, KEEP),
        Backward(2),
        Backward(1),
        Backward(0),
    )


def test_a_span_saves_its_boundary_and_is_run_again_before_its_backward():
    assert schedule_of((*kept(0, 1), Choice(1, 3, RECOMPUTE, kept(1, 3))), CHAIN).actions == (
        Forward(0, KEEP),
        Save(1),
        Forward(1, None),
        Forward(2, None),
        Restore(1),
        Recompute(1, KEEP),
        Recompute(2, KEEP, tail=True),
        Backward(2),
        Backward(1),
        Drop(1),
        Backward(0),
    )


def test_nested_spans_that_start_together_share_one_boundary():
    plan = (Choice(0, 3, RECOMPUTE, (Choice(0, 2, RECOMPUTE, kept(0, 2)), *kept(2, 3))),)
    schedule = schedule_of(plan, CHAIN)
    assert schedule.actions == (
        Save(0),
        Forward(0, None),
        Forward(1, None),
        Forward(2, None),
        Restore(0),
        Recompute(0, None),
        Recompute(1, None),
        Recompute(2, KEEP, tail=True),
        Backward(2),
        Restore(0),
        Recompute(0, KEEP),
        Recompute(1, KEEP, tail=True),
        Backward(1),
        Backward(0),
        Drop(0),
    )
    assert walk(schedule, CHAIN).recomputes == (2, 2, 1)


def test_a_span_inside_a_span_saves_its_own_boundary_where_it_starts_later():
    plan = (Choice(0, 3, RECOMPUTE, (*kept(0, 1), Choice(1, 3, RECOMPUTE, kept(1, 3)))),)
    actions = schedule_of(plan, CHAIN).actions
    assert actions[4:8] == (Restore(0), Recompute(0, KEEP), Save(1), Recompute(1, None))
    assert actions[-4:] == (Backward(1), Drop(1), Backward(0), Drop(0))
    walk(schedule_of(plan, CHAIN), CHAIN)


KEEPING = [Forward(0, KEEP), Forward(1, KEEP), Forward(2, KEEP), Backward(2), Backward(1), Backward(0)]
SPAN = list(schedule_of((Choice(0, 2, RECOMPUTE, kept(0, 2)), *kept(2, 3)), CHAIN).actions)
# 0 Save(0) 1 Forward(0) 2 Forward(1) 3 Forward(2) 4 Backward(2) 5 Restore(0) 6 Recompute(0) 7 Recompute(1)
# 8 Backward(1) 9 Backward(0) 10 Drop(0)


def without(actions, *positions):
    return [action for position, action in enumerate(actions) if position not in positions]


def instead(actions, position, *others):
    return [*actions[:position], *others, *actions[position + 1 :]]


ILLEGAL = {
    "a segment beyond the chain": (instead(KEEPING, 0, Forward(3, KEEP)), 0, "there is no such segment"),
    "a negative segment": (instead(KEEPING, 0, Forward(-1, KEEP)), 0, "there is no such segment"),
    "a forward left out": (without(KEEPING, 1), 1, "stands at segment 1"),
    "a forward twice": (instead(KEEPING, 1, Forward(0, KEEP)), 1, "stands at segment 1"),
    "forwards in the wrong order": ([*KEEPING[1::-1], *KEEPING[2:]], 0, "stands at segment 0"),
    "a forward from another boundary": (
        [Save(0), KEEPING[0], Restore(0), *KEEPING[1:]],
        3,
        "boundary at hand is that of segment 0",
    ),
    "a backward before the forward ends": ([*KEEPING[:2], Backward(1), *KEEPING[2:]], 2, "stands at segment 2"),
    "a backward before its turn": ([*KEEPING[:3], Backward(1)], 3, "stands at segment 2"),
    "a backward twice": ([*KEEPING[:4], Backward(2)], 4, "stands at segment 1"),
    "a backward left out": (KEEPING[:-1], 5, "the backward of segment 0 never ran"),
    "nothing at all": ([], 0, "the backward of segment 2 never ran"),
    "a backward of what was not kept": (
        instead(KEEPING, 1, Forward(1, None)),
        4,
        "its activations are not held",
    ),
    "a span that is not run again": (without(SPAN, 5, 6, 7), 5, "its activations are not held"),
    "a replay that leaves out a segment": (without(SPAN, 7), 7, "its activations are not held"),
    "a replay that starts late": (without(SPAN, 6), 6, "boundary at hand is that of segment 0"),
    "a replay without going back": (without(SPAN, 5), 5, "boundary at hand is that of segment 3"),
    "a boundary never saved": (without(SPAN, 0), 4, "was not saved, or was dropped"),
    "a boundary saved too late": ([SPAN[1], SPAN[0], *SPAN[2:]], 1, "boundary at hand is that of segment 1"),
    "a boundary saved twice": ([SPAN[0], *SPAN], 1, "saved already"),
    "a boundary dropped before its replay": ([*SPAN[:5], Drop(0), *SPAN[5:]], 6, "was not saved, or was dropped"),
    "a boundary dropped while activations hold it": (
        [*SPAN[:8], Drop(0), *SPAN[8:-1]],
        8,
        "still held, include it",
    ),
    "a boundary dropped twice": ([*SPAN, Drop(0)], 11, "this boundary is not saved"),
    "a boundary never dropped": (SPAN[:-1], 10, r"segments \[0\] were never dropped"),
    "a replay before the forward ends": (
        [*SPAN[:3], *SPAN[5:7], *SPAN[3:]],
        4,
        "forward pass has only reached segment 2",
    ),
    "a replay of what is held": ([*SPAN[:8], Restore(0), Recompute(0, KEEP), *SPAN[8:]], 9, "held already"),
    "a replay after the backward": (
        [*SPAN[:9], Restore(0), Recompute(0, None), Recompute(1, KEEP), *SPAN[9:]],
        10,
        "held already",
    ),
    "a replay that is held for no backward": (
        [*SPAN[:6], Recompute(0, None), Recompute(1, None), Recompute(2, KEEP), *SPAN[5:]],
        8,
        "its backward has run already",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_schedule_is_caught_at_its_action(name):
    actions, position, why = ILLEGAL[name]
    with pytest.raises(IllegalSchedule, match=why) as caught:
        walk(Schedule(tuple(actions)), CHAIN)
    assert caught.value.position == position
    assert caught.value.action == (actions[position] if position < len(actions) else "end")
    assert f"action {position}, " in str(caught.value)


def test_the_schedules_that_the_illegal_ones_are_made_from_are_legal():
    assert walk(Schedule(tuple(KEEPING)), CHAIN).total_recomputes == 0
    assert walk(Schedule(tuple(SPAN)), CHAIN).recomputes == (1, 1, 0)


def test_an_option_or_a_rule_that_is_not_there_is_refused():
    with pytest.raises(InvalidPlan, match="no option 'offload'"):
        walk(Schedule((Forward(0, "offload"),)), CHAIN)
    with pytest.raises(InvalidPlan, match="no rule 'hopeful'; the rules are timeline and static"):
        walk(Schedule(tuple(KEEPING)), CHAIN, "hopeful")
