"""Known traps, each looked for in the step itself: what was seen is recorded or measured, and carries its bytes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regrad.core.advice import Trap
from regrad.core.simulate_trace import live_levels
from regrad.core.trace import GRADIENTS
from regrad.core.units import format_bytes
from regrad.torch.dryrun import Rehearsal
from regrad.torch.on_device import device_form, on_device
from regrad.torch.profile import Profile
from regrad.torch.step import FRESH, KEPT, Step
from regrad.torch.store import untouched
from regrad.torch.traps_checkpoint import checkpoint_trap
from regrad.torch.traps_retained import retained_traps

EVAL_MODE, GRADIENTS_KEPT, CACHE = "training in eval()", "gradients kept between steps", "use_cache in training"


def find_traps(profile: Profile) -> tuple[Trap, ...]:
    """The traps that the profiled step is in, most bytes first. Cost: up to six fake steps; the user's step is left as
    it was."""
    found: list[Trap] = []
    with untouched(profile.rehearsal.original), on_device(profile.device):
        one = checkpoint_trap(profile)
        found += [one] if one is not None else []
        found += retained_traps(profile)
    for check in (eval_trap, gradients_trap, cache_trap):
        one = check(profile)
        found += [one] if one is not None else []
    return tuple(sorted(found, key=lambda trap: -trap.bytes))


def eval_trap(profile: Profile) -> Trap | None:
    """``eval()`` on the model that is trained: dropout and batch norm are off, and so is a library's checkpointing.

    Frozen parts of a model in ``train()`` are meant that way and no trap.
    """
    model = profile.rehearsal.original.model
    if model.training:
        return None
    checkpointing = _names(model, lambda m: bool(getattr(m, "gradient_checkpointing", False)))
    changed = _names(model, _differs_in_training)
    here = live_levels(profile.trace).peak_bytes
    there = _peak(profile, training=True)
    gap = here - there
    effects = []
    if checkpointing:
        effects.append(f"gradient checkpointing of {checkpointing[0] or 'the model'} is switched on, and does nothing")
    if changed:
        effects.append(f"{len(changed)} modules behave as in inference ({', '.join(changed[:3])}…)")
    size = f"in train() the step peaks at {format_bytes(there)}, in eval() at {format_bytes(here)}"
    return Trap(
        name=EVAL_MODE,
        what="; ".join(["the model is in eval() while gradients are computed", *effects, size]),
        modules=tuple(checkpointing or changed),
        bytes=max(gap, 0),
        cure="call model.train() before the step; gradients need no eval(), and eval() alone saves no memory: for "
        "inference use torch.no_grad()",
    )


def _differs_in_training(module: nn.Module) -> bool:
    dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return dropout or isinstance(module, nn.modules.batchnorm._NormBase)


def _names(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[str]:
    return [name for name, module in model.named_modules() if wanted(module)]


def _peak(profile: Profile, *, training: bool | None = None, gradients: str | None = None) -> int:
    """Peak of the same step in another mode, by a record of its own."""
    given = profile.rehearsal.original
    with untouched(given), on_device(profile.device):
        step = Step(given.model, given.batch, given.loss, given.optimizer, gradients=gradients or given.gradients)
        rehearsal = Rehearsal(step)
        if profile.device is not None:
            device_form(rehearsal.step.optimizer)
        if training is not None:
            rehearsal.step.model.train(training)
        record = rehearsal.record()
        profile.clock.read(record)
    return live_levels(record.trace).peak_bytes


def gradients_trap(profile: Profile) -> Trap | None:
    """Gradients that stay from one step to the next, where dropping them lowers the peak."""
    if profile.rehearsal.original.gradients != KEPT:
        return None
    size = sum(s.bytes for s in profile.trace.storages if s.category == GRADIENTS and s.birth < 0)
    here, there = live_levels(profile.trace).peak_bytes, _peak(profile, gradients=FRESH)
    if size == 0 or there >= here:
        return None
    return Trap(
        name=GRADIENTS_KEPT,
        what=f"{format_bytes(size)} of gradients are there from the start of the forward; dropped before it, the peak is "
        f"{format_bytes(there)} in place of {format_bytes(here)}",
        modules=(),
        bytes=here - there,
        cure="optimizer.zero_grad() with set_to_none=True, its default, before the forward",
    )


def cache_trap(profile: Profile) -> Trap | None:
    """A key-value cache that a training step fills and nothing reads again."""
    if profile.cache_off is None:
        return None
    here, there = live_levels(profile.eager.trace).peak_bytes, live_levels(profile.base.trace).peak_bytes
    without = f"without it the peak is {format_bytes(there)} in place of {format_bytes(here)}"
    if there >= here:
        without = "its bytes are held anyway while nothing is recomputed"
    return Trap(
        name=CACHE,
        what="every attention layer writes keys and values into a cache that nothing in this step reads again: "
        f"{without}, and a layer that is recomputed would write into it twice",
        modules=(profile.cache_off,) if profile.cache_off else (),
        bytes=max(here - there, 0),
        cure="model.config.use_cache = False while training",
    )
