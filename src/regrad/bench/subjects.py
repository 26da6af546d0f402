"""The models that predictions are tried on: seven kinds, with random weights and small real or random batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import regrad.torch as rt
from regrad.bench.zoo.convolutional import ResidualBlock, UNet
from regrad.bench.zoo.hugging_face import model_of
from regrad.bench.zoo.recurrent import LSTM


class ConvNet(nn.Module):
    """A residual net of three stages."""

    def __init__(self, channels: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(channels * 2**stage) for _ in range(blocks))) for stage in range(3)
        )
        self.downs = nn.ModuleList(nn.Conv2d(channels * 2**s, channels * 2 ** (s + 1), 2, stride=2) for s in range(2))
        self.head = nn.Linear(channels * 4, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for stage, blocks in enumerate(self.stages):
            x = blocks(x)
            if stage < 2:
                x = self.downs[stage](x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class GPT(nn.Module):
    """Torch's own pre-norm layers with a causal mask and dropout, and a tied head."""

    def __init__(self, layers: int = 12, width: int = 192, heads: int = 6, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _tokens(batch: int, length: int, vocabulary: int = 256) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length))


def _gpt() -> tuple[nn.Module, Any]:
    return GPT(), (_tokens(4, 128), _tokens(4, 128))


def _hugging_face(kind: str, **settings: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        if kind == "ViT":
            model = model_of(kind, "AutoModelForImageClassification", **settings)
            return model, {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}
        ids = _tokens(4, 128)
        return model_of(kind, "AutoModelForCausalLM", **settings), {"input_ids": ids, "labels": ids}

    return build


def _images(size: int = 32, count: int = 8) -> torch.Tensor:
    return torch.rand(count, 1, size, size)


@dataclass(frozen=True)
class Subject:
    """A model by name. ``band_ratio`` is what the prediction of its peak is held to; ``autocast`` runs it in bfloat16."""

    name: str
    build: Callable[[], tuple[nn.Module, Any]]
    band_ratio: float
    autocast: bool = False

    def step(self, gradients: str = "fresh") -> rt.Step:
        """A new step with SGD with momentum; the same one every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, batch = self.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return rt.Step(model, batch, _autocast_loss if self.autocast else None, optimizer, gradients=gradients)


def _autocast_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(*batch)
    return loss


SUBJECTS = (
    Subject("gpt", _gpt, 0.01),
    Subject("gpt bf16 autocast", _gpt, 0.01, autocast=True),
    Subject("gpt2", _hugging_face("GPT2", n_layer=8, n_embd=192, n_head=6, vocab_size=256, n_positions=128,
                                  bos_token_id=0, eos_token_id=0), 0.01),
    Subject("llama", _hugging_face("Llama", num_hidden_layers=8, hidden_size=192, intermediate_size=512,
                                   num_attention_heads=6, num_key_value_heads=3, vocab_size=256), 0.01),
    Subject("vit", _hugging_face("ViT", num_hidden_layers=8, hidden_size=192, intermediate_size=768,
                                 num_attention_heads=6, image_size=32, patch_size=4, num_labels=10), 0.01),
    Subject("conv net", lambda: (ConvNet(), (_images(), torch.randint(10, (8,)))), 0.02),
    Subject("u-net", lambda: (UNet(), (_images(), _images())), 0.02),
    Subject("lstm", lambda: (LSTM(), (_tokens(8, 64), _tokens(8, 64))), 0.02),
)  # fmt: skip
