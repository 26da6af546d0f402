"""What would make a step fit that does not, where the parameters' memory is the trouble: other optimizers, other types,
sharding. Each with the peak that it would have; what does not help is left out.

Only what is always there is changed: ``floor_bytes`` must already be the least that any recomputation reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from regrad.memory.optimizers import RULES, Shape, rule, state_bytes

WAYS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that a step can run in, and what of it is what, in bytes.

    working_bytes    the highest moment before the optimizer's step, under the plan that makes it least
    weights_bytes, gradients_bytes, optimizer_bytes, others_bytes   always there (gradients: at the end of the backward)
    step_bytes       what the optimizer's step makes for a moment; its moment is all of the above and these
    """

    working_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    others_bytes: int
    step_bytes: int

    def peak(
        self,
        *,
        optimizer_bytes: int | None = None,
        step_bytes: int | None = None,
        weights_saved: int = 0,
        gradients_saved: int = 0,
    ) -> int:
        """The peak with another state and step, and so much less of weights and gradients.

        How many gradients are there at the highest moment before the optimizer's step is not known, so that moment is
        not credited with any that are saved.
        """
        state = self.optimizer_bytes if optimizer_bytes is None else optimizer_bytes
        step = self.step_bytes if step_bytes is None else step_bytes
        always = self.weights_bytes + self.gradients_bytes + self.others_bytes - gradients_saved
        return max(self.working_bytes - self.optimizer_bytes + state, always + state + step) - weights_saved


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, the peak that it gives, and whether that fits."""

    what: str
    peak_bytes: int
    fits: bool


def remedies(floor: Floor, shapes: Sequence[Shape], dtype: str, usable_bytes: int) -> tuple[Remedy, ...]:
    """Changes that lower the floor, those that fit first, each kind from the mildest on.

    ``shapes`` are those of the trained parameters, ``dtype`` the weights' type by name.
    """
    now = floor.peak()
    found = [
        *_leaner_step(floor, shapes),
        *_lighter_optimizers(floor, shapes, dtype),
        *_sharding(floor, usable_bytes),
    ]
    better = [Remedy(what, peak, peak <= usable_bytes) for what, peak in found if peak < now]
    return tuple(sorted(better, key=lambda remedy: not remedy.fits))


def _leaner_step(floor: Floor, shapes: Sequence[Shape]) -> list[tuple[str, int]]:
    largest = max((math.prod(shape) for shape in shapes), default=0)
    total = sum(math.prod(shape) for shape in shapes) or 1
    one = floor.step_bytes * largest // total
    return [("the optimizer's step one parameter at a time (foreach=False)", floor.peak(step_bytes=one))]


def _lighter_optimizers(floor: Floor, shapes: Sequence[Shape], dtype: str) -> list[tuple[str, int]]:
    count = sum(math.prod(shape) for shape in shapes)
    tries = [("adamw", kind) for kind in ("fp32", "bf16")] + [("momentum", dtype), ("adafactor", dtype)]
    found = []
    for name, kind in [*tries[:2], ("adamw-8bit", "fp32"), *tries[2:], ("sgd", dtype)]:
        width = 4 if kind == "fp32" else 2
        state, step = state_bytes(name, shapes, kind), rule(name).step_copies * width * count
        if state < floor.optimizer_bytes:
            moments = "" if RULES[name].bits or not state else f" with its state in {kind}"
            found.append((f"{RULES[name].title}{moments}", floor.peak(optimizer_bytes=state, step_bytes=step)))
    return found


def _sharding(floor: Floor, usable_bytes: int) -> list[tuple[str, int]]:
    """Of each stage the fewest devices that are enough, or the most that are tried. What stage 3 gathers of the weights
    while a layer runs is not counted."""
    found = []
    for stage in (1, 2, 3):
        for ways in WAYS:
            gradients, weights = (
                size - -(-size // ways) if stage >= needed else 0
                for size, needed in ((floor.gradients_bytes, 2), (floor.weights_bytes, 3))
            )
            peak = floor.peak(
                optimizer_bytes=-(-floor.optimizer_bytes // ways),
                step_bytes=-(-floor.step_bytes // ways),
                weights_saved=weights,
                gradients_saved=gradients,
            )
            if peak <= usable_bytes or ways == WAYS[-1]:
                found.append((f"ZeRO stage {stage} over {ways} devices", peak))
                break
    return found
