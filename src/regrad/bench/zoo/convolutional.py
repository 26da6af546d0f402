"""Networks of convolutions: residual blocks with group norm, a U-Net of them, a long chain with batch norm."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regrad.bench.zoo.data import digits
from regrad.bench.zoo.model import BENCH, SMALL, Model


class ResidualBlock(nn.Module):
    """Two convolutions with group norm around a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


class UNet(nn.Module):
    """Down and up with long skips, group norm, a denoising loss."""

    def __init__(self, channels: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(depth + 1)]
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.encoders = nn.ModuleList(nn.Sequential(ResidualBlock(w), ResidualBlock(w)) for w in widths[:-1])
        self.downs = nn.ModuleList(nn.Conv2d(a, b, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.middle = nn.Sequential(ResidualBlock(widths[-1]), ResidualBlock(widths[-1]))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.joins = nn.ModuleList(nn.Conv2d(2 * w, w, 1) for w in widths[:-1])
        self.decoders = nn.ModuleList(nn.Sequential(ResidualBlock(w), ResidualBlock(w)) for w in widths[:-1])
        self.out = nn.Conv2d(channels, 1, 1)

    def forward(self, noisy: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(noisy), []
        for encode, down in zip(self.encoders, self.downs, strict=True):
            x = encode(x)
            skips.append(x)
            x = down(x)
        x = self.middle(x)
        for level in reversed(range(len(skips))):
            x = self.joins[level](torch.cat([self.ups[level](x), skips[level]], 1))
            x = self.decoders[level](x)
        return F.mse_loss(self.out(x), clean)


class BatchNormBlock(nn.Module):
    """Two convolutions with batch norm around a skip; the activations write in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        result: torch.Tensor = self.relu(y)
        return result


class ConvChain(nn.Module):
    """A stem, 8 residual blocks and an MLP of 17 layers: 25 links of very different cost."""

    def __init__(self, channels: int, width: int, blocks: int = 8, layers: int = 17) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(BatchNormBlock(channels) for _ in range(blocks)))
        widths = [channels * 16, *[width] * (layers - 1), 10]
        self.head = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(a, b), *([nn.ReLU(inplace=True)] if i < layers - 1 else []))
                for i, (a, b) in enumerate(itertools.pairwise(widths))
            )
        )
        for module in self.head.modules():
            if isinstance(module, nn.Linear):  # torch's default lets the signal die over 17 layers
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 4)
        return F.cross_entropy(self.head(x.flatten(1)), labels)


def _unet(batch: int, image: int, **sizes: int) -> tuple[nn.Module, Any]:
    clean, _ = digits(batch, image)
    return UNet(**sizes), (clean + 0.3 * torch.randn_like(clean), clean)


def _conv_chain(batch: int, image: int, **sizes: int) -> tuple[nn.Module, Any]:
    return ConvChain(**sizes), digits(batch, image)


MODELS = (
    Model(
        "batchnorm_conv",
        "residual net with batch norm and in-place activations, then an MLP of 17 layers: a conv chain",
        _conv_chain,
        {
            SMALL: {"channels": 16, "width": 64, "batch": 8, "image": 32},
            BENCH: {"channels": 64, "width": 256, "batch": 10, "image": 64},
        },
        ("blocks.*", "head.*"),
        stateful=True,
        rerun_diverges=True,
    ),
    Model(
        "unet",
        "U-Net with long skips and group norm that removes noise from digits",
        _unet,
        {
            SMALL: {"channels": 16, "depth": 2, "batch": 4, "image": 40},
            BENCH: {"channels": 40, "depth": 3, "batch": 8, "image": 96},
        },
        ("encoders.*", "middle", "decoders.*"),
    ),
)
