"""Find the largest batch of a model under a budget, and train with it: micro-batches that add up to 32 samples."""

from __future__ import annotations

import torch
from torch import nn

import regrad.torch as rt
from regrad import format_bytes

EFFECTIVE_BATCH = 32


def make_model() -> nn.Module:
    """Two transformer layers; the same weights every time."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2)


def make_batch(batch_size: int) -> torch.Tensor:
    """A batch of the size that is asked for."""
    return torch.randn(batch_size, 32, 64)


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of a batch, a mean over its samples."""
    return model(batch).square().mean()


def make_step() -> rt.Step:
    """What the command line calls: regrad fit examples/fit.py:make_step --budget 3MB"""
    model = make_model()
    return rt.Step(model, loss=mean_square, optimizer=torch.optim.AdamW(model.parameters()), make_batch=make_batch)


def main() -> None:
    """Fit, apply the plan of the best size, and take one optimizer step of 32 samples in micro-batches."""
    step = make_step()
    found = rt.fit(step, budget="3 MB", effective_batch=EFFECTIVE_BATCH)
    print(found)

    best = found.best
    model, optimizer = step.model, step.optimizer
    rt.apply(model, best.plan)
    samples = make_batch(EFFECTIVE_BATCH)
    optimizer.zero_grad()
    for part in samples.split(best.micro_batch):
        loss = mean_square(model, part) * len(part) / EFFECTIVE_BATCH
        loss.backward()
    optimizer.step()
    print(
        f"\n{EFFECTIVE_BATCH} samples in micro-batches of {best.micro_batch}, within {format_bytes(found.budget_bytes)}"
    )


if __name__ == "__main__":
    main()
