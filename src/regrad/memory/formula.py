"""An estimate from bare numbers: a transformer's shape, or just a count of parameters.

The peak is the highest of three moments, in bytes of one device:

    loss        weights + optimizer state + all kept activations + the gradient of the logits
    first layer weights + optimizer state + all gradients + what one layer keeps (recomputed, if the plan does that)
    optimizer   weights + optimizer state + all gradients + what the optimizer's step makes for a moment

Between the first two gradients come as activations go, both in proportion to the layers, so no moment there is higher
than both. Kernels' workspaces and an allocator's losses are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from regrad.core.plan import PeakMoment
from regrad.core.timeline import Holder
from regrad.core.trace import BACKWARD, FORWARD, OPTIMIZER
from regrad.memory.devices import Device
from regrad.memory.estimate import Block, Choice, Estimate, Usage, fits
from regrad.memory.optimizers import (
    RULES,
    ParameterMemory,
    Shape,
    parameter_memory,
    rule,
    square,
)
from regrad.memory.sharding import shard
from regrad.memory.transformer import Model, Split, layer_bytes

METHOD = "formula"
NOT_COUNTED = (
    "activations are not counted: a number of parameters says nothing about them. Give the shape "
    "(layers, hidden, heads, sequence, batch), or a model"
)
COARSE = (
    "by formula: kernels' workspaces and an allocator's losses are not in it; estimate the model itself to have them"
)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is estimated: a ``model`` with its batch and sequence, or ``parameters`` alone (then ``model`` is None).

    ``batch`` is that of one data-parallel device; dtypes are names ("fp32", "bf16", "fp16").
    """

    parameters: int = 0
    model: Model | None = None
    batch: int = 1
    sequence: int = 1
    dtype: str = "fp32"
    optimizer: str = "adamw"
    optimizer_dtype: str | None = None
    master_weights: bool = False
    split: Split = field(default_factory=Split)
    recompute: str = "none"

    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the parameters on one tensor-parallel device."""
        if self.model is not None:
            return tuple(self.model.shapes(self.split))
        return square(-(-self.parameters // self.split.tensor))

    def memory(self, optimizer: str | None = None, shapes: Iterable[Shape] | None = None) -> ParameterMemory:
        """Parameters' memory of one device, of all parameters or of those of ``shapes``."""
        whole = parameter_memory(
            self.shapes() if shapes is None else shapes,
            dtype=self.dtype,
            optimizer=optimizer or self.optimizer,
            optimizer_dtype=self.optimizer_dtype,
            master_weights=self.master_weights,
        )
        return shard(whole, self.split)


@dataclass(frozen=True, slots=True)
class _Activations:
    """What one device keeps: of one layer, of all, of the rest; what the loss and one layer's backward need above it."""

    layer: int = 0
    layers: int = 0
    rest: int = 0
    loss: int = 0
    replay: int = 0
    inference: int = 0

    @property
    def kept(self) -> int:
        return self.layer * self.layers + self.rest


def estimate_numbers(numbers: Numbers, device: Device | None = None) -> Estimate:
    """The estimate of bare numbers. Raises :class:`UsageError` for shapes that do not divide and unknown names."""
    activations = _activations(numbers)
    memory = numbers.memory()
    training = _training(numbers, memory, activations)
    notes = [COARSE] if numbers.model is not None else [NOT_COUNTED]
    if rule(numbers.optimizer).factored and numbers.model is None:
        notes.append("Adafactor's state depends on shapes; one square matrix is taken, which is the least it can be")
    return Estimate(
        method=METHOD,
        dtype=numbers.dtype,
        optimizer=numbers.optimizer,
        parameters=_count(numbers),
        parameter_memory_bytes=memory.parameter_memory_bytes,
        training=training,
        inference=_inference(memory, activations),
        blocks=_blocks(numbers, activations),
        optimizers=tuple(_choice(numbers, name, activations, device) for name in RULES),
        device=device,
        usable_bytes=device.usable_bytes if device is not None else None,
        fits=fits(training.peak_bytes, device),
        notes=tuple(notes),
    )


def _count(numbers: Numbers) -> int:
    if numbers.model is None:
        return numbers.parameters
    return sum(map(math.prod, numbers.model.shapes()))


def _activations(numbers: Numbers) -> _Activations:
    model, split = numbers.model, numbers.split
    if model is None:
        return _Activations()
    batch, sequence, layer = numbers.batch, numbers.sequence, model.layer
    one = layer_bytes(layer, batch=batch, sequence=sequence, split=split, recompute=numbers.recompute)
    whole = layer_bytes(layer, batch=batch, sequence=sequence, split=split)
    rest = sum(term.bytes for term in model.outer_terms(batch=batch, sequence=sequence, split=split))
    logits = batch * sequence * (model.vocabulary // split.tensor)
    rows, width = batch * sequence, layer.element_bytes
    scores = 2 * layer.heads * rows * sequence if layer.attention == "unfused" else 0
    working = width * max(rows * layer.mlp_width * (3 if layer.gated else 2), 4 * rows * layer.hidden + scores)
    return _Activations(
        layer=one,
        layers=model.layers,
        rest=rest,
        # the gradient of the log-softmax in FP32, and the same in the model's type on its way to the head
        loss=(4 + width) * logits,
        replay=whole - one,
        inference=max(2 * width * rows * layer.hidden + working // split.tensor, (4 + width) * logits),
    )


def _training(numbers: Numbers, memory: ParameterMemory, activations: _Activations) -> Usage:
    state = memory.weights_bytes + memory.optimizer_bytes + memory.master_bytes
    gradients = memory.gradients_bytes
    layer = activations.layer + activations.replay
    loss = PeakMoment(BACKWARD, "loss", "gradient of the logits")
    first = PeakMoment(BACKWARD, "layers.0", "backward of the first layer")
    step = PeakMoment(OPTIMIZER, "", "the optimizer's step")
    # gradients, activations and temporaries at each moment
    moments = [
        (gradients, 0, memory.step_bytes, step),
        (0, activations.kept, activations.loss, loss),
        (gradients, layer, 0, first),
    ]
    if not activations.kept:
        moments = moments[:1]
    of_gradients, of_activations, temporaries, moment = max(moments, key=lambda moment: sum(moment[:3]))
    holders = [
        Holder(memory.weights_bytes, 1, "weights", "weights", "", "", False),
        Holder(of_gradients, 1, "gradients", "gradients", "", "", False),
        Holder(memory.optimizer_bytes, 1, "optimizer", f"state of {numbers.optimizer}", "", "", False),
        Holder(memory.master_bytes, 1, "optimizer", "FP32 master weights", "", "", False),
        Holder(temporaries, 1, "temporaries", moment.operation, moment.module, "", False),
    ]
    if of_activations == activations.kept and activations.kept:
        layers = activations.layer * activations.layers
        holders.append(Holder(layers, activations.layers, "activations", "kept by layers", "layers.*", "", False))
        holders.append(Holder(activations.rest, 1, "activations", "kept outside the layers", "", "", False))
    elif of_activations:
        holders.append(Holder(of_activations, 1, "activations", "kept by one layer", "layers.0", "", False))
    found = tuple(sorted((one for one in holders if one.bytes), key=lambda one: -one.bytes))
    peak = state + of_gradients + of_activations + temporaries
    return Usage(
        peak, memory.weights_bytes, of_gradients, memory.optimizer_bytes + memory.master_bytes, 0, 0, of_activations,
        temporaries, moment, found,
    )  # fmt: skip


def _inference(memory: ParameterMemory, activations: _Activations) -> Usage:
    moment = PeakMoment(FORWARD, "", "the widest moment of a layer, or the logits")
    holders = [
        Holder(memory.weights_bytes, 1, "weights", "weights", "", "", False),
        Holder(activations.inference, 1, "temporaries", moment.operation, "", "", False),
    ]
    peak = memory.weights_bytes + activations.inference
    found = tuple(one for one in holders if one.bytes)
    return Usage(peak, memory.weights_bytes, 0, 0, 0, 0, 0, activations.inference, moment, found)


def _blocks(numbers: Numbers, activations: _Activations) -> tuple[Block, ...]:
    model = numbers.model
    if model is None:
        return ()
    last = model.layers - 1
    name = "layers.0" if last == 0 else f"layers.0 … {last}"
    rows = [
        (name, model.layers, model.layer_shapes(numbers.split), activations.layer),
        ("embedding, last norm, head and loss", 1, model.outer_shapes(numbers.split), activations.rest),
    ]
    blocks = []
    for title, count, shapes, kept in rows:
        share = numbers.memory(shapes=shapes)
        state = share.optimizer_bytes + share.master_bytes
        count_of = sum(map(math.prod, shapes))
        blocks.append(Block(title, count, count_of, share.weights_bytes, share.gradients_bytes, state, kept))
    return tuple(blocks)


def _choice(numbers: Numbers, name: str, activations: _Activations, device: Device | None) -> Choice:
    memory = numbers.memory(name)
    peak = _training(numbers, memory, activations).peak_bytes
    return Choice(
        name, RULES[name].title, memory.optimizer_bytes, memory.master_bytes, memory.step_bytes,
        memory.parameter_memory_bytes, peak, fits(peak, device), RULES[name].source,
    )  # fmt: skip
