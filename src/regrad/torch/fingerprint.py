"""Which model a plan is for: parameter and buffer names, shapes, dtypes, aliasing and the module classes' sources.

Never of values: a trained model has the fingerprint of the fresh one.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from regrad.core.plan import Plan
    from regrad.torch.step import Step


@lru_cache(maxsize=4096)
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        # Classes typed at a prompt or built at run time have no source; their name must do.
        return f"{kind.__module__}.{kind.__qualname__}"


def fingerprint(model: nn.Module) -> str:
    """SHA-256 in hex. Milliseconds for a model of a few hundred modules."""
    digest = hashlib.sha256()
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        owner = first.setdefault(id(tensor), name)
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|{owner}|{tensor.requires_grad}\n".encode())
    for name, module in model.named_modules(remove_duplicate=False):
        digest.update(f"{name}|{type(module).__module__}.{type(module).__qualname__}\n".encode())
    kinds: set[type] = {type(module) for module in model.modules()}
    for kind in sorted(kinds, key=lambda k: (k.__module__, k.__qualname__)):
        digest.update(_source(kind).encode())
    return digest.hexdigest()


def step_fingerprint(step: Step) -> str:
    """SHA-256 in hex of what a trace or a profile is of: the model, the shapes of the batch, the optimizer's class, and
    whether gradients are kept."""
    digest = hashlib.sha256(fingerprint(step.model).encode())
    for path, leaf in pytree.tree_flatten_with_path(step.batch)[0]:
        shown = (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        digest.update(f"{pytree.keystr(path)}|{shown}\n".encode())
    digest.update(f"{type(step.optimizer).__qualname__}|{step.gradients}|{step.model.training}".encode())
    return digest.hexdigest()


def difference(model: nn.Module, plan: Plan) -> str:
    """What of ``model`` does not fit ``plan``, as far as the plan can tell."""
    modules = dict(model.named_modules())
    missing = [segment.module for segment in plan.segments if segment.module and segment.module not in modules]
    if missing:
        return f"it has no module {missing[0]!r}"
    return "names, shapes, dtypes or aliasing of its parameters and buffers, or its classes' sources, are different"
