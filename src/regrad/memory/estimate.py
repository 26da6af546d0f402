"""An estimate: what a step takes, by category, by block, by optimizer, training beside inference. A value and its words."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.plan import PeakMoment
from regrad.core.timeline import Holder
from regrad.memory.compare import Comparison
from regrad.memory.devices import Device

CATEGORIES = ("weights", "gradients", "optimizer", "buffers", "inputs", "activations", "temporaries")


@dataclass(frozen=True, slots=True)
class Usage:
    """The moment at which most is alive, in bytes: all of it, and by category. ``holders`` are the largest first.

    Under a formula ``temporaries`` are what the formula names; kernels may take more for themselves.
    """

    peak_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    activations_bytes: int
    temporaries_bytes: int
    peak_moment: PeakMoment
    holders: tuple[Holder, ...] = ()

    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category."""
        return {category: int(getattr(self, f"{category}_bytes")) for category in CATEGORIES}


@dataclass(frozen=True, slots=True)
class Block:
    """A block, or ``count`` of them that cost the same; bytes are those of one. ``activation_bytes`` is what it keeps
    from its forward to its backward."""

    name: str
    count: int
    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The same step with another optimizer: its state, what its step makes for a moment, and the peak; ``fits`` is None
    where no device was named."""

    name: str
    title: str
    optimizer_bytes: int
    master_bytes: int
    step_bytes: int
    parameter_memory_bytes: int
    peak_bytes: int
    fits: bool | None
    source: str


@dataclass(frozen=True)
class Estimate:
    """What a training step takes.

    method                  "trace" (a real step on a copy), "fake trace" or "formula"
    parameter_memory_bytes  weights + gradients + optimizer state (and master weights)
    reserved_peak_bytes     what the device's allocator would hold for it, segments included; None without a device
    band_ratio              how far measured peaks lay from estimates by this method on the CPU; None if nobody measured
    comparison              formula against trace, for one block; None where only one of the two applies
    """

    method: str
    dtype: str
    optimizer: str
    parameters: int
    parameter_memory_bytes: int
    training: Usage
    inference: Usage
    blocks: tuple[Block, ...]
    optimizers: tuple[Choice, ...]
    device: Device | None = None
    usable_bytes: int | None = None
    fits: bool | None = None
    reserved_peak_bytes: int | None = None
    band_ratio: float | None = None
    comparison: Comparison | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The training step's peak."""
        return self.training.peak_bytes

    def __str__(self) -> str:
        from regrad.memory.text import estimate_text

        return estimate_text(self)


def fits(peak_bytes: int, device: Device | None) -> bool | None:
    """Whether a peak is within what ``device`` leaves; None without one."""
    return None if device is None else peak_bytes <= device.usable_bytes
