"""A mixture of experts whose routers count the tokens of each expert and keep their auxiliary loss as an attribute."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regrad.bench.zoo.attention import MLP, Block, FusedAttention
from regrad.bench.zoo.data import VOCABULARY, text
from regrad.bench.zoo.model import BENCH, SMALL, Model

_RECENT = 8


class Router(nn.Module):
    """One expert for each token, as many tokens for an expert as it has room for (Fedus et al. 2021).

    The auxiliary loss weighs the routing probabilities with the load of all tokens seen in training, which a buffer
    counts; ``aux_loss`` is read by the model after its blocks ran. ``recent_loads`` is for a log.
    """

    tokens_per_expert: torch.Tensor

    def __init__(self, width: int, experts: int, room: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, experts, bias=False)
        self.experts, self.room = experts, room
        self.register_buffer("tokens_per_expert", torch.zeros(experts))
        self.aux_loss: torch.Tensor | None = None
        self.recent_loads: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For ``x`` [tokens, width]: what goes where, 0 or 1, and the same weighted; both [tokens, experts, room]."""
        probabilities = F.softmax(self.score(x), dim=-1)
        chosen = F.one_hot(probabilities.argmax(dim=-1), self.experts).to(x.dtype)
        if self.training:
            self.tokens_per_expert += chosen.sum(dim=0)
            load = self.tokens_per_expert / self.tokens_per_expert.sum()
            self.aux_loss = self.experts * (load * probabilities.mean(dim=0)).sum()
            self.recent_loads = [*self.recent_loads[1 - _RECENT :], load]
        place = (chosen.cumsum(dim=0) - 1) * chosen
        fits = chosen * (place < self.room)
        # One place more than there is room for, and cut off: a token that does not fit has no place.
        slots = F.one_hot(place.sum(dim=-1).long().clamp(max=self.room), self.room + 1)[:, : self.room].to(x.dtype)
        sent = fits[:, :, None] * slots[:, None, :]
        return sent, sent * probabilities[:, :, None]


class Experts(nn.Module):
    """MLPs of which each token takes one."""

    def __init__(self, width: int, experts: int, room: int) -> None:
        super().__init__()
        self.router = Router(width, experts, room)
        self.experts = nn.ModuleList(MLP(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        sent, weights = self.router(tokens)
        inputs = torch.einsum("tec,tw->ecw", sent, tokens)
        outputs = torch.stack([expert(part) for expert, part in zip(self.experts, inputs, strict=True)])
        return torch.einsum("tec,ecw->tw", weights, outputs).view_as(x)


class MixtureOfExperts(nn.Module):
    """A byte model whose blocks have experts for MLPs; the routers' losses are added to its own."""

    def __init__(self, width: int, heads: int, layers: int, experts: int, tokens: int) -> None:
        super().__init__()
        room = tokens * 5 // (4 * experts)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            Block(width, FusedAttention(width, heads, causal=True), Experts(width, experts, room))
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        for module in self.modules():
            if isinstance(module, Router) and module.aux_loss is not None:
                loss = loss + 0.01 * module.aux_loss
        return loss


def _moe(batch: int, length: int, **sizes: int) -> tuple[nn.Module, Any]:
    return MixtureOfExperts(tokens=batch * length, **sizes), text(batch, length)


MODELS = (
    Model(
        "moe",
        "mixture of experts: routers count tokens in a buffer, keep an auxiliary loss and a list of recent loads",
        _moe,
        {
            SMALL: {"width": 64, "heads": 4, "layers": 4, "experts": 4, "batch": 5, "length": 64},
            BENCH: {"width": 224, "heads": 4, "layers": 6, "experts": 4, "batch": 6, "length": 256},
        },
        ("blocks.*",),
        stateful=True,
        rerun_diverges=True,
    ),
)
