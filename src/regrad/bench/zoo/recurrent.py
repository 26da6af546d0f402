"""A language model of stacked LSTMs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regrad.bench.zoo.data import VOCABULARY, text
from regrad.bench.zoo.model import BENCH, SMALL, Model


class LSTM(nn.Module):
    """A language model of stacked one-layer LSTMs with dropout between."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _lstm(batch: int, length: int, **sizes: int) -> tuple[nn.Module, Any]:
    return LSTM(**sizes), text(batch, length)


MODELS = (
    Model(
        "lstm",
        "stacked LSTMs with dropout between, over bytes of text",
        _lstm,
        {
            SMALL: {"width": 64, "layers": 4, "batch": 8, "length": 64},
            BENCH: {"width": 512, "layers": 5, "batch": 16, "length": 128},
        },
        ("layers.*",),
    ),
)
