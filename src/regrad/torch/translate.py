"""From the record of a step on this machine to the trace of the same step on another device.

``translate`` is pure: a record (made under :func:`regrad.torch.on_device.on_device`, so that it has the device's
operations) goes in, a trace comes out in which

* every storage is rounded up to 512 bytes, as the device's allocator hands memory out;
* an optimizer's step counters, which stay on the host, take nothing;
* seconds are a roofline: floating-point operations by torch's own formulas, bytes by the tensors that an operation
  reads and writes, over the device's published rates;
* workspace is what the fused attention kernels are known to hold in their backward; everything else is in the reserve
  that the device's usable bytes leave out.

Nothing here has been validated on hardware. The trace says so in its notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from regrad.core import trace as tr
from regrad.core.levels import Levels, Live
from regrad.core.plan import Plan, leaves
from regrad.core.simulate_tape import TapeRange
from regrad.core.trace import Operation, Storage, Trace
from regrad.memory.allocator import Reserved, replay, round_bytes
from regrad.memory.devices import Device
from regrad.torch.record import Record, Signature, TensorSpec

if TYPE_CHECKING:
    from regrad.torch.profile import Profile

COUNTER_BYTES = 8
"""A state of an optimizer that is this small counts steps; it lives on the host."""
NOT_VALIDATED = "figures for {title} are translated from a record on the CPU and have not been validated on hardware"
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_ATTENTION_BACKWARD = ("_flash_attention_backward", "_efficient_attention_backward")


def translate(record: Record, device: Device) -> Trace:
    """The trace of ``record``'s step on ``device``; the record is left as it is.

    Cost: one pass over operations and storages. Saves, births and deaths are those of the record.
    """
    source = record.trace
    seconds = [_seconds(signature, device) for signature in record.signatures]
    workspace = [_workspace_bytes(signature) for signature in record.signatures]
    return replace(
        source,
        operations=[
            _operation(operation, seconds[index], workspace[index])
            for operation, index in zip(source.operations, record.signature_of, strict=True)
        ],
        storages=[_storage(storage) for storage in source.storages],
        calls=[replace(call) for call in source.calls],
        device=device.name,
        notes=[*source.notes, NOT_VALIDATED.format(title=device.title)],
    )


class DeviceClock:
    """Stands where :class:`regrad.torch.clock.Clock` stands: fills in a record, here by translating it."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def read(self, record: Record, progress: Callable[[float], None] | None = None) -> None:
        """Put the translated trace into ``record``."""
        record.trace = translate(record, self.device)
        if progress is not None:
            progress(1.0)


Walk = Callable[[Live], Levels]
"""Trace arithmetic under some plan: tells every life that there is, and returns the levels."""


def reserved(trace: Trace, walk: Walk, device: Device) -> Reserved:
    """What the device's caching allocator would hold for a step, by handing out and taking back what ``walk`` tells.

    The step is run twice over, because what stays cached from one step serves the next. Cost: about a second for ten
    thousand storages.
    """
    lives: list[tuple[int, int, int]] = []
    count = len(walk(lambda size, first, end, _: lives.append((size, first, end))).operations) + 1
    steady = [(s.bytes, -1, 2 * count) for s in trace.storages if s.birth < 0 and s.death is None]
    steady += [(size, -1, end) for size, first, end in lives if first < 0]
    moving = [life for life in lives if life[1] >= 0]
    twice = [(size, first + at, min(end, count - 1) + at) for at in (0, count) for size, first, end in moving]
    return replay(steady + twice, device.usable_bytes)


def reserved_under(source: Profile, plan: Plan, device: Device) -> Reserved:
    """:func:`reserved` for the step that ``source`` profiles, under a plan of it."""
    arithmetic = source.arithmetic
    if plan.ranges and source.search is not None:
        tape, ranges = source.search.tape, _tape_ranges(arithmetic.trace, plan)
        return reserved(arithmetic.trace, lambda live: tape.levels(ranges, live), device)
    options = tuple(leaf.option for leaf in leaves(plan.choices))
    return reserved(arithmetic.trace, lambda live: arithmetic.levels(source.ranges(options), live), device)


def _tape_ranges(trace: Trace, plan: Plan) -> list[TapeRange]:
    """The plan's stretches of torch calls as ranges of operations, those inside others under them."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, operation in enumerate(trace.operations[: trace.phase_starts[tr.BACKWARD]]):
        first.setdefault(operation.torch_call, position)
        last[operation.torch_call] = position + 1

    def nest(depth: int, start: int, stop: int) -> tuple[TapeRange, ...]:
        return tuple(
            TapeRange(first[one.start], last[one.stop - 1], nest(depth + 1, one.start, one.stop))
            for one in plan.ranges
            if one.depth == depth and start <= one.start and one.stop <= stop
        )

    return list(nest(0, 0, len(plan.calls)))


def _operation(operation: Operation, seconds: float, workspace_bytes: int) -> Operation:
    free = not operation.makes and not operation.writes
    return replace(operation, seconds=0.0 if free else seconds, workspace_bytes=workspace_bytes)


def _storage(storage: Storage) -> Storage:
    counter = storage.category == tr.OPTIMIZER_STATE and storage.birth < 0 and storage.bytes <= COUNTER_BYTES
    return replace(storage, bytes=0 if counter else round_bytes(storage.bytes))


def _tensors(value: Any) -> list[TensorSpec]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, TensorSpec)]


def _size(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _seconds(signature: Signature, device: Device) -> float:
    given, made = _tensors(list(signature.leaves)), _tensors(signature.result)
    kind = next((_TYPES[spec.dtype] for spec in given if spec.dtype in _TYPES), "fp32")
    moved = sum(map(_size, given)) + sum(map(_size, made))
    return device.seconds(flops=_flops(signature), moved_bytes=moved, dtype=kind)


def _flops(signature: Signature) -> int:
    """Floating-point operations by torch's formulas; 0 for operations that have none, which are bound by memory."""
    formula = flop_registry.get(signature.func._overloadpacket)
    if formula is None:
        return 0

    def meta(leaf: Any) -> Any:
        return torch.empty(leaf.shape, device="meta") if isinstance(leaf, TensorSpec) else leaf

    args, kwargs = pytree.tree_unflatten([meta(leaf) for leaf in signature.leaves], signature.structure)
    return int(formula(*args, **kwargs, out_val=pytree.tree_map(meta, signature.result)))


def _workspace_bytes(signature: Signature) -> int:
    """What a fused attention kernel holds in its backward: the query's gradient in FP32, and one FP32 number a row.

    Source: ``mha_bwd`` of the flash-attention library (``dq_accum`` and ``softmax_d``, rows rounded up to 128).
    """
    if not str(signature.func).split(".")[1].endswith(_ATTENTION_BACKWARD):
        return 0
    query = _tensors(list(signature.leaves))[1]
    *outer, rows, depth = query.shape
    rows = -(-rows // 128) * 128
    return 4 * math.prod(outer) * rows * (depth + 1)
