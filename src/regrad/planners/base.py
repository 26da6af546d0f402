"""What every planner is, and the few steps that they share.

A planner is a frozen value with one call. It is pure: the same problem and budget give the same solution. What it can
take stands in three flags, and a problem outside them is refused, never approximated. Peaks and seconds in a solution
are those of :mod:`regrad.core.simulate`, whatever arithmetic a planner chose by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from regrad.core.chain import KEEP, RECOMPUTE, Problem, Segment
from regrad.core.errors import InfeasibleBudget, PlannerMismatch
from regrad.core.plan import Choices, Solution, Status, one_level
from regrad.core.simulate import simulate
from regrad.core.units import parse_bytes


class Planner(ABC):
    """A planner: call it with a problem and a budget in bytes.

    Subclasses give the three flags, what they rest on and ``_solve``; everything else is final.
    """

    @property
    @abstractmethod
    def nested(self) -> bool:
        """Whether its plans may hold spans."""

    @property
    @abstractmethod
    def options(self) -> bool:
        """Whether it chooses among all options of a segment; otherwise it uses keep and recompute alone."""

    @property
    @abstractmethod
    def rules(self) -> tuple[str, ...]:
        """The rules under which it can say whether a plan fits."""

    @property
    @abstractmethod
    def papers(self) -> tuple[str, ...]:
        """Where its algorithm comes from: authors, title, year; a few words where there is no paper."""

    @property
    @abstractmethod
    def validity(self) -> str:
        """For which problems its answer is what it claims."""

    @abstractmethod
    def _solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The solution for a problem that was checked and a budget of at least 0 bytes."""

    @final
    def __call__(self, problem: Problem, budget_bytes: int) -> Solution:
        """The best plan that this planner knows within ``budget_bytes``.

        Never raises for a budget that cannot be met: the status is INFEASIBLE, ``plan`` is None and ``least_bytes``
        is the smallest budget that this planner can meet (:func:`require` turns that into an exception). Raises
        :class:`PlannerMismatch` for a problem that it cannot take and :class:`InvalidQuantity` for a negative budget.
        """
        self.check(problem)
        return self._solve(problem, parse_bytes(budget_bytes))

    @final
    def check(self, problem: Problem) -> None:
        """Raise :class:`PlannerMismatch` unless the problem's rule is one of ``rules``."""
        if problem.rule not in self.rules:
            raise PlannerMismatch(
                f"{self.label} plans under the rule {' or '.join(self.rules)}, not {problem.rule!r}: "
                "choose another planner or another rule"
            )

    @final
    def cite(self) -> str:
        """The planner, its papers and the bound of its validity, as a line of text."""
        return f"{self.label}: {'; '.join(self.papers)}. Valid: {self.validity}."

    @property
    @final
    def label(self) -> str:
        """How solutions and reports call it: the class, and its settings where they are not the default."""
        fields = getattr(type(self), "__dataclass_fields__", {})
        shown = [f"{name}={getattr(self, name)!r}" for name, f in fields.items() if getattr(self, name) != f.default]
        return type(self).__name__ + (f"({', '.join(shown)})" if shown else "")


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan with the simulator's figures for it."""

    plan: Choices
    peak_bytes: int
    added_seconds: float

    @property
    def rank(self) -> tuple[float, int]:
        """Faster first; among equally fast plans the lower peak first."""
        return self.added_seconds, self.peak_bytes


def price(plan: Choices, problem: Problem) -> Priced:
    """``plan`` with its peak and seconds under the problem's rule."""
    simulation = simulate(plan, problem.chain, problem.rule, problem.states)
    return Priced(plan, simulation.peak_bytes, simulation.added_seconds)


def pick(
    pool: Sequence[Priced],
    budget_bytes: int,
    *,
    label: str,
    status: Status = Status.FEASIBLE,
    lower_bound: float | None = None,
) -> Solution:
    """The first of ``pool`` that fits, as a solution. ``lower_bound`` None means: the found plan's own seconds."""
    least = min(priced.peak_bytes for priced in pool)
    for priced in pool:
        if priced.peak_bytes <= budget_bytes:
            bound = priced.added_seconds if lower_bound is None else lower_bound
            return Solution(status, priced.plan, bound, priced.peak_bytes, priced.added_seconds, least, label)
    return infeasible(least, label)


def infeasible(least_bytes: int, label: str) -> Solution:
    """The solution that says: this planner needs ``least_bytes``."""
    return Solution(Status.INFEASIBLE, None, least_bytes=least_bytes, planner=label)


def fastest_first(plans: Iterable[Choices], problem: Problem) -> list[Priced]:
    """The plans priced and put in order of :attr:`Priced.rank`; equal ranks stay in the order given."""
    return sorted((price(plan, problem) for plan in plans), key=lambda priced: priced.rank)


def least_seconds(problem: Problem) -> float:
    """Seconds below which no plan of any kind can be: every segment at its cheapest option.

    Added up from the last segment to the first, as the simulator does, so that equal plans give equal floats.
    """
    total = 0.0
    for segment in reversed(problem.chain.segments):
        total += min(option.added_seconds for option in segment.options)
    return total


def kept(segment: Segment) -> str:
    """The option that stands for "leave it as it is": keep, or the first one where there is no keep."""
    return KEEP if segment.can(KEEP) else segment.options[0].name


def recomputable(problem: Problem) -> tuple[int, ...]:
    """The segments that have the recompute option, in order."""
    return tuple(i for i, segment in enumerate(problem.chain.segments) if segment.can(RECOMPUTE))


def recomputing(problem: Problem, which: Iterable[int]) -> Choices:
    """The one-level plan that recomputes the segments in ``which`` and keeps the rest."""
    chosen = set(which)
    return one_level([RECOMPUTE if i in chosen else kept(s) for i, s in enumerate(problem.chain.segments)])


def require(planner: Planner, problem: Problem, budget_bytes: int) -> Solution:
    """``planner(problem, budget_bytes)``, which must have a plan.

    Raises :class:`InfeasibleBudget` otherwise, with the least feasible bytes and the planner's plan for them.
    """
    solution = planner(problem, budget_bytes)
    if solution.plan is not None:
        return solution
    least = planner(problem, solution.least_bytes)
    if least.plan is None:
        raise PlannerMismatch(f"{planner.label} found no plan within {budget_bytes:,} bytes and knows of none beyond")
    phase, segment = simulate(least.plan, problem.chain, problem.rule, problem.states).moment
    where = f"the {phase} of segment {problem.chain.segments[segment].name!r}" if segment >= 0 else f"the {phase}"
    raise InfeasibleBudget(budget_bytes, solution.least_bytes, least.plan, f"{where}, by the {problem.rule} rule")
