"""A small net that offloads everything, with all kinds of state, for steps that are disturbed."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from regrad.torch.execute import Taped, install
from regrad.torch.offload import Place
from regrad.torch.tape import CallCounter, Move


def net(seed: int = 0) -> nn.Sequential:
    """Batch norm and dropout: buffers and a generator that a step changes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid()
    )


def batch(rows: int = 512) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(3))


SAVES = {2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 0}
"""Calls of the net that save a tensor of the batch's size first."""


def planned(model: nn.Module, place: Place, *, rows: int = 512, reserve: bool = True) -> Taped:
    """Offload every activation of the net. With ``reserve`` the place is told how much that will be."""
    counter = CallCounter()
    with torch.random.fork_rng():
        twin, x = net(), batch(2)
        with counter:
            twin(x)
    size = rows * 64 * 4 if reserve else 0
    taped = Taped(
        (),
        counter.names,
        moves=[Move(((call, index),), "offload", bytes=size) for call, index in SAVES.items()],
        place=place,
    )
    install(model, training=True, taped=taped)
    return taped


def step(model: nn.Module, x: torch.Tensor) -> None:
    """One step of training, by plain descent."""
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


def files_in(folder: Path) -> list[str]:
    """What this process has open there, with or without a name."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith(f"{folder}/"):
            found.append(target)
    return found
