"""Small real models that the adapter's tests share."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int = 64, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Blocks in a ModuleList, tied head, scalar loss from (tokens, targets)."""

    def __init__(self, blocks: int = 6, width: int = 64, vocabulary: int = 64, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def gpt_batch(batch: int = 8, length: int = 32, vocabulary: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets."""
    return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))


class Residual(nn.Module):
    """A residual conv block; ``norm`` is "group" or "batch"."""

    def __init__(self, channels: int, norm: str, inplace: bool = False) -> None:
        super().__init__()
        make = (lambda: nn.GroupNorm(4, channels)) if norm == "group" else (lambda: nn.BatchNorm2d(channels))
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            make(),
            nn.ReLU(inplace),
            nn.Conv2d(channels, channels, 3, padding=1),
            make(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


class ConvNet(nn.Module):
    """A stem, residual blocks in a Sequential, a linear head."""

    def __init__(self, norm: str = "group", blocks: int = 4, channels: int = 16, inplace: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.layers = nn.Sequential(*(Residual(channels, norm, inplace) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(self.stem(images)).mean((2, 3))), labels)


def digits_batch(count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Real images: the first handwritten digits of scikit-learn, 1 × 8 × 8, in [0, 1]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images[:count], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target[:count])


class Shared(nn.Module):
    """One block called three times, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return x.square().mean()


@dataclass
class Bundle:
    """An output that is a dataclass."""

    hidden: torch.Tensor
    extra: dict[str, torch.Tensor]


class Bundling(nn.Module):
    """Takes a tensor, a keyword and a nested dict; returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, bundle: Bundle, *, scale: torch.Tensor, options: dict[str, tuple[torch.Tensor, float]]) -> Bundle:
        shift, factor = options["shift"]
        hidden = torch.tanh(self.linear(bundle.hidden) * scale + shift * factor)
        return Bundle(hidden, {"sum": hidden.sum(), "list": hidden * 2})


class BundleNet(nn.Module):
    """A loop over blocks whose arguments and results are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bundling() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bundle, total = Bundle(x, {}), torch.zeros(())
        for block in self.blocks:
            bundle = block(bundle, scale=self.scale, options={"shift": (x, 0.5)})
            total = total + bundle.extra["sum"] + bundle.extra["list"].mean()
        return total


class Stateful(nn.Module):
    """A block that does ``effect`` in its forward."""

    def __init__(self, effect: str) -> None:
        super().__init__()
        self.effect = effect
        self.linear = nn.Linear(16, 16)
        self.calls = 0
        self.seen: list[int] = []
        self.register_buffer("running", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.effect == "input":
            x = F.relu(x, inplace=True)
        y = torch.tanh(self.linear(x))
        if self.effect == "buffer":
            self.running.mul_(0.9).add_(y.detach().mean(0))
        elif self.effect == "data":
            self.running.data.add_(1)
        elif self.effect == "rebind":
            self.running = self.running + 1
        elif self.effect == "counter":
            self.calls += 1
        elif self.effect == "list":
            self.seen.append(len(self.seen))
        elif self.effect == "python random":
            y = y * random.random()
        elif self.effect == "numpy random":
            import numpy

            y = y * float(numpy.random.rand())
        return y + self.running


class StatefulNet(nn.Module):
    """Two plain blocks around one that has an effect."""

    def __init__(self, effect: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stateful("none"), Stateful(effect), Stateful("none")])
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
