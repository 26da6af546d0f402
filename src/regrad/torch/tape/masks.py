"""Dropout's draw kept as bits: what a replay multiplies by, instead of drawing it again.

The noise of dropout holds two values, zero and 1 / (1 - p), as wide as the data. Kept as one bit an element and unpacked
it is the same tensor to the bit; the replay is the product that dropout itself does. Drawing again costs more than all
other arithmetic of an attention core on a CPU.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from regrad.torch.regions.ambient import unseen
from regrad.torch.regions.kept import Kept

DROPOUT = "dropout"
"""The torch call whose draw can be kept: it saves its noise, and gives its input times the noise."""


class Mask:
    """The bits of a noise tensor, and the value that stands for a one."""

    __slots__ = ("bits", "dtype", "size", "value")

    def __init__(self, bits: Kept, size: torch.Size, dtype: torch.dtype, value: Any) -> None:
        self.bits, self.size, self.dtype, self.value = bits, size, dtype, value

    @classmethod
    def of(cls, noise: torch.Tensor) -> Mask | None:
        """The mask of ``noise``; ``None`` if it is not zero and one other value, dense and in main memory."""
        if (
            noise.device.type != "cpu"
            or not noise.is_contiguous()
            or not noise.is_floating_point()
            or not noise.numel()
        ):
            return None
        if isinstance(noise, FakeTensor):
            bits = noise.new_empty((noise.numel() + 7) // 8, dtype=torch.uint8)
            return cls(Kept(bits, bits.nbytes), noise.size(), noise.dtype, None)
        with unseen(), torch.no_grad():
            ones, value = noise != 0, noise.max()
            # exact or not at all: the bits must give back what is there
            if not torch.equal(ones, noise == float(value)):
                return None
            bits = torch.from_numpy(numpy.packbits(ones.reshape(-1).numpy()))
        return cls(Kept(bits, bits.nbytes), noise.size(), noise.dtype, value)

    def noise(self) -> torch.Tensor:
        """The noise again."""
        bits: torch.Tensor = self.bits.data
        if isinstance(bits, FakeTensor):
            return bits.new_empty(self.size, dtype=self.dtype)
        with unseen(), torch.no_grad():
            count = self.size.numel()
            ones = torch.from_numpy(numpy.unpackbits(bits.numpy(), count=count))
            return torch.mul(ones.view(self.size), self.value)  # one pass: the value's type is the result's


def masked(given: torch.Tensor, mask: Mask) -> torch.Tensor:
    """What dropout gave: the product that it computes."""
    return given * mask.noise()


@cache
def seconds_per_element() -> float:
    """Packing and unpacking one element, on this machine's processor; the fastest of a few tries on a million."""
    generator = torch.Generator().manual_seed(0)
    noise = (torch.rand(1 << 20, generator=generator) > 0.1).to(torch.float32)
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        mask = Mask.of(noise)
        assert mask is not None
        mask.noise()
        best = min(best, time.process_time() - began)
    return best / noise.numel()
