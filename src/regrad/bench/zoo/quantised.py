"""A vector-quantised autoencoder: codebooks follow what they encode, inside the forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regrad.bench.zoo.convolutional import ResidualBlock
from regrad.bench.zoo.data import digits
from regrad.bench.zoo.model import BENCH, SMALL, Model

_DEAD = 0.01
_EPSILON = 1e-5


class Quantiser(nn.Module):
    """The nearest code of each vector; in training the codes move to the running mean of what chose them.

    Running means as in van den Oord et al. 2017, appendix A.1, with their start corrected by the number of updates;
    a code that nothing chooses any more is placed on a vector of the batch (Zeghidour et al. 2021).
    """

    codes: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor

    def __init__(self, codes: int, width: int, decay: float = 0.9) -> None:
        super().__init__()
        self.decay, self.updates = decay, 0
        self.register_buffer("codes", torch.randn(codes, width) / width**0.5)
        self.register_buffer("counts", torch.zeros(codes))
        self.register_buffer("sums", torch.zeros(codes, width))

    @torch.no_grad()
    def choose(self, vectors: torch.Tensor) -> torch.Tensor:
        """Indices [vectors] of the nearest codes."""
        distances = self.codes.square().sum(dim=1) - 2 * vectors @ self.codes.T
        return distances.argmin(dim=1)

    @torch.no_grad()
    def follow(self, vectors: torch.Tensor, chosen: torch.Tensor) -> None:
        """Move the codes."""
        self.updates += 1
        uses = F.one_hot(chosen, len(self.codes)).to(vectors.dtype)
        self.counts.mul_(self.decay).add_(uses.sum(dim=0), alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(uses.T @ vectors, alpha=1 - self.decay)
        weight = 1 - self.decay**self.updates
        dead = self.counts / weight < _DEAD
        others = vectors[torch.randint(len(vectors), (len(self.codes),))]
        means = self.sums / (self.counts + _EPSILON)[:, None]
        self.codes.copy_(torch.where(dead[:, None], others, means))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes of ``x`` [batch, width, height, height], without a gradient, and the commitment loss."""
        vectors = x.permute(0, 2, 3, 1).flatten(0, 2)
        chosen = self.choose(vectors)
        found = F.embedding(chosen, self.codes)
        if self.training:
            self.follow(vectors.detach(), chosen)
        loss = F.mse_loss(vectors, found)
        return found.view(x.shape[0], *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2), loss


class Autoencoder(nn.Module):
    """Convolutions down, quantisers that each take what the ones before left over, convolutions up."""

    def __init__(self, channels: int, blocks: int, quantisers: int, codes: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, channels, 4, stride=2, padding=1)
        self.encoder = nn.ModuleList(ResidualBlock(channels) for _ in range(blocks))
        self.norm = nn.GroupNorm(8, channels)
        self.quantisers = nn.ModuleList(Quantiser(codes, channels) for _ in range(quantisers))
        self.decoder = nn.ModuleList(ResidualBlock(channels) for _ in range(blocks))
        self.up = nn.Sequential(nn.GroupNorm(8, channels), nn.Conv2d(channels, 4, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.down(images)
        for block in self.encoder:
            x = block(x)
        encoded = rest = self.norm(x)
        commitment = torch.zeros((), device=x.device)
        for quantiser in self.quantisers:
            found, loss = quantiser(rest)
            rest, commitment = rest - found, commitment + loss
        x = encoded - rest.detach()  # the sum of the codes; the gradient goes straight through to the encoder
        for block in self.decoder:
            x = block(x)
        return F.mse_loss(self.up(x), images) + 0.25 * commitment


def _autoencoder(batch: int, image: int, **sizes: int) -> tuple[nn.Module, Any]:
    return Autoencoder(**sizes), digits(batch, image)[0]


MODELS = (
    Model(
        "vq_autoencoder",
        "residual vector quantisation; codebooks, their running means and a counter move in the forward",
        _autoencoder,
        {
            SMALL: {"channels": 16, "blocks": 2, "quantisers": 4, "codes": 64, "batch": 10, "image": 48},
            BENCH: {"channels": 48, "blocks": 4, "quantisers": 4, "codes": 256, "batch": 8, "image": 128},
        },
        ("encoder.*", "quantisers.*", "decoder.*"),
        stateful=True,
        rerun_diverges=True,
    ),
)
