"""What the demo found on a model that holds state: one row for each way to train it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from regrad.core.codec import plain
from regrad.core.plan import Plan

EAGER = "eager"
PLANNED = "planned"
TORCH = "torch's checkpoint"
ASSUMPTION = (
    "torch's checkpoint documents that it assumes a function that behaves the same on both runs. These blocks do not: "
    "what differs under it comes of a use outside that assumption, and is no bug in torch."
)
COMPARED = ("losses", "gradients", "weights", "optimizer", "buffers", "attributes", "generator")


@dataclass(frozen=True, slots=True)
class OtherValue:
    """A buffer or a plain attribute of a module that a run left with other bytes than the eager run.

    name                "buffer blocks.0.experts.router.tokens_per_expert" or "attribute blocks.0.experts.router.batches_seen"
    eager_sum, found_sum   sums over its elements, or the number itself; None for an attribute that is no number
    """

    name: str
    eager_sum: int | float | None
    found_sum: int | float | None

    @property
    def counted_twice(self) -> bool:
        """Whether it is a sum of whole numbers that came out as exactly twice the eager one."""
        return isinstance(self.eager_sum, int) and self.eager_sum != 0 and self.found_sum == 2 * self.eager_sum


@dataclass(frozen=True, slots=True)
class StateRow:
    """One way to train the model: ``name`` is "eager", "planned" or "torch's checkpoint" (non-reentrant).

    predicted_peak_bytes   by the plan, before anything was trained; None for torch's checkpoint, which predicts nothing
    measured_peak_bytes    of one step, by :func:`regrad.torch.measure`
    block_forwards         forwards of blocks in one step, counted as they ran; extra_forwards: over the eager step's
    replays                calls that regrad's engine ran again in one step, by its own count
    ..._identical          whether it has what the eager run has, bit for bit: the loss and all gradients of every step,
                           and what the last step left in weights, optimizer, buffers, plain attributes of modules and
                           torch's generator
    first_other_loss_step, first_other_gradients_step   the first step, from 1, with another loss or other gradients
    gradient_error_ratio   norm of the difference of all gradients over the norm of the eager ones in that step; 0 if none
    other_values           the buffers and attributes that differ; values: how many there are to compare
    """

    name: str
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    block_forwards: int
    extra_forwards: int
    replays: int
    losses: tuple[float, ...]
    losses_identical: bool
    gradients_identical: bool
    weights_identical: bool
    optimizer_identical: bool
    buffers_identical: bool
    attributes_identical: bool
    generator_identical: bool
    first_other_loss_step: int | None
    first_other_gradients_step: int | None
    gradient_error_ratio: float
    other_values: tuple[OtherValue, ...]
    values: int

    @property
    def differing(self) -> list[str]:
        """The names in COMPARED of what is not the eager run's."""
        return [what for what in COMPARED if not getattr(self, f"{what}_identical")]

    @property
    def bit_identical(self) -> bool:
        """Whether nothing differs."""
        return not self.differing

    def to_dict(self) -> dict[str, Any]:
        """Its fields and what follows from them, as plain values."""
        others = [{**asdict(value), "counted_twice": value.counted_twice} for value in self.other_values]
        return {**asdict(self), "other_values": others, "bit_identical": self.bit_identical}


@dataclass(frozen=True)
class StateResult:
    """The three runs, from one start and on the same batches. ``plan`` is the one of "planned"; torch's checkpoint is
    around the blocks that it recomputes.
    """

    model: str
    parameters: int
    steps: int
    budget: str
    plan: Plan
    rows: tuple[StateRow, ...]
    seconds: float

    def row(self, name: str) -> StateRow:
        """The row called ``name``."""
        return next(row for row in self.rows if row.name == name)

    @property
    def failures(self) -> list[str]:
        """What the planned run owes and did not do; empty if it did all. What torch's run left is shown, not judged."""
        planned, recomputed = self.row(PLANNED), len(self.plan.recomputed)
        missed = []
        if not recomputed:
            missed.append("its plan recomputes nothing, so nothing was shown")
        if planned.differing:
            missed.append(f"the planned run has other {', '.join(planned.differing)} than the eager run")
        if (planned.extra_forwards, planned.replays) != (recomputed, recomputed):
            missed.append(
                f"{recomputed} blocks are to be recomputed in a step; {planned.extra_forwards} ran again, and the engine "
                f"counted {planned.replays} replays"
            )
        if planned.measured_peak_bytes > self.plan.budget_bytes:
            missed.append(f"measured peak {planned.measured_peak_bytes:,} over the budget {self.plan.budget_bytes:,}")
        return [f"{self.model}: {line}" for line in missed]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; below the first level the fields of StateRow, OtherValue and Plan."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "steps": self.steps,
            "budget": self.budget,
            "budget_bytes": self.plan.budget_bytes,
            "bit_identical": self.row(PLANNED).bit_identical,
            "torch_bit_identical": self.row(TORCH).bit_identical,
            "torch_assumption": ASSUMPTION,
            "rows": [row.to_dict() for row in self.rows],
            "plan": plain(self.plan),
            "failures": self.failures,
            "seconds": self.seconds,
        }
