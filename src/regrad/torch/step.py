"""A training step as one value: model, batch, loss, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from regrad.core.errors import InvalidSubject, mark_as_users

FRESH = "fresh"
KEPT = "kept"


@dataclass
class Step:
    """One training step of a user's model.

    model       any ``nn.Module`` with at least one parameter that requires a gradient
    batch       what the model is called with: a mapping as ``model(**batch)``, a tuple or list as ``model(*batch)``,
                anything else as ``model(batch)``; it may be left out where ``loss`` brings its own
    loss        ``loss(model, batch) -> scalar tensor``; without it the model's result or its ``.loss`` must be scalar
    optimizer   its memory counts, and :meth:`__call__` steps it
    make_batch  ``make_batch(batch_size, sequence_length=None) -> batch``, for searches over the batch
    gradients   "fresh": ``.grad`` is dropped before each step; "kept": the tensors stay and are written into. Left
                out, it is "kept" if any parameter has a ``.grad`` now

    Raises :class:`InvalidSubject` for an empty model, or tensors of the batch on another device than the model.
    """

    model: nn.Module
    batch: Any = None
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    make_batch: Callable[..., Any] | None = None
    gradients: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InvalidSubject(f"the model is a {type(self.model).__name__}, not a torch.nn.Module")
        name = type(self.model).__name__
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise InvalidSubject(
                f"model {name} has no parameter that requires a gradient, so there is no training step to plan for. "
                "Give the model that is trained, with requires_grad left on."
            )
        if self.gradients is None:
            has_gradient = any(parameter.grad is not None for parameter in self.model.parameters())
            self.gradients = KEPT if has_gradient else FRESH
        elif self.gradients not in (FRESH, KEPT):
            raise InvalidSubject(f'gradients={self.gradients!r} is not known; it is "{FRESH}" or "{KEPT}"')
        self._check_devices(name)

    def _check_devices(self, name: str) -> None:
        homes = {p.device for p in self.model.parameters()} | {b.device for b in self.model.buffers()}
        for path, leaf in pytree.tree_flatten_with_path(self.batch)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.device.type not in {home.type for home in homes}:
                where = pytree.keystr(path) or "the batch itself"
                device = sorted(str(home) for home in homes)[0]
                raise InvalidSubject(
                    f"batch tensor {where} is on {leaf.device}, model {name} on {device}. "
                    f'Move the batch: batch = ... .to("{device}").'
                )

    @property
    def device(self) -> torch.device:
        """Where the first parameter lives."""
        return next(self.model.parameters()).device

    def compute_loss(self) -> torch.Tensor:
        """The loss of one forward pass, a scalar that has a gradient.

        Raises :class:`InvalidSubject` if it is no such thing, or if there is neither a batch nor a ``loss``. What the
        model itself raises is marked as the user's and passed on.
        """
        if self.batch is None and self.loss is None:
            raise InvalidSubject(
                f"there is no batch to run {type(self.model).__name__} on: give Step(model, batch), or loss=... that "
                "brings its own."
            )
        try:
            result = self.loss(self.model, self.batch) if self.loss is not None else self._forward()
        except Exception as error:
            mark_as_users(error)
            raise
        if self.loss is None and not isinstance(result, torch.Tensor):
            result = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
        source = "loss(model, batch)" if self.loss is not None else f"the result of {type(self.model).__name__}"
        if not isinstance(result, torch.Tensor):
            raise InvalidSubject(
                f"{source} is a {type(result).__name__}, not a scalar tensor"
                + ("" if self.loss is not None else " and has no scalar .loss; give loss=lambda model, batch: ...")
            )
        if result.numel() != 1:
            raise InvalidSubject(
                f"{source} has shape {tuple(result.shape)}, a loss must be a scalar: take .mean() or .sum() of it, "
                "or give loss=lambda model, batch: ..."
            )
        if not result.requires_grad:
            raise InvalidSubject(
                f"{source} has no gradient: it does not depend on any parameter that requires one. Was it detached, "
                "or the step run under no_grad()?"
            )
        return result

    def _forward(self) -> Any:
        if isinstance(self.batch, Mapping):
            return self.model(**self.batch)
        if isinstance(self.batch, (tuple, list)):
            return self.model(*self.batch)
        return self.model(self.batch)

    def clear_gradients(self) -> None:
        """What the step does to ``.grad`` before its forward: drop it (fresh) or fill it with zeros (kept)."""
        for parameter in self.model.parameters():
            if self.gradients == FRESH:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def __call__(self) -> torch.Tensor:
        """Run one whole step; returns the detached loss."""
        self.clear_gradients()
        loss = self.compute_loss()
        try:
            loss.backward()
        except Exception as error:
            mark_as_users(error)
            raise
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()
