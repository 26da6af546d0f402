"""Peaks, seconds and recompute counts against figures worked out by hand, in bytes."""

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Segment
from regrad.core.plan import Choice, one_level
from regrad.core.simulate import simulate


def segment(name, keep, recompute, **more):
    """``keep`` and ``recompute`` are (retained, transient, forward)."""
    again = Option(RECOMPUTE, *recompute, added_seconds=more.get("forward_seconds", 0.0), recomputes=True)
    return Segment(name, (Option(KEEP, *keep), again), **more)


#   P = 100     a: g 7     b: g 5     c: g 3     Σ g = 15     o = 4
CHAIN = Chain(
    (
        segment("a", (40, 10, 45), (8, 55, 45), gradient_bytes=7, forward_seconds=1.0),
        segment("b", (30, 12, 33), (6, 44, 33), gradient_bytes=5, forward_seconds=2.0),
        segment("c", (20, 14, 60), (4, 36, 60), gradient_bytes=3, forward_seconds=4.0),
    ),
    persistent_bytes=100,
    optimizer_bytes=4,
)


@pytest.mark.parametrize(
    ("options", "levels", "moment", "static", "seconds", "recomputes"),
    [
        (
            # forward 100+45, 140+33, 170+60; backward 190+14, 170+12+3, 140+10+3+5; optimizer 100+15+4
            (KEEP, KEEP, KEEP),
            (145, 173, 230, 204, 185, 158, 119),
            ("forward", 2),
            100 + 15 + 90 + 14,
            0.0,
            (0, 0, 0),
        ),
        (
            # forward 145, 108+33, 114+60; backward 118+36, 114+44+3, 108+55+3+5
            (RECOMPUTE, RECOMPUTE, RECOMPUTE),
            (145, 141, 174, 154, 161, 171, 119),
            ("forward", 2),
            100 + 15 + 18 + 55,
            7.0,
            (1, 1, 1),
        ),
        (
            # forward 145, 108+33, 138+60; backward 158+14, 138+12+3, 108+55+8
            (RECOMPUTE, KEEP, KEEP),
            (145, 141, 198, 172, 153, 171, 119),
            ("forward", 2),
            100 + 15 + 58 + 55,
            1.0,
            (1, 0, 0),
        ),
    ],
)
def test_one_level_by_both_rules(options, levels, moment, static, seconds, recomputes):
    timeline = simulate(one_level(options), CHAIN)
    assert timeline.levels == levels
    assert timeline.peak_bytes == max(levels)
    assert timeline.moment == moment
    assert timeline.added_seconds == seconds
    assert timeline.recomputes == recomputes
    assert timeline.total_recomputes == sum(recomputes)
    assert simulate(one_level(options), CHAIN, "static").peak_bytes == static


def test_the_optimizers_step_can_be_the_peak_under_both_rules():
    chain = Chain(CHAIN.segments, persistent_bytes=100, optimizer_bytes=400)
    for rule in ("timeline", "static"):
        simulation = simulate(one_level([RECOMPUTE] * 3), chain, rule)
        assert simulation.peak_bytes == 100 + 15 + 400
        assert simulation.moment == ("optimizer", -1)


def units(count, tail_seconds=0.0):
    """Equal segments whose kept input is all that they retain: r = p = b = e = 1, forward 1 second."""
    keep = Option(KEEP, 1, 0, holds_input=True)
    again = Option(RECOMPUTE, 1, 0, holds_input=True, added_seconds=1.0, recomputes=True)
    one = Segment("unit", (keep, again), boundary_bytes=1, forward_seconds=1.0, tail_seconds=tail_seconds)
    return Chain((one,) * count)


def spans(count, length):
    return tuple(
        Choice(i, i + length, RECOMPUTE, tuple(Choice(j, j + 1, KEEP) for j in range(i, i + length)))
        for i in range(0, count, length)
    )


@pytest.mark.parametrize(
    ("length", "peak", "forwards"),
    # s spans of m: s boundaries held, m inputs in the replay of the last one, its first input being a boundary; the
    # last segment of each span is not run again
    [(8, 8 + 8 - 1, 8 * 7), (64, 64, 63), (1, 64, 0), (16, 4 + 16 - 1, 4 * 15)],
)
def test_equal_spans_over_64_unit_segments(length, peak, forwards):
    simulation = simulate(spans(64, length), units(64))
    assert simulation.peak_bytes == peak
    # no gradients and nothing transient: the static rule sees the same, the most that is ever held
    assert simulate(spans(64, length), units(64), "static").peak_bytes == peak
    assert simulation.total_recomputes == forwards
    assert simulation.added_seconds == forwards


def test_without_a_free_tail_every_segment_of_a_span_runs_again():
    assert simulate(spans(64, 8), units(64, tail_seconds=None)).recomputes == (1,) * 64
    assert simulate(spans(64, 8), units(64, tail_seconds=0.25)).added_seconds == 8 * 7.25


def test_a_nested_span_by_hand():
    # peaks of the replays: 0..4 with span 0..2 inside, then its replay; boundary of 0 counted once
    inner = Choice(0, 2, RECOMPUTE, (Choice(0, 1, KEEP), Choice(1, 2, KEEP)))
    plan = (Choice(0, 4, RECOMPUTE, (inner, Choice(2, 3, KEEP), Choice(3, 4, KEEP))),)
    simulation = simulate(plan, units(4))
    assert simulation.peak_bytes == 3
    assert simulation.recomputes == (2, 1, 1, 0)


def test_replay_bytes_count_while_a_span_runs_with_nothing_kept():
    keep = Option(KEEP, 2, 0)
    both = (keep, Option(RECOMPUTE, 1, 0))
    chain = Chain((Segment("a", both, boundary_bytes=1, replay_bytes=50), Segment("b", both, boundary_bytes=1)))
    plan = (Choice(0, 2, RECOMPUTE, (Choice(0, 1, KEEP), Choice(1, 2, KEEP))),)
    simulation = simulate(plan, chain)
    assert simulation.peak_bytes == 51
    assert simulation.moment == ("forward", 0)
