"""Adam whose moments have a type of their own: FP32 moments over bf16 weights, or the other way round.

torch's optimizers make their state in the type of the parameters. The arithmetic here is that of torch's Adam and AdamW
(Kingma & Ba 2015; Loshchilov & Hutter 2019), done in the moments' type and rounded once, when a weight is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from regrad.core.errors import InvalidSubject

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


class TypedAdam(torch.optim.Optimizer):
    """Adam with moments of type ``moments``; ``decoupled`` weight decay makes it AdamW.

    ``foreach`` does each step of the arithmetic over all parameters at once, which needs copies of all of them for a
    moment; without it one parameter follows the other. None is False here, and True where a device's default is planned
    for.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        moments: torch.dtype,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "moments": moments, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "decoupled": decoupled, "foreach": foreach,
        }  # fmt: skip
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; ``closure`` computes the loss again, as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for bundle in [trained] if group["foreach"] else [[parameter] for parameter in trained]:
                if bundle:
                    self._update(group, bundle)
        return loss

    def _update(self, group: dict[str, Any], bundle: list[torch.nn.Parameter]) -> None:
        kind, (first, second), rate, decay = group["moments"], group["betas"], group["lr"], group["weight_decay"]
        states = [self._state(parameter, kind) for parameter in bundle]
        gradients = [parameter.grad.to(kind) for parameter in bundle if parameter.grad is not None]
        weights: list[torch.Tensor] = [parameter.data for parameter in bundle]
        if decay and group["decoupled"]:
            torch._foreach_mul_(weights, 1 - rate * decay)
        elif decay:
            gradients = [
                gradient + decay * weight.to(kind) for gradient, weight in zip(gradients, weights, strict=True)
            ]
        means, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        del gradients
        step = states[0]["step"]
        scale = math.sqrt(1 - second**step)
        updates = torch._foreach_sqrt(squares)
        torch._foreach_div_(updates, scale)
        torch._foreach_add_(updates, group["eps"])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, means)
        torch._foreach_mul_(updates, -rate / (1 - first**step))
        for weight, update in zip(weights, updates, strict=True):
            weight.add_(update)

    def _state(self, parameter: torch.nn.Parameter, kind: torch.dtype) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=kind)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=kind)
        state["step"] += 1
        return state


def with_moments(make: MakeOptimizer | None, moments: torch.dtype | None) -> MakeOptimizer | None:
    """``make`` with the state of the optimizer that it makes in type ``moments``; None changes nothing.

    Without ``make`` it is AdamW. Raises, once parameters are given, :class:`InvalidSubject` for an optimizer that is
    neither Adam nor AdamW.
    """
    if moments is None:
        return make

    def build(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        given = list(parameters)
        plain = torch.optim.AdamW(given, lr=1e-4) if make is None else make(given)
        if all(parameter.dtype == moments for parameter in given):
            return plain
        if not isinstance(plain, torch.optim.Adam):  # AdamW is one too
            raise InvalidSubject(
                f"{type(plain).__name__} keeps its state in the type of the weights; a type of its own "
                "(--optimizer-dtype) goes with adam and adamw."
            )
        chosen = {name: plain.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return TypedAdam(given, moments, decoupled=isinstance(plain, torch.optim.AdamW), **chosen)

    return build
