"""Other optimizers on the parameters of a step: what they hold and what their step makes, by a record of that step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from regrad.core import trace as tr
from regrad.core.advice import SAME_BUT_ROUNDING
from regrad.core.simulate_trace import live_levels
from regrad.memory.advice import Swap, optimizer_swap
from regrad.memory.optimizers import RULES, state_bytes
from regrad.memory.remedies import Floor
from regrad.torch.dryrun import Rehearsal
from regrad.torch.on_device import device_form, on_device
from regrad.torch.profile import Profile
from regrad.torch.record import Record, Recorder
from regrad.torch.store import persistent_tensors, untouched

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
TRACED: dict[str, tuple[str, Make]] = {
    "momentum": (
        "torch.optim.SGD(model.parameters(), lr=…, momentum=0.9)",
        lambda given: torch.optim.SGD(given, lr=1e-3, momentum=0.9),
    ),
    "sgd": ("torch.optim.SGD(model.parameters(), lr=…)", lambda given: torch.optim.SGD(given, lr=1e-3)),
}
"""Those of the table whose step can be recorded without values, from the mildest change on."""


def optimizer_swaps(profile: Profile, floor: Floor) -> list[Swap]:
    """Optimizers that hold less than the step's own, from the mildest change on; empty where it has none or nothing less
    is known. ``floor`` is that of the step as it is. Cost: two fake steps of each optimizer alone."""
    rehearsal = profile.rehearsal
    own = rehearsal.step.optimizer
    if own is None:
        return []
    trained = [parameter for group in own.param_groups for parameter in group["params"]]
    found = []
    with untouched(rehearsal.original), on_device(profile.device):
        if any(group.get("foreach") for group in own.param_groups):
            _, step, seconds = _step_alone(profile, rehearsal, own, foreach=False)
            swap = optimizer_swap(
                "the optimizer's step one parameter at a time", "foreach=False", floor.optimizer_bytes, step, seconds,
                "trace", SAME_BUT_ROUNDING,
            )  # fmt: skip
            if swap.step_bytes < floor.step_bytes:
                found.append(swap)
        shapes = [tuple(parameter.shape) for parameter in trained]
        found += _by_rule(shapes, floor, at_once=profile.device is not None)
        for name, (how, make) in TRACED.items():
            if _rough_bytes(name, shapes, floor) < floor.optimizer_bytes:
                other = make(trained)
                device_form(other if profile.device is not None else None)
                state, step, seconds = _step_alone(profile, rehearsal, other)
                found.append(optimizer_swap(RULES[name].title, how, state, step, seconds, "trace"))
    return found


def _by_rule(shapes: list[tuple[int, ...]], floor: Floor, *, at_once: bool) -> list[Swap]:
    """Those that cannot be recorded: 8-bit AdamW is not torch's, and Adafactor's step depends on values.

    Adafactor makes one update in the size of a parameter: of all ``at_once``, or of one after the other.
    """
    width = _width(shapes, floor)
    sizes = [width * math.prod(shape) for shape in shapes]
    update = sum(sizes) if at_once else max(sizes, default=0)
    found = []
    for name, how, step in (
        ("adamw-8bit", "bitsandbytes.optim.AdamW8bit(model.parameters())", 0),
        ("adafactor", "torch.optim.Adafactor(model.parameters())", update),
    ):
        state = state_bytes(name, shapes, "fp32" if width == 4 else "bf16")
        if state < floor.optimizer_bytes:
            found.append(optimizer_swap(RULES[name].title, how, state, step, None, "rule"))
    return found


def _rough_bytes(name: str, shapes: list[tuple[int, ...]], floor: Floor) -> int:
    """State by rule, in the type that the weights have on the average."""
    return state_bytes(name, shapes, "fp32" if _width(shapes, floor) == 4 else "bf16")


def _width(shapes: list[tuple[int, ...]], floor: Floor) -> int:
    """Bytes of an element of the weights, as most are."""
    return 4 if floor.weights_bytes >= 4 * sum(math.prod(shape) for shape in shapes) else 2


def _step_alone(
    profile: Profile, rehearsal: Rehearsal, optimizer: torch.optim.Optimizer, **settings: Any
) -> tuple[int, int, float]:
    """State bytes, most bytes above what is there, and seconds of one step of ``optimizer`` on the copy's parameters."""
    step = rehearsal.step
    before = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update(settings)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [(parameter, parameter.grad) for parameter in trained]
    own = step.optimizer
    recorder = Recorder()
    recorder.phase = tr.OPTIMIZER
    try:
        step.optimizer = optimizer
        with rehearsal.entered():
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # makes its state
            for tensor, category in persistent_tensors(step):
                recorder.register(tensor, category)
            with recorder:
                optimizer.step()
    finally:
        step.optimizer = own
        for group, settings_before in zip(optimizer.param_groups, before, strict=True):
            group.update(settings_before)
        for parameter, gradient in kept:
            parameter.grad = gradient
    trace = recorder.finish(source=rehearsal.source, gradients=str(step.gradients), device=str(step.device))
    record = Record(trace, {}, recorder.signatures, recorder.signature_of, {}, set())
    profile.clock.read(record)
    levels = live_levels(record.trace)
    held = sum(s.bytes for s in record.trace.storages if s.birth < 0 and s.category == tr.OPTIMIZER_STATE)
    return held, levels.peak_bytes - levels.before[0], sum(one.seconds for one in record.trace.operations)
