"""A spiking network: neurons leak, fire and keep their potential between calls, one call for each moment."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regrad.bench.zoo.data import digits
from regrad.bench.zoo.model import BENCH, SMALL, Model


class Fire(torch.autograd.Function):
    """1 above the threshold, else 0; its gradient is that of a fast sigmoid (Zenke & Ganguli 2018)."""

    @staticmethod
    def forward(ctx: Any, above: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(above)
        return (above > 0).to(above.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (above,) = ctx.saved_tensors
        result: torch.Tensor = gradient / (1 + 10 * above.abs()).square()
        return result


class Neurons(nn.Module):
    """Leaky integrate-and-fire. The potential is kept as an attribute; gradients flow through it over time."""

    def __init__(self, leak: float = 0.9, threshold: float = 1.0) -> None:
        super().__init__()
        self.leak, self.threshold = leak, threshold
        self.potential: torch.Tensor | None = None

    def forward(self, current: torch.Tensor) -> torch.Tensor:
        if self.potential is None:
            self.potential = torch.zeros_like(current)
        potential = self.leak * self.potential + current
        spikes: torch.Tensor = Fire.apply(potential - self.threshold)  # type: ignore[no-untyped-call]
        self.potential = potential - self.threshold * spikes.detach()
        return spikes


class SpikingBlock(nn.Module):
    """A convolution, group norm and neurons."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels_in, channels, 3, padding=1), nn.GroupNorm(8, channels)
        self.neurons = Neurons()

    def forward(self, spikes: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.neurons(self.norm(self.conv(spikes)))
        return result


class SpikingNet(nn.Module):
    """Blocks that see the same image at each moment; what the last one fires is counted and classified.

    Potentials live on into the next step without their history: backpropagation through time, truncated at steps.
    """

    def __init__(self, channels: int, blocks: int, moments: int) -> None:
        super().__init__()
        self.moments = moments
        self.blocks = nn.ModuleList(SpikingBlock(channels if i else 1, channels) for i in range(blocks))
        self.head = nn.Linear(channels * 16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros((), device=images.device)
        for _ in range(self.moments):
            x = images
            for block in self.blocks:
                x = block(x)
            scores = scores + self.head(F.adaptive_avg_pool2d(x, 4).flatten(1))
        for module in self.modules():
            if isinstance(module, Neurons) and module.potential is not None:
                module.potential = module.potential.detach()
        return F.cross_entropy(scores / self.moments, labels)


def _spiking(batch: int, image: int, **sizes: int) -> tuple[nn.Module, Any]:
    return SpikingNet(**sizes), digits(batch, image)


MODELS = (
    Model(
        "spiking",
        "leaky integrate-and-fire net; blocks are called once a moment and keep their potential as an attribute",
        _spiking,
        {
            SMALL: {"channels": 16, "blocks": 4, "moments": 4, "batch": 6, "image": 24},
            BENCH: {"channels": 128, "blocks": 4, "moments": 8, "batch": 3, "image": 48},
        },
        ("blocks.*",),
        stateful=True,
        rerun_diverges=True,
    ),
)
