"""Puts a plan on a model and takes it off again.

A module that the plan touches gets a :class:`PlannedForward` in its ``__dict__`` under the name ``forward``, where
``nn.Module.__call__`` finds it before the class's method. It is an ordinary object that refers to its module, so a deep
copy refers to the *copied* module and runs the copy's weights, and pickling works. A module's own hooks run outside
``forward`` and fire once; ``state_dict`` does not see it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from regrad.core.chain import KEEP
from regrad.core.errors import InvalidPlan, PlanMismatch
from regrad.core.plan import Plan
from regrad.torch.fingerprint import difference, fingerprint
from regrad.torch.recompute import recompute

Engine = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class PlannedForward:
    """What stands in for one module's ``forward`` while a plan is applied.

    calls      for each call of the module in one step whether it is recomputed; a single entry serves every call
    training   the mode that the plan was made in; in the other mode, and without gradients, nothing changes
    overrides  keyword arguments that the module is called with, such as ``use_cache=False``
    root       whether this is the model itself, whose calls mark where a step begins
    engine     what runs a recomputed call: ``engine(forward, args, kwargs)``
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        calls: tuple[bool, ...],
        training: bool,
        overrides: dict[str, Any],
        root: bool,
        engine: Engine,
    ) -> None:
        self.module = module
        self.previous: Callable[..., Any] | None = vars(module).get("forward")
        self.calls = calls
        self.training = training
        self.overrides = overrides
        self.root = root
        self.engine = engine
        self.position = 0

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the module had before."""
        return self.previous or MethodType(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self.module.training != self.training:
            return self.original(*args, **kwargs)
        if self.root:
            _begin_step(self.module)
        if self.overrides:
            kwargs = {**kwargs, **self.overrides}
        if not self._recomputes_this_call():
            return self.original(*args, **kwargs)
        return self.engine(self.original, args, kwargs)

    def _recomputes_this_call(self) -> bool:
        if len(self.calls) == 1:
            return self.calls[0]
        position, self.position = self.position, self.position + 1
        return position < len(self.calls) and self.calls[position]


def _begin_step(model: nn.Module) -> None:
    for module in model.modules():
        planned = vars(module).get("forward")
        if isinstance(planned, PlannedForward):
            planned.position = 0


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Make ``model`` run under ``plan``, in place, and return it. A plan applied before is taken off first.

    Nothing but memory and time changes: losses, gradients, weights, buffers and generators are those of the eager
    step. ``state_dict``, ``copy.deepcopy``, pickling, hooks on the segments, ``eval()`` and ``no_grad`` behave as before.

    Raises :class:`PlanMismatch` if the plan is for another model; the model is then as it was. Costs nothing but the
    fingerprint (milliseconds).
    """
    found = fingerprint(model)
    if found != plan.fingerprint:
        raise PlanMismatch(plan.fingerprint, found, difference(model, plan))
    modules = dict(model.named_modules())
    calls = recomputed_calls(plan)
    missing = sorted(name for name in calls if name not in modules)
    if missing:
        raise PlanMismatch(plan.fingerprint, found, f"it has no module {missing[0]!r}")
    if any(choice.is_span for choice in plan.choices):
        raise InvalidPlan("the plan holds a span of several segments, which this version cannot run; plan again")
    remove(model)
    install_plan(model, calls, training=plan.training, cache_off=plan.cache_off)
    return model


def recomputed_calls(plan: Plan) -> dict[str, tuple[bool, ...]]:
    """For each module that the plan recomputes at least once: which of its calls in a step are recomputed."""
    return call_flags((segment.module, segment.call, segment.option != KEEP) for segment in plan.segments)


def call_flags(calls: Iterable[tuple[str, int, bool]]) -> dict[str, tuple[bool, ...]]:
    """Flags by module from (module, which call, whether it is recomputed); modules of which no call is are left out."""
    found: dict[str, dict[int, bool]] = {}
    for module, call, again in calls:
        if module:
            found.setdefault(module, {})[call] = again
    return {
        name: tuple(flags.get(i, False) for i in range(max(flags) + 1))
        for name, flags in found.items()
        if any(flags.values())
    }


def install_plan(
    model: nn.Module,
    calls: dict[str, tuple[bool, ...]],
    *,
    training: bool,
    cache_off: str | None,
    engine: Engine = recompute,
) -> None:
    """Put recomputation of the flagged calls by ``engine`` on a model, without a check."""
    modules = dict(model.named_modules())
    for name, flags in calls.items():
        install(modules[name], calls=flags, training=training, engine=engine)
    if cache_off is not None:
        install(modules[cache_off], training=training, overrides={"use_cache": False})
    if any(len(flags) > 1 for flags in calls.values()):
        install(model, training=training, root=True)


def install(
    module: nn.Module,
    *,
    calls: tuple[bool, ...] = (False,),
    training: bool,
    overrides: dict[str, Any] | None = None,
    root: bool = False,
    engine: Engine = recompute,
) -> None:
    """Put a :class:`PlannedForward` on ``module``, or add to the one that it has."""
    planned = vars(module).get("forward")
    if isinstance(planned, PlannedForward):
        planned.calls = calls if calls != (False,) else planned.calls
        planned.overrides = {**planned.overrides, **(overrides or {})}
        planned.root = planned.root or root
        return
    module.forward = PlannedForward(
        module, calls=calls, training=training, overrides=overrides or {}, root=root, engine=engine
    )


def remove(model: nn.Module) -> nn.Module:
    """Take a plan off ``model`` and return it; without one nothing happens."""
    for module in model.modules():
        planned = vars(module).get("forward")
        if isinstance(planned, PlannedForward):
            if planned.previous is None:
                del module.forward
            else:
                module.forward = planned.previous
    return model


def is_applied(model: nn.Module) -> bool:
    """Whether a plan is applied to ``model``."""
    return any(isinstance(vars(module).get("forward"), PlannedForward) for module in model.modules())
