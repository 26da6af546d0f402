"""What the adapter's tests compare: bytes of everything that must match, and everything that must be left alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn

import regrad.torch as rt


def as_bytes(value: Any) -> Any:
    """Nested tensors as bytes, so that ``==`` is bit equality."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: as_bytes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_bytes(item) for item in value]
    return value


def train(model: nn.Module, batch: Any, *, steps: int = 3, seed: int = 7) -> dict[str, Any]:
    """Train a copy of nothing: ``model`` itself, for some AdamW steps; everything that must match, as bytes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = rt.Step(model, batch, optimizer=optimizer, gradients="fresh")
    torch.manual_seed(seed)
    random.seed(seed)
    losses = [as_bytes(step()) for _ in range(steps)]
    return {
        "losses": losses,
        "gradients": {name: as_bytes(p.grad) if p.grad is not None else None for name, p in model.named_parameters()},
        "state": as_bytes(dict(model.state_dict())),
        "optimizer": as_bytes(optimizer.state_dict()["state"]),
        "torch generator": as_bytes(torch.get_rng_state()),
        "python generator": random.getstate(),
    }


def forward_counter(model: nn.Module, names: list[str]) -> dict[str, int]:
    """Count runs of inner modules' forwards, replays included; put on the class-level forward, so that a plan sees nothing."""
    counts = dict.fromkeys(names, 0)
    modules = dict(model.named_modules())
    for name in names:
        module = modules[name]
        inner = module.forward

        def counting(*args: Any, _name: str = name, _inner: Any = inner, **kwargs: Any) -> Any:
            counts[_name] += 1
            return _inner(*args, **kwargs)

        module.forward = counting  # type: ignore[method-assign]
    return counts


def snapshot(step: rt.Step) -> dict[str, Any]:
    """All that planning must leave as it was."""
    model, optimizer = step.model, step.optimizer
    return {
        "tensors": as_bytes(dict([*model.named_parameters(), *model.named_buffers()])),
        "identities": [id(t) for t in [*model.parameters(), *model.buffers()]],
        "gradients": [None if p.grad is None else (id(p.grad), as_bytes(p.grad)) for p in model.parameters()],
        "versions": [t._version for t in [*model.parameters(), *model.buffers()]],
        "optimizer": None if optimizer is None else as_bytes(copy.deepcopy(optimizer.state_dict())),
        "batch": as_bytes(step.batch),
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "plain": {
            f"{name}.{key}": copy.deepcopy(value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, list))
        },
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "generators": (as_bytes(torch.get_rng_state()), random.getstate()),
        "ambient": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")),
    }
