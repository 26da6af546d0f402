"""Dropout's draw kept as bits: what a replay multiplies by, instead of drawing it again.

The noise of dropout holds two values, zero and 1 / (1 - p), as wide as the data. Kept as one bit an element and unpacked
it is the same tensor to the bit; the replay is the product that dropout itself does. Drawing again costs more than all
other arithmetic of an attention core on a CPU.
"""

from __future__ import annotations

import torch

from regrad.torch.tape.codec import BITS, Packed, pack
from regrad.torch.tape.codec import seconds_per_element as codec_seconds

DROPOUT = "dropout"
"""The torch call whose draw can be kept: it saves its noise, and gives its input times the noise."""


class Mask:
    """The bits of a noise tensor, and the value that stands for a one."""

    __slots__ = ("bits", "size")

    def __init__(self, bits: Packed, size: torch.Size) -> None:
        self.bits, self.size = bits, size

    @classmethod
    def of(cls, noise: torch.Tensor) -> Mask | None:
        """The mask of ``noise``; ``None`` if it is not zero and one other value, dense and in main memory."""
        if noise.device.type != "cpu" or not noise.is_contiguous() or not noise.is_floating_point():
            return None
        bits = pack(BITS, noise.detach().view(-1))
        return cls(bits, noise.size()) if isinstance(bits, Packed) else None

    def noise(self) -> torch.Tensor:
        """The noise again."""
        return self.bits.unpack().view(self.size)


def masked(given: torch.Tensor, mask: Mask) -> torch.Tensor:
    """What dropout gave: the product that it computes."""
    return given * mask.noise()


def seconds_per_element() -> float:
    """Packing and unpacking one element, on this machine's processor. Measured once."""
    return codec_seconds(BITS)
