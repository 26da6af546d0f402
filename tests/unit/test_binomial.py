"""Revolve's closed forms, its schedules, and the published figures that both it and the nested program must give."""

from math import inf

import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Status
from regrad.core.schedule import Backward, Drop, Forward, Recompute, Restore, Save, schedule_of
from regrad.core.simulate import simulate
from regrad.planners import Binomial, Optimal, SqrtN, Uniform, _nested
from regrad.planners.binomial import (
    MOST_SWEEPS,
    advance,
    balanced_slots,
    binomial_spans,
    extra_forwards,
    forwards,
    most_steps,
    sweeps,
)

KEPT = Option(KEEP, 1, 0, holds_input=True)
AGAIN = Option(RECOMPUTE, 1, 0, holds_input=True, added_seconds=1.0, recomputes=True)


def unit(name="unit"):
    """r = p = 1, the kept input; b = e = 1; one forward is a second, the last one of a span is not run again."""
    return Segment(name, (KEPT, AGAIN), boundary_bytes=1, forward_seconds=1.0, tail_seconds=0.0)


def units(count):
    return Problem(Chain(tuple(unit() for _ in range(count))))


def fewest_by_recursion(count):
    """Forwards for ``n`` steps in ``s`` slots by the recursion that the closed form solves, as table[s][n]."""
    table = [None, [n * (n - 1) // 2 for n in range(count + 1)]]
    for slots in range(2, count):
        row = [0, 0]
        for n in range(2, count + 1):
            row.append(min(m + row[m] + table[slots - 1][n - m] for m in range(1, n)))
        table.append(row)
    return table


@pytest.mark.parametrize(
    ("slots", "times", "steps"),
    # Griewank 1992; Griewank and Walther 2000: C(s + t, s)
    [(1, 1, 2), (2, 2, 6), (3, 2, 10), (3, 3, 20), (4, 4, 70), (8, 4, 495), (8, 5, 1287), (10, 10, 184_756), (5, 0, 1)],
)
def test_steps_that_slots_can_reverse(slots, times, steps):
    assert most_steps(slots, times) == steps
    assert sweeps(steps, slots) == times
    assert sweeps(steps + 1, slots) == times + 1
    assert steps == 1 or most_steps(slots, times) == most_steps(slots - 1, times) + most_steps(slots, times - 1)


def order(problem, slots):
    """For each backward, newest first: the states that are stored anew on the way, and the steps that run for it.

    The run of a step for its own backward is not one of them (in the paper it is part of the reversal).
    """
    found, stored, ran = [], [], []
    for action in schedule_of(binomial_spans(problem, slots), problem.chain).actions:
        if isinstance(action, Save):
            stored.append(action.segment)
        elif isinstance(action, (Forward, Recompute)):
            ran.append(action.segment)
        elif isinstance(action, Backward):
            found.append((action.segment, stored, [segment for segment in ran if segment < action.segment]))
            stored, ran = [], []
    return found


# by the recursion of Griewank and Walther: with s slots and the least t that allows C(s + t, s) >= n steps, store the
# first state, advance by C(s + t - 1, s) steps, do what lies ahead with s - 1 slots, come back and do the rest with s.
# For these n, which are C(s + t, s), there is no other way as good
GOLDEN = {
    # C(5, 3): 4 = C(4, 3) steps ahead, then 3 = C(3, 2) of the 6 left, then 2 = C(2, 1) of the 3 left
    (10, 3): [
        (9, [0, 4, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (8, [], [7]),
        (7, [], []),
        (6, [], [4, 5]),
        (5, [], []),
        (4, [], []),
        (3, [], [0, 1, 2]),
        (2, [], []),
        (1, [], []),
        (0, [], []),
    ],
    # C(4, 2): 3 = C(3, 2) ahead, then 2 = C(2, 1) of the 3 left
    (6, 2): [
        (5, [0, 3], [0, 1, 2, 3, 4]),
        (4, [], [3]),
        (3, [], []),
        (2, [], [0, 1]),
        (1, [], []),
        (0, [], []),
    ],
    # C(5, 2): 6 = C(4, 2) ahead; 3 = C(3, 1) of the 4 left, and again from there; then as (6, 2)
    (10, 2): [
        (9, [0, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (8, [], [6, 7]),
        (7, [], [6]),
        (6, [], []),
        (5, [3], [0, 1, 2, 3, 4]),
        (4, [], [3]),
        (3, [], []),
        (2, [], [0, 1]),
        (1, [], []),
        (0, [], []),
    ],
}


@pytest.mark.parametrize(("steps", "slots"), GOLDEN)
def test_the_order_of_stored_states_and_repeated_steps_is_revolves(steps, slots):
    expected = GOLDEN[steps, slots]
    assert order(units(steps), slots) == expected
    assert sum(len(ran) for _, _, ran in expected) == forwards(steps, slots)


def test_the_whole_schedule_of_ten_steps_in_three_slots():
    problem = units(10)
    forward = [Save(0), *(Forward(i, None) for i in range(4)), Save(4), *(Forward(i, None) for i in range(4, 7))]
    forward += [Save(7), Forward(7, None), Forward(8, None), Forward(9, KEEP), Backward(9)]

    def reverse(start, stop):
        yield Restore(start)
        yield from (Recompute(i, KEEP, tail=i == stop - 1) for i in range(start, stop))
        yield from (Backward(i) for i in reversed(range(start, stop)))
        yield Drop(start)

    expected = [*forward, *reverse(7, 9), *reverse(4, 7), *reverse(0, 4)]
    assert list(schedule_of(binomial_spans(problem, 3), problem.chain).actions) == expected


@pytest.mark.parametrize(
    ("steps", "slots", "expected"),
    # all stored: each step but the last runs once before the backward; one slot: n (n - 1) / 2
    [(10, 9, 9), (10, 1, 45), (10, 2, 20), (10, 3, 15), (20, 3, 45), (1, 1, 0), (6, 2, 8), (64, 63, 63)],
)
def test_forwards_of_known_cases(steps, slots, expected):
    assert forwards(steps, slots) == expected


def test_the_closed_form_solves_the_recursion():
    table = fewest_by_recursion(40)
    for slots in range(1, 40):
        for steps in range(1, 41):
            assert forwards(steps, slots) == table[slots][steps]


@pytest.mark.parametrize(("steps", "slots"), [(5, 2), (10, 3), (1, 0), (2, 1), (20, 3), (21, 4), (70, 4)])
def test_balanced_slots_as_revolve_adjusts_them(steps, slots):
    assert balanced_slots(steps) == slots


def test_memory_and_time_grow_like_the_logarithm():
    """Chen et al. 2016: O(log n) memory for O(n log n) forwards."""
    for power in range(1, 14):
        steps = 2**power
        slots = balanced_slots(steps)
        assert slots <= power
        assert forwards(steps, slots) <= steps * power


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10, 20, 33, 64, 90])
def test_schedules_peak_at_one_more_than_their_slots_and_run_what_the_closed_form_says(count):
    problem = units(count)
    for slots in range(1, count + 1):
        if sweeps(count, slots) > MOST_SWEEPS:
            continue
        simulation = simulate(binomial_spans(problem, slots), problem.chain)
        assert simulation.peak_bytes == min(slots + 1, count)
        assert simulation.total_recomputes == simulation.added_seconds == forwards(count, slots) - (count - 1)
        # the first sweep is the forward pass, and the reversal of a step runs it once more in the paper's count
        assert max(simulation.recomputes) <= max(sweeps(count, slots) - 1, 0)


def test_every_advance_leaves_what_can_be_reversed():
    for slots in range(1, 9):
        for steps in range(slots + 2, 200):
            ahead = steps - advance(steps, slots)
            assert 1 <= advance(steps, slots) < steps
            left = advance(steps, slots)
            rest = forwards(ahead, slots - 1) if slots > 1 else 0
            assert left + forwards(left, slots) + rest == forwards(steps, slots)


@pytest.mark.parametrize(("peak", "extra"), [(3, 357), (4, 195), (8, 84), (16, 48), (64, 0)])
def test_sixty_four_unit_layers(peak, extra):
    """The figures of the cost model: by the closed form, by Revolve's schedules and by the nested program."""
    problem = units(64)
    assert extra_forwards(64, peak) == extra
    for planner in (Binomial(), Binomial(peak - 1), Optimal(nested=True)):
        solution = planner(problem, peak)
        assert (solution.added_seconds, solution.peak_bytes) == (extra, peak)
    assert Optimal(nested=True)(problem, peak).status is Status.OPTIMAL


def test_the_nested_program_finds_revolves_optimum_at_every_peak():
    for count in (1, 2, 7, 30, 64):
        curve = Optimal(nested=True).curve(units(count))
        for peak in range(2, count + 1):
            assert curve.at(peak).added_seconds == extra_forwards(count, peak)
        assert curve.least_bytes == min(count, 2)


def test_a_program_whose_spans_never_begin_with_a_span_misses_revolves_optimum(monkeypatch):
    true_close = _nested.Nested._close

    def faulty(self, leaves, start, stop, best, *rest):
        if leaves is self.figures.parts[start].first:
            best[:] = inf
        return true_close(self, leaves, start, stop, best, *rest)

    monkeypatch.setattr(_nested.Nested, "_close", faulty)
    curve = Optimal(nested=True).curve(units(64))
    missed = [peak for peak in range(3, 64) if curve.at(peak).added_seconds != extra_forwards(64, peak)]
    # with more memory there are optimal schedules that keep the first segment of a span
    assert missed == [3, 4, 5, 6]


def test_eight_equal_spans_peak_at_15_and_one_at_64():
    assert SqrtN()(units(64), 10**9).peak_bytes == Uniform(8)(units(64), 10**9).peak_bytes == 15
    assert Uniform(1)(units(64), 10**9).peak_bytes == 64
    # at the peak of 15, spans in spans need 49 forwards where eight spans in one level need 56
    assert Uniform(8)(units(64), 15).added_seconds == 56
    assert Optimal(nested=True)(units(64), 15).added_seconds == Binomial()(units(64), 15).added_seconds == 49


def test_segments_that_can_only_be_kept_stand_between_the_runs():
    only = Segment("only", (KEPT,))
    problem = Problem(Chain((only, *(unit() for _ in range(6)), only, unit(), unit(), only)))
    plan = binomial_spans(problem, 1)
    assert [(c.start, c.stop, c.is_span) for c in plan] == [
        (0, 1, False),
        (1, 6, True),
        (6, 7, False),
        (7, 8, False),
        (8, 9, False),
        (9, 10, False),
        (10, 11, False),
    ]
    simulate(plan, problem.chain)
    kept = Binomial()(Problem(Chain((only, only))), 10)
    assert not any(choice.is_span for choice in kept.plan)


def test_long_chains_leave_out_what_nests_too_deep():
    problem = units(300)
    assert Binomial()(problem, 2).least_bytes == 3
    with pytest.raises(PlannerMismatch, match=r"Binomial.slots=1.: 300 segments take one slot, and at most 100 sweeps"):
        Binomial(1)(problem, 10)
    assert Binomial()(problem, 40).peak_bytes <= 40


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: most_steps(-1, 2), "-1 slots and 2 sweeps"),
        (lambda: sweeps(2, 0), "2 steps in 0 slots"),
        (lambda: sweeps(0, 3), "0 steps in 3 slots"),
        (lambda: balanced_slots(0), "0 steps"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(call, message):
    with pytest.raises(PlannerMismatch, match=message):
        call()
