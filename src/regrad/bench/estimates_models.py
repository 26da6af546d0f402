"""Models of the estimates' benchmark that nothing else measures on: an autoencoder of images and a network on a graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from regrad.bench.zoo.convolutional import ResidualBlock


class Autoencoder(nn.Module):
    """Images to a code a quarter as wide and high and back, by strided convolutions and residual blocks."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 4, stride=2, padding=1)
        self.encoder = nn.Sequential(*(ResidualBlock(channels) for _ in range(blocks)))
        self.down = nn.Conv2d(channels, channels, 4, stride=2, padding=1)
        self.code = nn.Conv2d(channels, channels // 4, 1)
        self.widen = nn.Conv2d(channels // 4, channels, 1)
        self.up = nn.ConvTranspose2d(channels, channels, 4, stride=2, padding=1)
        self.decoder = nn.Sequential(*(ResidualBlock(channels) for _ in range(blocks)))
        self.out = nn.ConvTranspose2d(channels, 1, 4, stride=2, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        code = self.code(self.down(self.encoder(self.stem(images))))
        decoded = self.decoder(self.up(F.silu(self.widen(code))))
        return F.mse_loss(torch.sigmoid(self.out(decoded)), images)


class GraphLayer(nn.Module):
    """One round of messages: gathered along edges, passed through an MLP, scattered by addition, divided by the degree."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """``nodes`` [count, width] and ``edges`` [2, count]: from where, to where."""
        source, target = edges
        messages = self.message(torch.cat((nodes[source], nodes.index_select(0, target)), dim=1))
        total = torch.zeros_like(nodes).index_add_(0, target, messages.to(nodes.dtype))
        degree = torch.zeros(len(nodes), dtype=nodes.dtype, device=nodes.device)
        degree = degree.scatter_add_(0, target, torch.ones_like(target, dtype=nodes.dtype)).clamp(min=1.0)
        result: torch.Tensor = self.norm(nodes + self.update(torch.cat((nodes, total / degree[:, None]), dim=1)))
        return result


class GraphNetwork(nn.Module):
    """A classifier of nodes: rounds of :class:`GraphLayer` between two linear layers."""

    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        return F.cross_entropy(self.head(x), labels)
