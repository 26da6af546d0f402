"""A factory for the command line: regrad plan examples/tiny_gpt.py:make_step --budget 60%

Run as a script it plans the same step, trains it for a few steps and compares the losses with a run without a plan.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import regrad.torch as rt


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A byte-level language model; a batch is a tensor of bytes, the result its next-byte loss."""

    def __init__(self, width: int = 128, layers: int = 6, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores[:, :-1].reshape(-1, 256), ids[:, 1:].reshape(-1))


def make_step(batch: int = 8, sequence: int = 128) -> rt.Step:
    """What the command line calls; ``--batch`` and ``--sequence`` arrive here."""
    torch.manual_seed(0)
    model = TinyGPT(length=sequence)
    return rt.Step(model, torch.randint(256, (batch, sequence)), optimizer=torch.optim.AdamW(model.parameters()))


def main() -> None:
    """Train twice from the same start, without and with a plan."""
    eager = make_step()
    without = [float(eager()) for _ in range(5)]

    step = make_step()
    plan = rt.plan(step, budget="50%")
    print(plan)
    rt.apply(step.model, plan)
    planned = [float(step()) for _ in range(5)]

    print("losses without a plan", without)
    print("losses with the plan ", planned)
    print("equal to the bit:", without == planned)


if __name__ == "__main__":
    main()
