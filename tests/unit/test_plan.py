"""Choices: what is well formed, and what a chain refuses."""

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Segment
from regrad.core.errors import InvalidPlan
from regrad.core.plan import Choice, check_choices, leaves, one_level

BOTH = (Option(KEEP, 4, 1), Option(RECOMPUTE, 1, 5, recomputes=True))
CHAIN = Chain(
    (Segment("a", BOTH), Segment("b", BOTH), Segment("c", BOTH[:1], reason="it writes a buffer"), Segment("d", BOTH))
)
PAIR = (Choice(0, 1, KEEP), Choice(1, 2, KEEP))


@pytest.mark.parametrize(
    "choices",
    [
        one_level([KEEP, RECOMPUTE, KEEP, RECOMPUTE]),
        (Choice(0, 2, RECOMPUTE, PAIR), Choice(2, 3, KEEP), Choice(3, 4, KEEP)),
        (
            Choice(0, 2, RECOMPUTE, (Choice(0, 1, RECOMPUTE, PAIR[:1]), PAIR[1])),
            Choice(2, 3, KEEP),
            Choice(3, 4, RECOMPUTE),
        ),
    ],
)
def test_well_formed_choices_pass_and_their_leaves_cover_the_chain(choices):
    check_choices(choices, CHAIN)
    assert [leaf.start for leaf in leaves(choices)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ((), "end at segment 0 of 4"),
        (one_level([KEEP] * 3), "end at segment 3 of 4"),
        (one_level([KEEP] * 5), "4..5 goes beyond segment 4"),
        ((Choice(1, 2, KEEP),), "1..2 stands where 0 should begin"),
        ((Choice(0, 1, KEEP), Choice(0, 1, KEEP)), "0..1 stands where 1 should begin"),
        ((Choice(0, 0, KEEP),), "0..0 stands where 0"),
        ((Choice(0, 2, KEEP),), "0..2 stand in one choice with nothing inside"),
        (one_level([KEEP, "offload", KEEP, KEEP]), "'b' has no option 'offload'; it has keep, recompute"),
        (one_level([KEEP, KEEP, RECOMPUTE, KEEP]), "'c' has no option 'recompute'; it has keep"),
        ((Choice(0, 2, KEEP, PAIR),), "span 0..2 has option 'keep', not 'recompute'"),
        ((Choice(0, 1, RECOMPUTE, PAIR),), "1..2 goes beyond segment 1"),
        ((Choice(0, 2, RECOMPUTE, PAIR[:1]),), "end at segment 1 of 2"),
        ((Choice(0, 2, RECOMPUTE, PAIR[::-1]),), "1..2 stands where 0 should begin"),
        (
            (*PAIR[:1], Choice(1, 3, RECOMPUTE, (Choice(1, 2, KEEP), Choice(2, 3, KEEP)))),
            "span 1..3 holds segment 'c': it writes a buffer",
        ),
    ],
)
def test_choices_that_are_not_are_refused_with_the_place(choices, message):
    with pytest.raises(InvalidPlan, match=message):
        check_choices(choices, CHAIN)


def test_segments_and_chains_refuse_what_has_no_meaning():
    with pytest.raises(InvalidPlan, match="at least one segment"):
        Chain(())
    with pytest.raises(InvalidPlan, match="'a' has no option"):
        Segment("a", ())
    with pytest.raises(InvalidPlan, match="two options of one name"):
        Segment("a", (BOTH[0], BOTH[0]))
    with pytest.raises(InvalidPlan, match="negative forward_bytes: -1"):
        Option(KEEP, 1, 1, forward_bytes=-1)


def test_gradients_that_exist_before_each_backward():
    chain = Chain(tuple(Segment(str(g), BOTH, gradient_bytes=g) for g in (1, 2, 4, 8)))
    assert chain.gradient_bytes == 15
    assert chain.later_gradient_bytes == (14, 12, 8, 0)
