"""A short GPT over bytes, the model of the demo: twelve blocks, about 12 million parameters.

Nothing in it knows of regrad. It is small in weights and large in activations: with dropout on the attention weights
torch has no fused kernel on CPU, so the attention matrices of every block are kept for the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a :class:`GPT`. ``sequence`` is the longest input, in bytes of text."""

    layers: int = 12
    width: int = 288
    heads: int = 6
    sequence: int = 256
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention with dropout on the attention weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.into = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are [batch, sequence, width]."""
        batch, sequence, width = x.shape
        query, key, value = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.into(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return result


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.into = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are [batch, sequence, width]."""
        result: torch.Tensor = self.out(F.gelu(self.into(x)))
        return result


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and around it a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are [batch, sequence, width]."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        result: torch.Tensor = x + self.dropout(self.mlp(self.norm_mlp(x)))
        return result


class GPT(nn.Module):
    """Bytes in, a score for each next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` [batch, sequence] of int64 below 256; the result is [batch, sequence, 256]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


def initialise(module: nn.Module) -> None:
    """Draw the weights of a linear layer or an embedding; biases are 0. For ``nn.Module.apply``."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
