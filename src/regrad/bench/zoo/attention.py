"""Transformers written out: a GPT with dropout, a Llama-like model with fused attention, a vision transformer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regrad.bench.zoo.data import VOCABULARY, digits, text
from regrad.bench.zoo.model import BENCH, SMALL, Model


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[batch, length, width] to [batch, heads, length, width / heads]."""
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`split_heads`."""
    return x.transpose(1, 2).flatten(2)


class UnfusedAttention(nn.Module):
    """Causal attention with the weights written out: product, softmax, dropout, product."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        query, key, value = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(F.softmax(scores.masked_fill(future, -math.inf), dim=-1))
        result: torch.Tensor = self.out(join_heads(weights @ value))
        return result


class FusedAttention(nn.Module):
    """Attention by torch's fused kernel, without dropout."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: torch.Tensor = self.out(join_heads(mixed))
        return result


class MLP(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.gelu(self.up(x)))
        return result


class Block(nn.Module):
    """Pre-norm: attention and an MLP, each behind a layer norm and beside a skip, with dropout on both."""

    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp, self.dropout = attention, mlp, nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        result: torch.Tensor = x + self.dropout(self.mlp(self.norm_mlp(x)))
        return result


class GPT(nn.Module):
    """A byte model: learned positions, twelve blocks by default, an untied head."""

    def __init__(self, width: int, heads: int, length: int, layers: int = 12, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, UnfusedAttention(width, heads, dropout), MLP(width), dropout) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class RotaryAttention(nn.Module):
    """Causal fused attention with rotary positions and grouped key and value heads, no biases."""

    angles: torch.Tensor

    def __init__(self, width: int, heads: int, groups: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, depth = heads, groups, width // heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * depth, bias=False) for _ in range(2))
        frequencies = 10_000.0 ** (-torch.arange(0, depth, 2) / depth)
        self.register_buffer("angles", torch.arange(length)[:, None] * frequencies, persistent=False)

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate each pair of channels by the angle of its place."""
        angles = self.angles[: x.shape[2]]
        first, second = x.chunk(2, dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.turn(split_heads(self.query(x), self.heads))
        key = self.turn(split_heads(self.key(x), self.groups))
        key, value = (
            part.repeat_interleave(self.heads // self.groups, dim=1)
            for part in (key, split_heads(self.value(x), self.groups))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.out(join_heads(mixed))
        return result


class GatedMLP(nn.Module):
    """SwiGLU: one half of the wide layer gates the other."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class LlamaBlock(nn.Module):
    """Pre-norm by root mean square: rotary attention and a gated MLP."""

    def __init__(self, width: int, heads: int, groups: int, length: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = RotaryAttention(width, heads, groups, length)
        self.mlp = GatedMLP(width, 8 * width // 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        result: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return result


class LlamaLike(nn.Module):
    """A byte model of :class:`LlamaBlock` without dropout."""

    def __init__(self, width: int, heads: int, groups: int, length: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, groups, length) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """Patches of an image, a class token, blocks with full attention, a classifier."""

    def __init__(self, width: int, heads: int, layers: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        blocks = (Block(width, FusedAttention(width, heads, causal=False), MLP(width)) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1) + self.positions
        return F.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]), labels)


def _gpt(batch: int, length: int, **sizes: int) -> tuple[nn.Module, Any]:
    return GPT(length=length, **sizes), text(batch, length)


def _llama_like(batch: int, length: int, **sizes: int) -> tuple[nn.Module, Any]:
    return LlamaLike(length=length, **sizes), text(batch, length)


def _vit(batch: int, image: int, **sizes: int) -> tuple[nn.Module, Any]:
    return ViT(image=image, **sizes), digits(batch, image)


_GPT: Mapping[str, Mapping[str, Any]] = {
    SMALL: {"width": 64, "heads": 4, "batch": 4, "length": 64},
    BENCH: {"width": 288, "heads": 6, "batch": 3, "length": 256},
}
_LLAMA: Mapping[str, Mapping[str, Any]] = {
    SMALL: {"width": 96, "heads": 4, "groups": 2, "layers": 6, "batch": 4, "length": 64},
    BENCH: {"width": 320, "heads": 8, "groups": 4, "layers": 12, "batch": 4, "length": 256},
}
_VIT: Mapping[str, Mapping[str, Any]] = {
    SMALL: {"width": 96, "heads": 4, "layers": 6, "batch": 6, "image": 32, "patch": 4},
    BENCH: {"width": 320, "heads": 8, "layers": 8, "batch": 32, "image": 32, "patch": 4},
}

MODELS = (
    Model("gpt", "GPT with dropout, attention written out: softmax and dropout are operations of their own",
          _gpt, _GPT, ("blocks.*",)),
    Model("llama_like", "rotary positions, fused attention, gated MLP, no dropout", _llama_like, _LLAMA, ("layers.*",)),
    Model("vit", "vision transformer on patches of digits, fused attention, blocks in nn.Sequential",
          _vit, _VIT, ("blocks.*",)),
)  # fmt: skip
