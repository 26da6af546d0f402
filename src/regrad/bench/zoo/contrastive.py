"""Momentum contrast at several depths: a queue of negatives and a teacher, both written in the forward."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regrad.bench.zoo.convolutional import ResidualBlock
from regrad.bench.zoo.data import digits
from regrad.bench.zoo.model import BENCH, SMALL, Model


class NegativeQueue(nn.Module):
    """A ring of the keys of past batches, [entries, width]; the oldest are overwritten."""

    rows: torch.Tensor

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(entries, width), dim=1))
        self.position = 0

    def negatives(self) -> torch.Tensor:
        """What is in the queue now, as a copy: the backward needs it after rows were overwritten."""
        return self.rows.clone()

    def enqueue(self, keys: torch.Tensor) -> None:
        """Overwrite the oldest rows. The number of entries is a multiple of the batch."""
        self.rows[self.position : self.position + len(keys)] = keys
        self.position = (self.position + len(keys)) % len(self.rows)


class Encoder(nn.Module):
    """A residual block, and what of it is compared: one unit vector an image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.block = ResidualBlock(channels)
        self.project = nn.Linear(channels, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.block(x)
        return x, F.normalize(self.project(x.mean((2, 3))), dim=1)


class Level(nn.Module):
    """One depth: student, teacher and their contrast against the queue that all depths share."""

    def __init__(self, student: Encoder, queue: NegativeQueue, momentum: float = 0.99, heat: float = 0.1) -> None:
        super().__init__()
        self.student, self.teacher = student, copy.deepcopy(student).requires_grad_(False)
        self.queue, self.momentum, self.heat = queue, momentum, heat

    @torch.no_grad()
    def keys(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move the teacher towards the student, then run it."""
        for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            theirs.mul_(self.momentum).add_(ours, alpha=1 - self.momentum)
        result: tuple[torch.Tensor, torch.Tensor] = self.teacher(y)
        return result

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, keys = self.keys(y)
        x, queries = self.student(x)
        same = (queries * keys).sum(dim=1, keepdim=True)
        scores = torch.cat((same, queries @ self.queue.negatives().T), dim=1) / self.heat
        loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device))
        self.queue.enqueue(keys)
        return x, y, loss


class QueueEncoder(nn.Module):
    """A stem, then levels one after the other; the loss is the sum of their contrasts."""

    def __init__(self, channels: int, levels: int, width: int, entries: int) -> None:
        super().__init__()
        self.queue = NegativeQueue(entries, width)
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.levels = nn.ModuleList(Level(Encoder(channels, width), self.queue) for _ in range(levels))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        x, y, losses = self.stem(first), self.stem(second).detach(), []
        for level in self.levels:
            x, y, loss = level(x, y)
            losses.append(loss)
        return torch.stack(losses).sum()


def _queue_encoder(batch: int, image: int, **sizes: int) -> tuple[nn.Module, Any]:
    images, _ = digits(batch, image)
    views = (images.roll(shift, 3) + 0.1 * torch.randn_like(images) for shift in (-1, 1))
    return QueueEncoder(**sizes), tuple(views)


MODELS = (
    Model(
        "queue_encoder",
        "momentum contrast at several depths; queue and teacher are written in the forward",
        _queue_encoder,
        {
            SMALL: {"channels": 16, "levels": 6, "width": 32, "entries": 4096, "batch": 16, "image": 32},
            BENCH: {"channels": 80, "levels": 5, "width": 128, "entries": 131072, "batch": 16, "image": 64},
        },
        ("levels.*",),
        stateful=True,
        rerun_diverges=True,
    ),
)
