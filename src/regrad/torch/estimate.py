"""``rt.estimate``: what a training step takes, from its record, before anything is trained and without its memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from regrad.core import trace as tr
from regrad.core.levels import Levels
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.timeline import make_timeline
from regrad.core.trace import Trace
from regrad.memory.allocator import SEGMENTS_DO_NOT_FIT, Reserved
from regrad.memory.compare import Comparison
from regrad.memory.devices import Device, as_device
from regrad.memory.estimate import Choice, Estimate, Usage, fits
from regrad.memory.optimizers import RULES, rule, state_bytes
from regrad.memory.transformer import Layer
from regrad.torch.blocks import beside_formula, blocks_of
from regrad.torch.clock import Clock
from regrad.torch.dryrun import Rehearsal
from regrad.torch.on_device import device_form, on_device
from regrad.torch.record import Record, Recorder
from regrad.torch.room import available_bytes
from regrad.torch.step import Step
from regrad.torch.store import persistent_tensors, untouched
from regrad.torch.translate import NOT_VALIDATED, DeviceClock, reserved

Progress = Callable[[str, float], None]
BAND_RATIO = 0.05
"""How far a measured peak may lie from an estimate on the CPU: a bound that the models of the tests keep."""
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def estimate(
    model: nn.Module | Step,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | Device | None = None,
    device_memory: str | int | None = None,
    layer: Layer | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """What one training step of ``model`` on ``batch`` takes, and one inference, in bytes.

    model, batch    a module and what it is called with, or one :class:`regrad.torch.Step`
    loss, optimizer as for :func:`regrad.torch.plan`
    device          a device that need not be here ("h100-80gb"; see :mod:`regrad.memory.devices`); None: this one
    device_memory   its memory ("24 GiB"), if not what the table says, or alone for a device that is not in the table
    layer           shape of the model's blocks, for the formula beside the trace; read off ``model.config`` where there
                    is one
    progress        called as ``progress(stage, share_done)``

    Inference is the forward of the model in ``eval()`` without gradients; labels of a mapping that the model can do
    without are left out. Nothing of the user's is changed. Cost: a few fake steps, and on this device a run of every
    distinct operation by itself. A model that needs the values of its tensors is run for real on a copy, and a note says
    so. Raises :class:`regrad.core.errors.UsageError` for an unknown device, :class:`InvalidSubject` and
    :class:`CannotTrace` as :func:`regrad.torch.plan`, and whatever the model raises.
    """
    target = as_device(device, device_memory)
    given = model if isinstance(model, Step) else Step(model, batch, loss, optimizer)
    say = progress or (lambda stage, done: None)
    with untouched(given), on_device(target):
        say("running a fake step", 0.0)
        rehearsal = Rehearsal(given)
        if target is not None:
            device_form(rehearsal.step.optimizer)
        record = rehearsal.record()
        plain = record.trace
        clock = Clock(largest_bytes=available_bytes() // 4) if target is None else DeviceClock(target)
        clock.read(record, progress=lambda done: say("reading operations", done))
        say("running an inference", 0.0)
        forward = _inference(rehearsal)
        clock.read(forward)
    return _put_together(rehearsal, record, forward, beside_formula(rehearsal.step, record, plain, layer), target)


def _put_together(
    rehearsal: Rehearsal, record: Record, forward: Record, comparison: Comparison | None, target: Device | None
) -> Estimate:
    arithmetic, step = TraceArithmetic(record.trace), rehearsal.step
    training = _usage(arithmetic, record.names)
    held = None if target is None else reserved(record.trace, lambda live: arithmetic.levels((), live), target)
    within = fits(training.peak_bytes, target)
    return Estimate(
        method="trace" if rehearsal.why_real else "fake trace",
        dtype=_dtype(step.model),
        optimizer=_optimizer_name(step.optimizer),
        parameters=sum(parameter.numel() for parameter in step.model.parameters()),
        parameter_memory_bytes=sum(state_sizes(record.trace)),
        training=training,
        inference=_usage(TraceArithmetic(forward.trace), forward.names),
        blocks=blocks_of(step, record.trace),
        optimizers=_choices(step, record.trace, arithmetic.levels(), target),
        device=target,
        usable_bytes=None if target is None else target.usable_bytes,
        fits=within,
        reserved_peak_bytes=None if held is None else held.reserved_peak_bytes,
        band_ratio=BAND_RATIO if target is None else None,
        comparison=comparison,
        notes=_notes(rehearsal, target, within, held),
    )


def _notes(rehearsal: Rehearsal, target: Device | None, fits: bool | None, held: Reserved | None) -> tuple[str, ...]:
    notes = []
    if fits and held is not None and target is not None and held.reserved_peak_bytes > target.usable_bytes:
        notes.append(SEGMENTS_DO_NOT_FIT)
    if rehearsal.why_real:
        notes.append(
            f"the model does not run under fake tensors ({rehearsal.why_real}), so a real step was run on a copy and "
            "measured"
        )
        if target is not None:
            notes.append(
                "kernels of that real step are the CPU's: attention as it computes it, masks as wide as the data"
            )
    if target is not None:
        notes.append(NOT_VALIDATED.format(title=target.title))
    return tuple(notes)


def _usage(arithmetic: TraceArithmetic, names: dict[int, str]) -> Usage:
    timeline = make_timeline(arithmetic, names=names)
    at = timeline.peak_slot
    sizes = {category: row[at] if row else 0 for category, row in timeline.category_bytes.items()}
    return Usage(
        peak_bytes=timeline.peak_bytes,
        peak_moment=timeline.peak_moment,
        holders=timeline.holders,
        **{f"{category}_bytes": size for category, size in sizes.items()},
    )


def _inference(rehearsal: Rehearsal) -> Record:
    """The record of one forward in ``eval()`` that nothing is kept of."""
    step, recorder = rehearsal.step, Recorder()
    for tensor, category in persistent_tensors(step):
        if category in (tr.WEIGHTS, tr.BUFFERS, tr.INPUTS):
            recorder.register(tensor, category)
    names = {recorder.find(parameter): f"parameter {name}" for name, parameter in step.model.named_parameters()}
    modes = {module: module.training for module in step.model.modules()}
    step.model.eval()
    try:
        with rehearsal.entered(), torch.no_grad(), recorder, recorder.watching(step.model):
            result = _forward(step)
    finally:
        for module, mode in modes.items():
            module.training = mode
    del result
    trace = recorder.finish(source=rehearsal.source, gradients=str(step.gradients), device=str(step.device))
    known = {index: name for index, name in names.items() if index is not None}
    return Record(trace, known, recorder.signatures, recorder.signature_of, {}, set())


def _forward(step: Step) -> Any:
    if step.loss is not None:
        return step.loss(step.model, step.batch)
    batch = step.batch
    if isinstance(batch, (tuple, list)):
        return step.model(*batch)
    if not isinstance(batch, Mapping):
        return step.model(batch)
    takes = inspect.signature(step.model.forward).parameters.get("labels")
    optional = takes is not None and takes.default is not inspect.Parameter.empty
    return step.model(**{name: value for name, value in batch.items() if name != "labels" or not optional})


def _dtype(model: nn.Module) -> str:
    """The type of most parameters, by name."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    most = max(counts, key=lambda kind: counts[kind])
    return DTYPES.get(most, str(most).removeprefix("torch."))


def _optimizer_name(optimizer: torch.optim.Optimizer | None) -> str:
    """Its name in the table of rules, else its class; "none" without one."""
    if optimizer is None:
        return "none"
    kind = type(optimizer).__name__
    if kind == "SGD":
        return "momentum" if any(group["momentum"] for group in optimizer.param_groups) else "sgd"
    if kind == "TypedAdam":
        return "adamw" if optimizer.defaults["decoupled"] else "adam"
    return kind.lower() if kind.lower() in RULES else kind


def state_sizes(trace: Trace) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state."""
    sizes = {tr.WEIGHTS: 0, tr.GRADIENTS: 0, tr.OPTIMIZER_STATE: 0}
    for storage in trace.storages:
        lasting = storage.birth < 0 or storage.category == tr.GRADIENTS
        if lasting and storage.category in sizes:
            sizes[storage.category] += storage.bytes
    return sizes[tr.WEIGHTS], sizes[tr.GRADIENTS], sizes[tr.OPTIMIZER_STATE]


def _choices(step: Step, trace: Trace, levels: Levels, target: Device | None) -> tuple[Choice, ...]:
    """The step's own optimizer as recorded, and what the others of the table would make of the same record."""
    weights, gradients, own_state = state_sizes(trace)
    start = trace.phase_starts[tr.OPTIMIZER]
    before = max(levels.during[:start], default=levels.before[0])
    ready = levels.before[start]
    own_step = max(levels.during[start:], default=ready) - ready
    own, kind = _optimizer_name(step.optimizer), _moments(step)
    shapes = [tuple(p.shape) for p in step.model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in step.model.parameters() if p.requires_grad)
    found = []
    for name in dict.fromkeys([own, *RULES] if step.optimizer is not None else RULES):
        if name == own:
            state, needed, title, source = own_state, own_step, name, "the record of this step"
        else:
            state = state_bytes(name, shapes, kind)
            needed = rule(name).step_copies * count * (4 if kind == "fp32" else 2) if target is not None else 0
            title, source = RULES[name].title, RULES[name].source
        title = RULES[name].title if name in RULES else title
        peak = max(before, ready + needed) - own_state + state
        memory = weights + gradients + state
        found.append(Choice(name, title, state, 0, needed, memory, peak, fits(peak, target), source))
    return tuple(found)


def _moments(step: Step) -> str:
    """The type of the optimizer's moments by name: its own if it has one, else that of the weights."""
    kind = step.optimizer.defaults.get("moments") if step.optimizer is not None else None
    name = DTYPES.get(kind, "") if kind is not None else _dtype(step.model)
    return name if name in DTYPES.values() else "fp32"
