"""Puts a plan on a model and takes it off again.

A module that the plan touches gets a :class:`PlannedForward` in its ``__dict__`` under the name ``forward``, where
``nn.Module.__call__`` finds it before the class's method. It is an ordinary object that refers to its module, so a deep
copy refers to the *copied* module and runs the copy's weights, and pickling works. A module's own hooks run outside
``forward`` and fire once; ``state_dict`` does not see it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from regrad.core.chain import KEEP, MOVED, RANGES
from regrad.core.errors import InvalidPlan, PlanMismatch
from regrad.core.plan import Plan, SegmentPlan
from regrad.torch.fingerprint import difference, fingerprint
from regrad.torch.offload import Place, default_place
from regrad.torch.policy import Policy
from regrad.torch.recompute import log, prime, recompute
from regrad.torch.recompute import replays as engine_replays
from regrad.torch.tape.codec import OFFLOAD
from regrad.torch.tape.moves import Move, Moves
from regrad.torch.tape.ranges import Range, Ranges
from regrad.torch.tape.tape import Tape

Engine = Callable[..., Any]
"""``engine(forward, args, kwargs)``, and as a fourth argument the tensors whose engine the plan chose, if it chose any."""
Calls = dict[str, tuple[str, ...]]
LOG = "log"
"""What a call that is kept does where earlier replays need what it overwrites."""


class Taped:
    """A tape, the ranges that it recomputes and what it moves in every forward."""

    def __init__(
        self,
        ranges: Iterable[Range],
        calls: Iterable[str],
        guard: str = "first",
        *,
        masks: bool = False,
        moves: Iterable[Move] = (),
        place: Place | None = None,
    ) -> None:
        self.ranges = Ranges(ranges, calls)
        self.moves = Moves(moves, self.ranges)
        self.tape = Tape(guard=guard, masks=masks, place=place)

    def forward(self) -> AbstractContextManager[None]:
        """Context for one forward."""
        return self.tape.forward(self.ranges, self.moves)


@dataclass(frozen=True)
class Held:
    """A tensor of a module by its name, with the engine by which a call brings it back. By its name, because modules put
    other tensors in their places: when they are moved, loaded or copied."""

    owner: nn.Module
    name: str
    engine: str

    def tensor(self) -> torch.Tensor | None:
        """The tensor that stands there now."""
        found = getattr(self.owner, self.name, None)
        return found if isinstance(found, torch.Tensor) else None


class PlannedForward:
    """What stands in for one module's ``forward`` while a plan is applied.

    calls      for each call of the module in one step KEEP, RECOMPUTE or LOG; a single entry serves every call
    states     for each call of the module the large tensors whose engine the plan chose
    training   the mode that the plan was made in; in the other mode, and without gradients, nothing changes
    overrides  keyword arguments that the module is called with, such as ``use_cache=False``
    root       whether this is the model itself, whose calls mark where a step begins
    engine     what runs a recomputed call: ``engine(forward, args, kwargs)``
    taped      the stretches of torch calls that are recomputed, on the model itself
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        calls: tuple[str, ...],
        training: bool,
        overrides: dict[str, Any],
        root: bool,
        engine: Engine,
        taped: Taped | None = None,
    ) -> None:
        self.module = module
        self.previous: Callable[..., Any] | None = vars(module).get("forward")
        self.calls = calls
        self.training = training
        self.overrides = overrides
        self.root = root
        self.engine = engine
        self.taped = taped
        self.states: dict[int, tuple[Held, ...]] = {}
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
        if self.taped is not None:
            with self.taped.forward():
                return self.original(*args, **kwargs)
        which = self._this_call()
        option = self.calls[which] if which < len(self.calls) else KEEP
        if option == KEEP:
            return self.original(*args, **kwargs)
        if option == LOG:
            return log(self.original, args, kwargs)
        planned = [
            (tensor, held.engine) for held in self.states.get(which, ()) if (tensor := held.tensor()) is not None
        ]
        return self.engine(self.original, args, kwargs, *([planned] if planned else []))

    def _this_call(self) -> int:
        if len(self.calls) == 1:
            return 0
        position, self.position = self.position, self.position + 1
        return position


def _begin_step(model: nn.Module) -> None:
    for module in model.modules():
        planned = vars(module).get("forward")
        if isinstance(planned, PlannedForward):
            planned.position = 0


def apply(model: nn.Module, plan: Plan, *, place: Place | None = None) -> nn.Module:
    """Make ``model`` run under ``plan``, in place, and return it. A plan applied before is taken off first.

    Nothing but memory and time changes: losses, gradients, weights, buffers and generators are those of the eager
    step. ``state_dict``, ``copy.deepcopy``, pickling, hooks on the segments, ``eval()`` and ``no_grad`` behave as before.

    ``place`` is where the plan's offloaded tensors go between forward and backward, a :class:`FilePlace` or a
    :class:`HostPlace`; left out, the host's memory for a plan for CUDA, else a file in the system's folder for temporary
    files. A step for which the place has no room raises :class:`PlaceFailed` before its forward begins.

    Raises :class:`PlanMismatch` if the plan is for another model, :class:`InvalidPlace` if the place cannot be written; the
    model is then as it was. Costs nothing but the fingerprint (milliseconds).
    """
    found = fingerprint(model)
    if found != plan.fingerprint:
        raise PlanMismatch(plan.fingerprint, found, difference(model, plan))
    modules = dict(model.named_modules())
    calls = planned_calls(plan)
    missing = sorted(name for name in calls if name not in modules)
    if missing:
        raise PlanMismatch(plan.fingerprint, found, f"it has no module {missing[0]!r}")
    if any(choice.is_span for choice in plan.choices):
        raise InvalidPlan("the plan holds a span of several segments, which runs as ranges of torch calls; plan again")
    if plan.ranges and calls:
        raise InvalidPlan(
            f"the plan recomputes {next(iter(calls))} as a segment and {plan.ranges[0].name} as a range of torch calls; "
            "both in one plan are not supported"
        )
    taped = taped_of(plan, place=place)
    if taped is not None and taped.tape.place is not None:
        taped.tape.place.check()
    remove(model)
    install_plan(model, calls, training=plan.training, cache_off=plan.cache_off, taped=taped)
    tell(model, plan)
    _prime(model, plan)
    return model


def tell(model: nn.Module, plan: Plan) -> None:
    """Tell each planned call by which engines the plan brings its state back; its forward must be a planned one."""
    modules = dict(model.named_modules())
    for segment in plan.segments:
        told = [(one.name.partition(" ")[2].rpartition("."), one.engine) for one in segment.state if one.chosen]
        if told:
            held = tuple(Held(modules[owner], name, engine) for (owner, _, name), engine in told if owner in modules)
            vars(modules[segment.module])["forward"].states[segment.call] = held


def _prime(model: nn.Module, plan: Plan) -> None:
    """Tell the engine of the large state that each segment writes and that the plan has no choice about, so that its first
    call need not find out."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    modules = dict(model.named_modules())
    for segment in plan.segments:
        large = {
            tensors[name]: one.engine
            for one in segment.state
            if one.written and not one.chosen and (name := one.name.partition(" ")[2]) in tensors
        }
        if large:
            prime(vars(modules[segment.module])["forward"].original, large)


def taped_of(plan: Plan, guard: str = "first", *, place: Place | None = None) -> Taped | None:
    """The executor of a plan's ranges and moves; None if it has none. ``place`` as for :func:`apply`."""
    if not plan.ranges and not plan.moves:
        return None
    if place is None and any(one.how == OFFLOAD for one in plan.moves):
        place = Policy(offload=plan.offload).place or default_place(plan.device)
    return Taped(
        [Range(one.start, one.stop, one.name) for one in plan.ranges],
        plan.calls,
        guard,
        masks=plan.masks,
        moves=[Move(one.saves, one.how, one.name, one.bytes, one.held_bytes) for one in plan.moves],
        place=place,
    )


def replays(model: nn.Module) -> int:
    """How often segments and ranges of the plan on ``model`` were run again so far: those of its ranges, and of all
    segments of this process."""
    planned = vars(model).get("forward")
    taped = planned.taped if isinstance(planned, PlannedForward) else None
    return engine_replays() + (0 if taped is None else sum(report.replays for report in taped.tape.report()))


def planned_calls(plan: Plan) -> Calls:
    """For each module that the plan touches what each of its calls in a step does."""
    return call_options((segment.module, segment.call, option_of(segment)) for segment in plan.segments)


def option_of(segment: SegmentPlan) -> str:
    """What a planned call does: its option, or LOG for one that is kept and writes what earlier replays need."""
    if segment.option in (RANGES, MOVED):
        return KEEP
    return LOG if segment.option == KEEP and segment.state else segment.option


def call_options(calls: Iterable[tuple[str, int, str]]) -> Calls:
    """Options by module from (module, which call, KEEP or what else); modules whose calls are all kept are left out."""
    found: dict[str, dict[int, str]] = {}
    for module, call, option in calls:
        if module:
            found.setdefault(module, {})[call] = option
    return {
        name: tuple(options.get(i, KEEP) for i in range(max(options) + 1))
        for name, options in found.items()
        if any(option != KEEP for option in options.values())
    }


def install_plan(
    model: nn.Module,
    calls: Calls,
    *,
    training: bool,
    cache_off: str | None,
    engine: Engine = recompute,
    taped: Taped | None = None,
) -> None:
    """Put a plan's options, recomputation by ``engine``, on the calls of a model, without a check."""
    modules = dict(model.named_modules())
    for name, options in calls.items():
        install(modules[name], calls=options, training=training, engine=engine)
    if cache_off is not None:
        install(modules[cache_off], training=training, overrides={"use_cache": False})
    if any(len(options) > 1 for options in calls.values()):
        install(model, training=training, root=True)
    if taped is not None:
        install(model, training=training, taped=taped)


def install(
    module: nn.Module,
    *,
    calls: tuple[str, ...] = (KEEP,),
    training: bool,
    overrides: dict[str, Any] | None = None,
    root: bool = False,
    engine: Engine = recompute,
    taped: Taped | None = None,
) -> None:
    """Put a :class:`PlannedForward` on ``module``, or add to the one that it has."""
    planned = vars(module).get("forward")
    if isinstance(planned, PlannedForward):
        planned.calls = calls if calls != (KEEP,) else planned.calls
        planned.overrides = {**planned.overrides, **(overrides or {})}
        planned.root = planned.root or root
        planned.taped = planned.taped or taped
        return
    module.forward = PlannedForward(
        module, calls=calls, training=training, overrides=overrides or {}, root=root, engine=engine, taped=taped
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
