"""Every plan, priced by walking its schedule: the oracle that the other planners are tested against.

No algebra and no pruning, on purpose: what it says rests on :func:`regrad.core.simulate.walk` alone. Bounds: one
level up to 10 segments, nested up to 6, and in both cases at most ``max_plans`` plans. With c options in every segment
there are 2c, 8c², 48c³, 352c⁴, 2,880c⁵ and 25,216c⁶ nested plans of 1 … 6 segments: 5,632 for two options and four
segments, 92,160 for five, and for six only chains of few options are within the bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from regrad.core.chain import RECOMPUTE, Chain, Problem
from regrad.core.errors import IllegalSchedule, PlannerMismatch
from regrad.core.plan import Choice, Choices, Solution, Status, one_level
from regrad.core.simulate import RULES
from regrad.planners.base import Planner, Priced, pick, price

ONE_LEVEL_SEGMENTS = 10
NESTED_SEGMENTS = 6


@dataclass(frozen=True)
class Exhaustive(Planner):
    """The best of all plans of one level, or with ``nested`` of all plans.

    A span whose replay is that same span again is left out: it only adds forwards; so are plans whose replays of a state
    cannot follow one another, which the walk refuses. Raises :class:`PlannerMismatch`
    beyond its bounds. Cost: one walk per plan. Not for use in earnest.
    """

    nested: bool = False
    max_plans: int = 100_000

    options = True
    rules = RULES
    papers = ("the definition: every plan, walked",)
    validity = "up to 10 segments of one level or 6 nested, and 100,000 plans"

    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        return self.choose(self.frontier(problem), budget_bytes)

    def prices(self, problem: Problem) -> list[Priced]:
        """Every plan, priced, the best first; :meth:`choose` answers any number of budgets from it."""
        return sorted(self._priced(problem), key=lambda priced: priced.rank)

    def frontier(self, problem: Problem) -> list[Priced]:
        """Of :meth:`prices` those that no other one matches in peak and seconds, which is all that ``choose`` needs.

        Plans are made and priced one by one: never more than the frontier is held.
        """
        best: list[Priced] = []
        for new in self._priced(problem):
            at = bisect_left(best, new.rank, key=lambda priced: priced.rank)
            if (at and best[at - 1].peak_bytes <= new.peak_bytes) or (best[at : at + 1] and best[at].rank == new.rank):
                continue
            beaten = at
            while beaten < len(best) and best[beaten].peak_bytes >= new.peak_bytes:
                beaten += 1
            best[at:beaten] = [new]
        return best

    def _priced(self, problem: Problem) -> Iterator[Priced]:
        """Every plan that is legal; one with replays from a shared log need not be."""
        may_be_illegal = problem.shares_log
        for plan in self._plans(problem):
            try:
                yield price(plan, problem)
            except IllegalSchedule:
                if not may_be_illegal:
                    raise

    def _plans(self, problem: Problem) -> Iterator[Choices]:
        self.check(problem)
        self._refuse_large(problem.chain)
        return all_nested(problem.chain) if self.nested else all_one_level(problem.chain)

    def choose(self, prices: list[Priced], budget_bytes: int) -> Solution:
        """What this planner answers for ``budget_bytes``, given its own :meth:`prices` or :meth:`frontier`."""
        return pick(prices, budget_bytes, label=self.label, status=Status.OPTIMAL)

    def _refuse_large(self, chain: Chain) -> None:
        most = NESTED_SEGMENTS if self.nested else ONE_LEVEL_SEGMENTS
        if len(chain) > most:
            kind = "nested" if self.nested else "one-level"
            raise PlannerMismatch(f"{self.label} takes {most} segments in {kind} plans, this chain has {len(chain)}")
        count = count_plans(chain, nested=self.nested)
        if count > self.max_plans:
            raise PlannerMismatch(f"{self.label} takes {self.max_plans:,} plans, this chain has {count:,}")


def all_one_level(chain: Chain) -> Iterator[Choices]:
    """Every plan of one level, keep before recompute where the options stand so."""
    for names in product(*([option.name for option in segment.options] for segment in chain.segments)):
        yield one_level(names)


def all_nested(chain: Chain) -> Iterator[Choices]:
    """Every plan at any depth, without spans whose only content is a span of the same segments."""

    @cache
    def covering(start: int, stop: int) -> tuple[Choice, ...]:
        """Every single choice that covers exactly these segments."""
        single = [Choice(start, stop, o.name) for o in chain.segments[start].options] if stop == start + 1 else []
        if not all(segment.can(RECOMPUTE) for segment in chain.segments[start:stop]):
            return tuple(single)
        contents = [(choice,) for choice in single] + list(split(start, stop))
        return (*single, *(Choice(start, stop, RECOMPUTE, inner) for inner in contents))

    @cache
    def split(start: int, stop: int) -> tuple[Choices, ...]:
        """Every plan of these segments that has two choices or more."""
        return tuple(
            (first, *rest)
            for middle in range(start + 1, stop)
            for first in covering(start, middle)
            for rest in plans(middle, stop)
        )

    @cache
    def plans(start: int, stop: int) -> tuple[Choices, ...]:
        return (*((choice,) for choice in covering(start, stop)), *split(start, stop))

    yield from plans(0, len(chain))


def count_plans(chain: Chain, *, nested: bool) -> int:
    """How many plans there are, without making them."""
    if not nested:
        total = 1
        for segment in chain.segments:
            total *= len(segment.options)
        return total

    @cache
    def covering(start: int, stop: int) -> int:
        single = len(chain.segments[start].options) if stop == start + 1 else 0
        spans = all(segment.can(RECOMPUTE) for segment in chain.segments[start:stop])
        return single + (single + split(start, stop) if spans else 0)

    @cache
    def split(start: int, stop: int) -> int:
        return sum(covering(start, middle) * plans(middle, stop) for middle in range(start + 1, stop))

    def plans(start: int, stop: int) -> int:
        return covering(start, stop) + split(start, stop)

    return plans(0, len(chain))
