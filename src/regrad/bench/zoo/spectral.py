"""A classifier under spectral norm: each use of a weight in training takes a step of power iteration in its buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from regrad.bench.zoo.data import digits
from regrad.bench.zoo.model import BENCH, SMALL, Model


class ConvBlock(nn.Module):
    """Two convolutions under spectral norm around a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (spectral_norm(nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.conv2(F.leaky_relu(self.conv1(F.leaky_relu(x, 0.1)), 0.1))
        return result


class LinearBlock(nn.Module):
    """A linear layer under spectral norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(self.linear(x), 0.1)


class LipschitzNet(nn.Module):
    """A classifier whose every layer has spectral norm 1 (Miyato et al. 2018); its scores are scaled up for the loss."""

    def __init__(self, channels: int, blocks: int, layers: int, scale: float = 10.0) -> None:
        super().__init__()
        self.scale = scale
        self.stem = spectral_norm(nn.Conv2d(1, channels, 3, padding=1))
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(blocks))
        self.layers = nn.ModuleList(LinearBlock(4 * channels) for _ in range(layers))
        self.out = spectral_norm(nn.Linear(4 * channels, 10))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        x = F.adaptive_avg_pool2d(x, 2).flatten(1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.scale * self.out(x), labels)


def _lipschitz_net(batch: int, image: int, **sizes: int) -> tuple[nn.Module, Any]:
    return LipschitzNet(**sizes), digits(batch, image)


MODELS = (
    Model(
        "spectral_norm",
        "classifier of convolutions and linear layers under torch's spectral_norm",
        _lipschitz_net,
        {
            SMALL: {"channels": 16, "blocks": 6, "layers": 4, "batch": 8, "image": 32},
            BENCH: {"channels": 64, "blocks": 8, "layers": 4, "batch": 12, "image": 64},
        },
        ("blocks.*", "layers.*"),
        stateful=True,
        rerun_diverges=True,
    ),
)
