"""Choices, plans and solutions.

A :class:`Choice` is the planner's language: which option each segment takes, spans nested inside spans. A
:class:`Plan` is what a user gets: the choices for one model, priced and explained, with the model's fingerprint. It
goes to JSON and back through :mod:`regrad.core.codec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from regrad.core.chain import KEEP, MOVED, RECOMPUTE, Chain
from regrad.core.errors import InvalidPlan

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """What happens to segments ``start`` … ``stop - 1``.

    Without ``inner`` it is one segment (``stop == start + 1``) and its option. With ``inner`` it is a span that keeps
    only its boundary and is run again as a whole; ``inner`` says what that second run keeps and covers the span.
    """

    start: int
    stop: int
    option: str
    inner: tuple[Choice, ...] = ()

    @property
    def is_span(self) -> bool:
        """Whether it is a span with a plan of its own."""
        return bool(self.inner)


Choices = tuple[Choice, ...]


def one_level(options: list[str] | tuple[str, ...]) -> Choices:
    """Choices of one option per segment, nothing nested."""
    return tuple(Choice(i, i + 1, option) for i, option in enumerate(options))


def leaves(choices: Choices) -> Iterator[Choice]:
    """The choices of single segments, in order, at whatever depth they stand."""
    ahead = list(reversed(choices))
    while ahead:
        choice = ahead.pop()
        if choice.is_span:
            ahead += reversed(choice.inner)
        else:
            yield choice


def check_choices(choices: Choices, chain: Chain, *, start: int = 0, stop: int | None = None) -> None:
    """Raise :class:`InvalidPlan` unless ``choices`` cover ``[start, stop)`` of ``chain`` once, in order, validly."""
    # innermost spans last; no recursion, for spans may nest a thousand deep
    ahead = [(iter(choices), start, len(chain) if stop is None else stop)]
    while ahead:
        rest, at, end = ahead.pop()
        choice = next(rest, None)
        if choice is None:
            if at != end:
                raise InvalidPlan(f"the choices end at segment {at} of {end}")
            continue
        if choice.start != at or choice.stop <= choice.start:
            raise InvalidPlan(f"the choice for segments {choice.start}..{choice.stop} stands where {at} should begin")
        if choice.stop > end:
            raise InvalidPlan(f"the choice for segments {choice.start}..{choice.stop} goes beyond segment {end}")
        _check_choice(choice, chain)
        ahead.append((rest, choice.stop, end))
        if choice.is_span:
            ahead.append((iter(choice.inner), choice.start, choice.stop))


def _check_choice(choice: Choice, chain: Chain) -> None:
    """The choice by itself, what stands inside a span apart."""
    if choice.is_span:
        if choice.option != RECOMPUTE:
            raise InvalidPlan(f"span {choice.start}..{choice.stop} has option {choice.option!r}, not {RECOMPUTE!r}")
        for segment in chain.segments[choice.start : choice.stop]:
            if not segment.can(RECOMPUTE):
                why = segment.reason or "it can only be kept"
                raise InvalidPlan(f"span {choice.start}..{choice.stop} holds segment {segment.name!r}: {why}")
    elif choice.stop != choice.start + 1:
        raise InvalidPlan(f"segments {choice.start}..{choice.stop} stand in one choice with nothing inside")
    else:
        chain.segments[choice.start].option(choice.option)


class Status(str, Enum):
    """How a planner ended: proved best, a plan without that proof, proved that none fits, or stopped at its limit."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Solution:
    """What a planner returns.

    ``plan`` is None only if INFEASIBLE (or LIMIT with nothing found). ``peak_bytes`` and ``added_seconds`` are
    :mod:`regrad.core.simulate`'s figures for it, ``lower_bound`` seconds below which no plan within the budget can
    be, and ``least_bytes`` the smallest budget that this planner can meet.
    """

    status: Status
    plan: Choices | None
    lower_bound: float = 0.0
    peak_bytes: int = 0
    added_seconds: float = 0.0
    least_bytes: int = 0
    planner: str = ""


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """Where in the step the peak is: ``phase`` (forward, backward, optimizer), module and operation."""

    phase: str
    module: str
    operation: str


@dataclass(frozen=True, slots=True)
class StatePlan:
    """State that a replay of a segment needs as it was: what it is, how it is kept, and what that costs.

    retained_bytes  from the segment's forward to its backward; neighbours that find the same version share them
    moved_bytes     copied out, in and back in one step
    written         whether the step writes it, so that keeping it matters
    chosen          whether the engine was chosen by the plan, which tells it to the segment
    reason          why this engine, in numbers, where there was a choice
    """

    name: str
    engine: str
    retained_bytes: int
    moved_bytes: int
    written: bool
    chosen: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """What a plan does with one segment, and why; ``module`` and ``call`` say which call of which module it is.

    moved_bytes, held_bytes, moved_seconds   of the plan's moves whose first save is in it: of the storages, what stands
                                             for them meanwhile, and the seconds, which ``added_seconds`` counts too
    """

    name: str
    option: str
    retained_bytes: int
    transient_bytes: int
    added_seconds: float
    reason: str = ""
    engine: str | None = None
    module: str = ""
    call: int = 0
    state: tuple[StatePlan, ...] = ()
    moved_bytes: int = 0
    held_bytes: int = 0
    moved_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RangePlan:
    """A stretch of torch calls that is recomputed: calls ``start`` … ``stop - 1`` of the model's forward, counted from 0.

    name           the modules of its first and last call; first and last are the calls themselves
    depth          how many ranges it stands inside: what it saves is kept in the replay of none of them
    added_seconds  of its own replay
    """

    start: int
    stop: int
    name: str
    first: str
    last: str
    depth: int
    added_seconds: float


@dataclass(frozen=True, slots=True)
class MovePlan:
    """What autograd saved of one storage, held in fewer bytes or in another place between forward and backward.

    saves          (torch call, which of the tensors that its nodes save) for all saves of the storage. Calls are counted
                   as in :class:`RangePlan`, saves of a call in the order in which saved-tensor hooks are given them
    how            "bits" and "signs" (one bit an element), "narrow" (a narrower integer type), "offload" (elsewhere)
    name           module and call that saved it first
    bytes          of the storage
    held_bytes     what stands for it meanwhile in the memory that the budget is about
    added_seconds  out and in
    """

    saves: tuple[tuple[int, int], ...]
    how: str
    name: str
    bytes: int
    held_bytes: int
    added_seconds: float


@dataclass(frozen=True)
class Plan:
    """A plan for one model, one batch shape and one optimizer, confirmed before it was handed over.

    predicted_peak_bytes  by the method ``predicted_by`` ("trace" or "fake trace"), good to ``band_ratio``
    eager_peak_bytes      the same figure for the step without a plan
    added_seconds         over ``eager_seconds``, the time of one eager step
    choices               the nested choices, in terms of ``segments``
    ranges                stretches of torch calls that are recomputed; ``calls`` names every torch call of the forward
                          that the plan was made on, so that another path is noticed
    moves                 saved tensors that are held in fewer bytes or in another place
    masks                 whether what dropout draws in those stretches is kept as bits instead of drawn again
    notes                 what the user should know: caches turned off, segments left out, what was not confirmed
    offload               where its moves go: "host" or a folder, as in the policy that it was made under; None if nowhere
    cache_off             the module that is called with use_cache=False while the plan is applied; None if none
    training              the mode that the model was in; in the other one the plan does nothing
    """

    fingerprint: str
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_by: str
    band_ratio: float
    peak_moment: PeakMoment
    eager_peak_bytes: int
    eager_peak_moment: PeakMoment
    persistent_bytes: int
    least_bytes: int
    added_seconds: float
    eager_seconds: float
    planner: str
    device: str
    gradients: str
    segments: tuple[SegmentPlan, ...]
    choices: Choices
    ranges: tuple[RangePlan, ...] = ()
    calls: tuple[str, ...] = ()
    masks: bool = False
    moves: tuple[MovePlan, ...] = ()
    notes: tuple[str, ...] = ()
    cache_off: str | None = None
    offload: str | None = None
    training: bool = True
    planning_seconds: float = 0.0
    solve_seconds: float = 0.0
    version: int = FORMAT_VERSION

    @property
    def step_ratio(self) -> float:
        """Predicted step time over the eager step's."""
        return 1 + self.added_seconds / self.eager_seconds if self.eager_seconds > 0 else 1.0

    @property
    def setting(self) -> str:
        """What it does, in a few words."""
        counts = {"ranges": len(self.ranges), "moves": len(self.moves)}
        parts = [f"{count} {what}" for what, count in counts.items() if count]
        return ", ".join(parts) or f"{len(self.recomputed)} segments"

    @property
    def recomputed(self) -> tuple[SegmentPlan, ...]:
        """The segments that run again, as a whole or in ranges."""
        return tuple(segment for segment in self.segments if segment.option not in (KEEP, MOVED))

    def to_json(self) -> str:
        """The plan as JSON, to be read by :meth:`from_json`."""
        from regrad.core.codec import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what :meth:`to_json` wrote. Raises :class:`InvalidPlan` for anything else."""
        from regrad.core.codec import load

        plan = load(cls, text)
        if plan.version != FORMAT_VERSION:
            raise InvalidPlan(f"the plan has format version {plan.version}, this regrad reads {FORMAT_VERSION}")
        return plan

    def __str__(self) -> str:
        from regrad.core.text import plan_text

        return plan_text(self)
