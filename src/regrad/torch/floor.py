"""What would make a step fit that no plan fits: the floor of a profile, and changes to what is always there."""

from __future__ import annotations

from regrad.core import trace as tr
from regrad.core.levels import Levels
from regrad.memory.remedies import Floor, Remedy, remedies
from regrad.torch.describe import UNSEEN_BYTES
from regrad.torch.estimate import DTYPES, state_sizes
from regrad.torch.profile import Profile


def floor_of(trace: tr.Trace, levels: Levels) -> Floor:
    """The highest moments of a step before its optimizer's and in it, and what is always there."""
    phases = [trace.operations[index].phase for index in levels.operations]
    first = phases.index(tr.OPTIMIZER) if tr.OPTIMIZER in phases else len(phases)
    weights, gradients, state = state_sizes(trace)
    ready = levels.before[first]
    return Floor(
        working_bytes=max(levels.during[:first], default=levels.before[0]) + UNSEEN_BYTES,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=state,
        others_bytes=ready - weights - gradients - state + UNSEEN_BYTES,
        step_bytes=max(levels.during[first:], default=ready) - ready,
    )


def what_would_fit(source: Profile, usable_bytes: int) -> tuple[Remedy, ...]:
    """Lighter optimizers, a leaner step and sharding, each with the peak that it would have. Cost: milliseconds.

    The highest moment before the optimizer's step is taken with every segment recomputed that can be; a plan may do a
    little better.
    """
    parameters = [p for p in source.rehearsal.step.model.parameters() if p.requires_grad]
    counts: dict[str, int] = {}
    for parameter in parameters:
        name = DTYPES.get(parameter.dtype, "fp32")
        counts[name] = counts.get(name, 0) + parameter.numel()
    dtype = max(counts, key=lambda name: counts[name])
    levels = source.levels(tuple(segment.options[-1].name for segment in source.chain.segments))
    floor = floor_of(source.arithmetic.trace, levels)
    return remedies(floor, [tuple(p.shape) for p in parameters], dtype, usable_bytes)


def model_state_bytes(source: Profile) -> int:
    """Weights, gradients and optimizer state."""
    return sum(state_sizes(source.arithmetic.trace))
