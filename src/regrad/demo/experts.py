"""A mixture of experts over bytes whose blocks hold state: routers that count tokens, and batch norm.

Nothing in it knows of regrad. A block is attention, the convolution module of Conformer (Gulati et al. 2020) and a
layer of experts of which each token takes one (Fedus et al. 2021). The router balances its experts without a loss of
its own: it prefers those that have had fewer tokens so far (after Wang et al. 2024). So a forward reads what the forwards
before it counted, and counts. All shapes are fixed by the batch; a router that chooses otherwise changes none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from regrad.demo.gpt import MLP, VOCABULARY, Attention, GPTConfig, initialise

_JITTER = 0.01
_ROOM = 1.25  # places of an expert, over those that it needs if all get as many tokens
_KERNEL = 7


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes of a :class:`MixtureOfExperts`: a GPT's, and how many experts a layer has."""

    body: GPTConfig = field(default_factory=GPTConfig)
    experts: int = 4


class Router(nn.Module):
    """Which expert a token goes to.

    ``tokens_per_expert``, a buffer of int64 [experts], and ``batches_seen``, a Python number, count what was routed in
    training.
    """

    tokens_per_expert: torch.Tensor

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, experts, bias=False)
        self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.int64))
        self.batches_seen = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For ``x`` [tokens, width]: the expert of each token, one-hot, and its probability, both [tokens, experts]."""
        if self.training:
            x = x * torch.empty_like(x).uniform_(1 - _JITTER, 1 + _JITTER)
        probabilities = F.softmax(self.score(x), dim=-1)
        load = self.tokens_per_expert / self.tokens_per_expert.sum().clamp(min=1)
        chosen = F.one_hot((probabilities - load).argmax(dim=-1), len(load))
        if self.training:
            self.tokens_per_expert += chosen.sum(dim=0)
            self.batches_seen += 1
        return chosen, chosen * probabilities


class Experts(nn.Module):
    """MLPs of which each token takes one. A token for which its expert has no place left passes by all of them."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self.router = Router(config.body.width, config.experts)
        self.experts = nn.ModuleList(MLP(config.body) for _ in range(config.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are [batch, sequence, width]."""
        tokens = x.flatten(0, 1)
        chosen, weights = self.router(tokens)
        room = int(_ROOM * len(tokens) / len(self.experts))
        # One place more than there is room for, and cut off: a token that does not fit has no place.
        places = ((chosen.cumsum(dim=0) - 1) * chosen).sum(dim=-1).clamp(max=room)
        places = F.one_hot(places, room + 1)[:, :room]
        sent = (chosen[:, :, None] * places[:, None, :]).to(x.dtype)
        inputs = torch.einsum("tep,tw->epw", sent, tokens)
        outputs = torch.stack([expert(part) for expert, part in zip(self.experts, inputs, strict=True)])
        mixed: torch.Tensor = torch.einsum("tep,te,epw->tw", sent, weights, outputs)
        return mixed.view_as(x)


class Convolution(nn.Module):
    """Mixes neighbouring places, channel by channel, never a later place into an earlier one; with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 2 * width)
        self.depthwise = nn.Conv1d(width, width, _KERNEL, groups=width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are [batch, sequence, width]."""
        channels = F.pad(F.glu(self.into(x), dim=-1).transpose(1, 2), (_KERNEL - 1, 0))
        mixed = F.silu(self.norm(self.depthwise(channels)))
        result: torch.Tensor = self.out(mixed.transpose(1, 2))
        return result


class Block(nn.Module):
    """Attention, convolution and experts, each behind a layer norm and around it a residual connection."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        width = config.body.width
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(config.body)
        self.norm_convolution = nn.LayerNorm(width)
        self.convolution = Convolution(width)
        self.norm_experts = nn.LayerNorm(width)
        self.experts = Experts(config)
        self.dropout = nn.Dropout(config.body.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are [batch, sequence, width]."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        x = x + self.dropout(self.convolution(self.norm_convolution(x)))
        result: torch.Tensor = x + self.dropout(self.experts(self.norm_experts(x)))
        return result


class MixtureOfExperts(nn.Module):
    """Bytes in, a score for each next byte out."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        width = config.body.width
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(config.body.sequence, width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.body.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` [batch, sequence] of int64 below 256; the result is [batch, sequence, 256]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores
