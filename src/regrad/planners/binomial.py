"""Binomial checkpointing: the fewest repeated steps for a number of stored states, many levels deep.

Andreas Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation", 1992 (treeverse); Andreas Griewank, Andrea Walther, "Algorithm 799: Revolve", 2000. With s slots and
no step done more than t times beside its own reversal, C(s + t, s) steps can be reversed (their equation 1) and no
more; the forwards for n steps are their proposition 1. Exact for chains of equal segments whose kept input is all that
they retain, under the timeline rule; on others it is a baseline.

A slot holds a state while later steps are worked on. The state that a step starts from while it is itself reversed is
counted by the simulator and not by the paper, so s slots peak at s + 1 states, and the first sweep over n steps, n - 1
forwards of the paper's count, is the forward pass of the step itself and not added to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import comb

from regrad.core.chain import RECOMPUTE, Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Choice, Choices, Solution
from regrad.core.simulate import RULES
from regrad.planners.base import Planner, fastest_first, kept, least_seconds, pick, recomputable

# more sweeps than this are as many levels of nesting, and on long chains millions of forwards
MOST_SWEEPS = 100
ALL_SLOTS = 32


def most_steps(slots: int, sweeps: int) -> int:
    """How many steps ``slots`` stored states can reverse if no step runs more than ``sweeps`` times: C(s + t, s).

    3 slots and 3 sweeps: 20. One if either is 0. Raises :class:`PlannerMismatch` if one is negative.
    """
    if slots < 0 or sweeps < 0:
        raise PlannerMismatch(f"{slots} slots and {sweeps} sweeps: neither can be negative")
    return comb(slots + sweeps, slots)


def sweeps(steps: int, slots: int) -> int:
    """The least t with C(s + t, s) >= ``steps``: how often a step has to run at most."""
    if steps < 1 or slots < 0 or (slots == 0 and steps > 1):
        raise PlannerMismatch(f"{steps} steps in {slots} slots: there must be a step, and a slot if there are two")
    least = 0
    while most_steps(slots, least) < steps:
        least += 1
    return least


def forwards(steps: int, slots: int) -> int:
    """Forwards, the first sweep with them, that reversing ``steps`` steps from ``slots`` slots takes at the least.

    t n - C(s + t, s + 1) for n steps with t their :func:`sweeps` (Griewank and Walther 2000, proposition 1). 10 steps
    in 3 slots: 15. The n - 1 forwards of the first sweep are in it.
    """
    most = sweeps(steps, slots)
    return most * steps - (comb(slots + most, slots + 1))


def extra_forwards(steps: int, peak: int) -> int:
    """The least extra forwards of a step over ``steps`` equal segments at a peak of ``peak`` states.

    Revolve with peak - 1 slots, less its first sweep. 64 segments: 357 at 3, 195 at 4, 84 at 8, 48 at 16.
    """
    return forwards(steps, peak - 1) - (steps - 1)


def balanced_slots(steps: int) -> int:
    """The least number of slots that needs no more sweeps than it has slots: memory and time grow alike, like log n."""
    if steps < 1:
        raise PlannerMismatch(f"{steps} steps: there must be one")
    slots = 0
    while most_steps(slots, slots) < steps:
        slots += 1
    return slots


def advance(steps: int, slots: int) -> int:
    """How many steps to run before the next state is stored: the longest of the ways that are all equally good.

    What is left behind must not need more than t sweeps with all the slots, nor what lies ahead with one less, and
    neither may be so short that the other has to make up for it.
    """
    most = sweeps(steps, slots)
    return min(most_steps(slots, most - 1), steps - (most_steps(slots - 1, most - 1) if slots > 1 else 1))


@dataclass(frozen=True)
class Binomial(Planner):
    """Revolve's schedule with ``slots`` stored states as spans inside spans, on every run of segments that can be
    recomputed; the others are kept.

    ``slots=None``: the fastest that fits of all numbers of slots up to 32 and of every tenth part more beyond, as far
    as they need at most 100 sweeps. Raises :class:`PlannerMismatch` if given slots are less than one or need more
    sweeps. A plan with spans is for executors that can run them. Cost: a walk of :func:`forwards` actions for each.
    """

    slots: int | None = None

    nested = True
    options = False
    rules = RULES
    papers = (
        'Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic '
        'differentiation", 1992',
        'Griewank and Walther, "Algorithm 799: Revolve", 2000',
    )
    validity = "equal segments that retain nothing but their kept input, timeline rule; else a baseline"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        longest = max((len(run) for run in _runs(problem)), default=1)
        if self.slots is not None and (self.slots < 1 or sweeps(longest, self.slots) > MOST_SWEEPS):
            raise PlannerMismatch(f"{self.label}: {longest} segments take one slot, and at most {MOST_SWEEPS} sweeps")
        every = _slots(longest) if self.slots is None else (self.slots,)
        pool = fastest_first((binomial_spans(problem, slots) for slots in every), problem)
        return pick(pool, budget_bytes, label=self.label, lower_bound=least_seconds(problem))


def _slots(steps: int) -> Iterator[int]:
    """From all that ``steps`` can use (nothing is recomputed) down to one, or to what takes too many sweeps."""
    slots = max(steps - 1, 1)
    while slots >= 1 and sweeps(steps, slots) <= MOST_SWEEPS:
        yield slots
        slots -= max(1, (slots - ALL_SLOTS) // 10)


def _runs(problem: Problem) -> list[list[int]]:
    """The runs of neighbouring segments that can be recomputed."""
    can = enumerate(recomputable(problem))
    return [[i for _, i in run] for _, run in groupby(can, key=lambda pair: pair[1] - pair[0])]


def binomial_spans(problem: Problem, slots: int) -> Choices:
    """Revolve's schedule with ``slots`` slots for every run of segments that can be recomputed; the others are kept."""
    segments = problem.chain.segments
    choices: list[Choice] = []

    def keep(start: int, stop: int) -> Iterator[Choice]:
        return (Choice(i, i + 1, kept(segments[i])) for i in range(start, stop))

    def reverse(start: int, stop: int, free: int) -> Iterator[Choice]:
        """The items of a range with ``free`` slots beside what its first item holds."""
        while stop - start > free + 1:
            steps = advance(stop - start, free)
            inner = tuple(reverse(start, start + steps, free))
            yield inner[0] if steps == 1 else Choice(start, start + steps, RECOMPUTE, inner)
            start, free = start + steps, free - 1
        yield from keep(start, stop)

    for run in _runs(problem):
        choices += keep(choices[-1].stop if choices else 0, run[0])
        choices += reverse(run[0], run[-1] + 1, slots)
    return (*choices, *keep(choices[-1].stop if choices else 0, len(segments)))
