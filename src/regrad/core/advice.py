"""What would make a step fit: changes with their price, changes that are of no use, known traps. Values, no framework."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.plan import PeakMoment
from regrad.core.timeline import Holder

FORMAT_VERSION = 1

PLAN, MICRO_BATCH, MIXED, OPTIMIZER, CHUNKED, OFFLOAD, SHARDING = KINDS = (
    "plan",
    "micro-batch",
    "mixed precision",
    "optimizer",
    "chunked loss",
    "offload",
    "sharding",
)

SAME_BYTES, SAME_BUT_ROUNDING, OTHER_ROUNDING, OTHER_TRAINING = RESULTS = (
    "same bytes",
    "same up to rounding",
    "lower precision",
    "other training",
)
"""What a change does to what the step computes, the mildest first."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change, or a pair of them, and the step that it gives.

    kinds                 one of :data:`KINDS`, or two
    what, how             what to do, in words and in code
    predicted_peak_bytes  of the changed step
    predicted_by          "trace": the changed step was recorded; "trace arithmetic": computed on the record of the step
                          as it is; "rule": bytes of an optimizer or a shard by its definition; "estimate": the record
                          with a part of it scaled
    step_ratio            seconds of the changed step over those of the step as it is; None where they are not known
    result                one of :data:`RESULTS`
    not_fixed             what stays as it is, and what it asks of the user
    moved_bytes           to and from a file, a host or other devices in one step
    at_most               the ratio is an upper bound
    """

    kinds: tuple[str, ...]
    what: str
    how: str
    predicted_peak_bytes: int
    predicted_by: str
    step_ratio: float | None
    fits: bool
    result: str
    not_fixed: str
    moved_bytes: int = 0
    at_most: bool = False

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """What fits before what does not; of what fits what computes the same, then the faster; else the lower peak."""
        if not self.fits:
            return True, False, float(self.predicted_peak_bytes)
        changed = RESULTS.index(self.result) > RESULTS.index(SAME_BUT_ROUNDING)
        known = self.step_ratio if self.step_ratio is not None else float("inf")
        return False, changed, known


@dataclass(frozen=True, slots=True)
class NoUse:
    """A change that does not lower this step's peak, the peak that it would have (None if it cannot be made), and why."""

    kind: str
    what: str
    predicted_peak_bytes: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Trap:
    """A known mistake that this step, or the process, makes.

    name     of the trap, such as "one checkpoint around everything"
    what     what was seen, with figures
    modules  those concerned, by name; empty if it is none in particular
    bytes    what it costs, as far as that was seen; 0 if it costs something else
    cure     what to do
    """

    name: str
    what: str
    modules: tuple[str, ...]
    bytes: int
    cure: str


@dataclass(frozen=True)
class Advice:
    """What to change so that a step fits its budget.

    peak_bytes      of the step as it is; ``peak_moment``, ``at_peak`` (bytes by category) and ``holders`` are those of
                    that peak
    eager_seconds   of the step as it is, by the record; 0 if operations could not be timed
    suggestions     what lowers the peak, by rank; ends with the cheapest pair where no single change fits
    no_use          what does not, with its figure
    verdict         the upshot in one sentence
    """

    budget_bytes: int
    peak_bytes: int
    predicted_by: str
    band_ratio: float
    eager_seconds: float
    fits: bool
    peak_moment: PeakMoment
    at_peak: dict[str, int]
    holders: tuple[Holder, ...]
    persistent_bytes: int
    device: str
    suggestions: tuple[Suggestion, ...] = ()
    no_use: tuple[NoUse, ...] = ()
    traps: tuple[Trap, ...] = ()
    verdict: str = ""
    notes: tuple[str, ...] = ()
    version: int = FORMAT_VERSION

    @property
    def best(self) -> Suggestion | None:
        """The first suggestion that fits; None if none does."""
        return next((one for one in self.suggestions if one.fits), None)

    def to_json(self) -> str:
        """The advice as JSON, to be read by :meth:`from_json`."""
        from regrad.core.codec import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str) -> Advice:
        """Read what :meth:`to_json` wrote. Raises :class:`regrad.core.errors.InvalidPlan` for anything else."""
        from regrad.core.codec import load
        from regrad.core.errors import InvalidPlan

        advice = load(cls, text)
        if advice.version != FORMAT_VERSION:
            raise InvalidPlan(f"the advice has format version {advice.version}, this regrad reads {FORMAT_VERSION}")
        return advice

    def __str__(self) -> str:
        from regrad.core.advice_text import advice_text

        return advice_text(self)
