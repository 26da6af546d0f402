"""Arithmetic of advice: what a change to the parameters' memory makes of a step, alone and on top of another change.

A way is one manner of running forward and backward (as it is, under a plan, in micro-batches, …) with its floor: the
highest moment before the optimizer's step and what is always there. A swap changes what is always there (another
optimizer, shards). A swap on a way is a pair, and its peak follows from the two.

Sources: ZeRO stages and what they move, Rajbhandari et al. 2020 (sections 5 and 7); link rates, PCI-SIG's raw rates of
16 lanes by generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from regrad.core.advice import OPTIMIZER, OTHER_TRAINING, RESULTS, SAME_BUT_ROUNDING, SHARDING, Suggestion
from regrad.memory.remedies import Floor

LEAST_GAIN_RATIO = 0.01
"""A change that lowers the peak by less, and does not make it fit, is of no use: predictions are no better than that."""
LINK_BYTES_PER_SECOND = {
    "t4": 16e9, "v100-16gb": 16e9, "v100-32gb": 16e9, "h100-80gb": 64e9, "h100-pcie-80gb": 64e9, "h200": 64e9,
}  # fmt: skip
"""PCI Express of the devices that are not of generation 4, one way: generations 3 and 5."""
LINK_DEFAULT, LINK_SHARE = 32e9, 0.8
"""Generation 4, and what a copy from pinned memory usually reaches of it."""


@dataclass(frozen=True)
class Way:
    """One manner of running the step's forward and backward; ``kinds`` is empty for the step as it is.

    body_seconds  of forward and backward, everything that the change adds included
    timed         they can be compared with those of the step as it is
    """

    kinds: tuple[str, ...]
    what: str
    how: str
    floor: Floor
    body_seconds: float
    by: str
    result: str
    not_fixed: str
    moved_bytes: int = 0
    at_most: bool = False
    timed: bool = True

    @property
    def peak_bytes(self) -> int:
        """Peak of the step run this way."""
        return self.floor.peak()


@dataclass(frozen=True)
class Swap:
    """A change to what is always there.

    optimizer_bytes, step_bytes  of the optimizer's state and of what its step makes for a moment, afterwards
    optimizer_seconds            of its step; None if not known, which leaves the step's time unknown too
    weights_saved, gradients_saved   bytes that are elsewhere
    """

    kind: str
    what: str
    how: str
    optimizer_bytes: int
    step_bytes: int
    optimizer_seconds: float | None
    result: str
    not_fixed: str
    weights_saved: int = 0
    gradients_saved: int = 0
    moved_bytes: int = 0
    by: str = "rule"

    def peak(self, floor: Floor) -> int:
        """Peak of a step with this change, run in a way that has ``floor``."""
        return floor.peak(
            optimizer_bytes=self.optimizer_bytes,
            step_bytes=self.step_bytes,
            weights_saved=self.weights_saved,
            gradients_saved=self.gradients_saved,
        )

    def freed_bytes(self, floor: Floor) -> int:
        """How much lower every moment before the optimizer's step is."""
        return floor.optimizer_bytes - self.optimizer_bytes + self.weights_saved


@dataclass(frozen=True, slots=True)
class Scale:
    """What suggestions are measured by: the budget, and the seconds of the step as it is and of its optimizer."""

    budget_bytes: int
    eager_seconds: float
    optimizer_seconds: float

    def ratio(self, way: Way, optimizer_seconds: float | None) -> float | None:
        """Step time over the step's as it is."""
        if optimizer_seconds is None or self.eager_seconds <= 0 or not way.timed:
            return None
        return (way.body_seconds + optimizer_seconds) / self.eager_seconds

    def alone(self, way: Way) -> Suggestion:
        """A way as a suggestion."""
        return Suggestion(
            way.kinds, way.what, way.how, way.peak_bytes, way.by, self.ratio(way, self.optimizer_seconds),
            way.peak_bytes <= self.budget_bytes, way.result, way.not_fixed, way.moved_bytes, way.at_most,
        )  # fmt: skip

    def with_swap(self, way: Way, swap: Swap) -> Suggestion:
        """A swap on a way; the way of the step as it is makes it a suggestion by itself."""
        peak = swap.peak(way.floor)
        alone = not way.kinds
        worst = max((way.result, swap.result), key=RESULTS.index)
        return Suggestion(
            kinds=(*way.kinds, swap.kind),
            what=swap.what if alone else f"{way.what}; {swap.what}",
            how="; ".join(how for how in (way.how, swap.how) if how),
            predicted_peak_bytes=peak,
            predicted_by=swap.by if alone or swap.by == way.by else f"{way.by} and {swap.by}",
            step_ratio=self.ratio(way, swap.optimizer_seconds),
            fits=peak <= self.budget_bytes,
            result=swap.result if alone else worst,
            not_fixed=swap.not_fixed if alone else f"{way.not_fixed}; {swap.not_fixed}",
            moved_bytes=way.moved_bytes + swap.moved_bytes,
            at_most=way.at_most,
        )


def shards(floor: Floor, devices: int) -> list[Swap]:
    """ZeRO stages 1 to 3 over ``devices`` devices. What stage 3 gathers of the weights while a layer runs is not counted."""
    found = []
    for stage in (1, 2, 3) if devices > 1 else ():
        gradients = floor.gradients_bytes - -(-floor.gradients_bytes // devices) if stage >= 2 else 0
        weights = floor.weights_bytes - -(-floor.weights_bytes // devices) if stage >= 3 else 0
        travelling = floor.gradients_bytes + floor.weights_bytes * (2 if stage == 3 else 1)
        held = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and weights"}
        found.append(
            Swap(
                SHARDING, f"{held[stage]} in {devices} shards (ZeRO stage {stage})",
                "torch.distributed.fsdp.fully_shard(model)" if stage == 3 else "ZeRO or FSDP of your trainer",
                -(-floor.optimizer_bytes // devices), -(-floor.step_bytes // devices), None, SAME_BUT_ROUNDING,
                "activations, which every device holds for its own batch"
                + ("" if stage == 3 else ", and the weights") + "; time over the links is not counted",
                weights, gradients, travelling * (devices - 1) // devices,
            )
        )  # fmt: skip
    return found


def sharded_optimizer(lighter: Swap, stage: Swap, devices: int) -> Swap:
    """Another optimizer, its state and its step in shards as ``stage`` has them over ``devices``."""
    return replace(
        stage,
        what=f"{lighter.what}; {stage.what}",
        how="; ".join(how for how in (lighter.how, stage.how) if how),
        optimizer_bytes=-(-lighter.optimizer_bytes // devices),
        step_bytes=-(-lighter.step_bytes // devices),
        result=max((lighter.result, stage.result), key=RESULTS.index),
        not_fixed=f"{lighter.not_fixed}; {stage.not_fixed}",
        by=lighter.by if lighter.by == stage.by else f"{lighter.by} and {stage.by}",
    )


def optimizer_swap(
    title: str, how: str, optimizer_bytes: int, step_bytes: int, seconds: float | None, by: str, result: str = ""
) -> Swap:
    """Another optimizer."""
    return Swap(
        OPTIMIZER, title, how, optimizer_bytes, step_bytes, seconds, result or OTHER_TRAINING,
        "activations and gradients; the learning rate has to be found again" if not result else "the optimizer's state",
        by=by,
    )  # fmt: skip


def is_of_use(one: Suggestion, peak_bytes: int) -> bool:
    """Whether a suggestion makes a step of ``peak_bytes`` fit, or lowers its peak by more than predictions are off."""
    return one.fits or one.predicted_peak_bytes < peak_bytes * (1 - LEAST_GAIN_RATIO)


def ranked(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """By :attr:`Suggestion.rank`."""
    return tuple(sorted(suggestions, key=lambda one: one.rank))


def choose(candidates: Sequence[Suggestion]) -> Suggestion | None:
    """The best of one kind: the first by rank; None of none."""
    return min(candidates, key=lambda one: one.rank, default=None)


def link_bytes_per_second(device: str) -> float:
    """Bytes per second between a device of the table and its host, one way."""
    return LINK_SHARE * LINK_BYTES_PER_SECOND.get(device, LINK_DEFAULT)
