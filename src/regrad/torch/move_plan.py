"""Which saved tensors of a recorded step can be moved, and how a plan states that.

Moved is what the forward makes and autograd alone holds: every node that saved it did so through a hook, inside a torch
call that has a number. How tensors are packed and where they go is the executor's (:mod:`regrad.torch.tape.codec`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from regrad.core.errors import InvalidPlan
from regrad.core.plan import MovePlan
from regrad.core.simulate_moves import BITS, ELSEWHERE, NARROW, SIGNS, Movable, seconds_of
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.trace import NO_HOOK, Storage, Trace
from regrad.torch.bounds import bound_of
from regrad.torch.offload import Place, seconds_per_byte
from regrad.torch.policy import Policy, short_name
from regrad.torch.record import Record, TensorSpec
from regrad.torch.tape.codec import held_bytes, seconds_per_element, temporary_bytes
from regrad.torch.tape.masks import DROPOUT

PACKED_BYTES, OFFLOADED_BYTES = 1 << 12, 1 << 16
"""Smaller storages are left where they are: moving one takes some 50 µs of Python."""
_RELU = {"relu", "relu_"}
_WIDTHS = ((0, 255, 1), (-(1 << 15), (1 << 15) - 1, 2), (-(1 << 31), (1 << 31) - 1, 4))
"""The integer types that indices are narrowed to: least value, greatest value, bytes."""


def movables(record: Record, policy: Policy) -> tuple[Movable, ...]:
    """All moves that a policy allows, by storage; one storage may have two."""
    trace = record.trace
    place = policy.place
    if not record.calls or not (policy.pack or place):
        return ()
    noise = _noise(record) if policy.pack else set()
    written = {i: at for at, op in enumerate(trace.operations[: trace.phase_starts["backward"]]) for i in op.writes}
    found: list[Movable] = []
    for index, storage in enumerate(trace.storages):
        if not _is_movable(trace, storage, written.get(index, -1)):
            continue
        if any(policy.keeps(record.calls[trace.operations[save.operation].torch_call]) for save in storage.saved_by):
            continue
        spec = spec_of(record, index)
        if spec is None:
            continue
        if policy.pack and storage.bytes >= PACKED_BYTES:
            packed = _packed(record, index, spec, noise)
            found += [] if packed is None else [packed]
        if place is not None and storage.bytes >= OFFLOADED_BYTES:
            found.append(_offloaded(index, storage, spec, place))
    return tuple(found)


def _is_movable(trace: Trace, storage: Storage, written: int) -> bool:
    """Whether autograd alone holds a storage, by hooks, from the forward on. ``written`` is when it was written last."""
    if not 0 <= storage.birth < trace.phase_starts["backward"] or not storage.saved_by or storage.drop is None:
        return False
    first = min(save.position for save in storage.saved_by)
    if first == NO_HOOK or any(trace.operations[save.operation].torch_call < 0 for save in storage.saved_by):
        return False
    return written < first  # what is written after a save is another version, which eager refuses in the backward


def spec_of(record: Record, index: int) -> TensorSpec | None:
    """The tensor as which a storage was made, if it fills the storage."""
    storage = record.trace.storages[index]
    signature = record.signatures[record.signature_of[storage.birth]]
    specs = [leaf for leaf in pytree.tree_leaves(signature.result) if isinstance(leaf, TensorSpec)]
    makes = record.trace.operations[storage.birth].makes
    if len(specs) == len(makes):
        specs = [specs[makes.index(index)]]
    fitting = [spec for spec in specs if math.prod(spec.shape) * spec.dtype.itemsize == storage.bytes]
    return fitting[0] if fitting and len({spec.dtype for spec in fitting}) == 1 else None


def _noise(record: Record) -> set[int]:
    """What dropouts drew and saved."""
    trace, found = record.trace, set()
    for operation in trace.operations[: trace.phase_starts["backward"]]:
        if operation.draws and operation.torch_call >= 0 and record.calls[operation.torch_call] == DROPOUT:
            for index in (*operation.writes, *operation.makes):
                saves = trace.storages[index].saved_by
                if saves and all(trace.operations[s.operation].torch_call == operation.torch_call for s in saves):
                    found.add(index)
    return found


def _packed(record: Record, index: int, spec: TensorSpec, noise: set[int]) -> Movable | None:
    """The way to hold a storage in fewer bytes; None if there is none."""
    storage = record.trace.storages[index]
    size = spec.dtype.itemsize
    elements = storage.bytes // size
    if spec.dtype == torch.bool or (index in noise and spec.dtype.is_floating_point):
        return _made(index, BITS, elements, size)
    if spec.dtype.is_floating_point and all(
        _is_relus(record, save.operation, save.position) for save in storage.saved_by
    ):
        return _made(index, SIGNS, elements, size)
    if spec.dtype in (torch.int64, torch.int32, torch.int16):
        bound = bound_of(record, index)
        if bound is not None:
            width = next((w for low, high, w in _WIDTHS if low <= bound[0] and bound[1] <= high), size)
            if width < size:
                return _made(index, NARROW, elements, size, width)
    return None


def _is_relus(record: Record, operation: int, position: int) -> bool:
    """Whether it is relu's own result that a call of relu saved."""
    name = record.calls[record.trace.operations[operation].torch_call]
    return position == operation + 1 and short_name(name) in _RELU


def _made(index: int, how: str, elements: int, size: int, width: int = 0) -> Movable:
    held = held_bytes(how, elements, width)
    passing = temporary_bytes(how, elements, size)
    seconds = elements * seconds_per_element(how)
    return Movable(index, how, held, passing, passing, seconds / 2, seconds / 2)


def _offloaded(index: int, storage: Storage, spec: TensorSpec, place: Place) -> Movable:
    passing = temporary_bytes(ELSEWHERE, storage.bytes // spec.dtype.itemsize, spec.dtype.itemsize)
    seconds = storage.bytes * seconds_per_byte(place)
    return Movable(index, ELSEWHERE, 0, passing, passing, seconds / 2, seconds / 2)


# -- as a plan states them ------------------------------------------------------------------------------------------------


def saves_of(trace: Trace) -> dict[int, tuple[tuple[int, int], ...]]:
    """For each storage (torch call, which of the tensors that the call's nodes saved) of all its saves through hooks."""
    by_call: dict[int, list[tuple[int, int]]] = {}
    for index, storage in enumerate(trace.storages):
        for save in storage.saved_by:
            call = trace.operations[save.operation].torch_call if save.position != NO_HOOK else -1
            if call >= 0:
                by_call.setdefault(call, []).append((save.order, index))
    found: dict[int, list[tuple[int, int]]] = {}
    for call, saves in sorted(by_call.items()):
        for slot, (_, index) in enumerate(sorted(saves)):
            found.setdefault(index, []).append((call, slot))
    return {index: tuple(saves) for index, saves in found.items()}


@dataclass(frozen=True, slots=True)
class Moved:
    """What moves come to: how many, bytes of the storages, what stands for them, seconds."""

    count: int
    bytes: int
    held_bytes: int
    seconds: float


def moved_in(arithmetic: TraceArithmetic, moves: Iterable[Movable], start: int, stop: int) -> Moved:
    """What the moves whose first save is by an operation ``start`` … ``stop - 1`` come to."""
    storages = arithmetic.trace.storages
    inside = [one for one in moves if start <= min(s.operation for s in storages[one.storage].saved_by) < stop]
    return Moved(
        len(inside),
        sum(storages[one.storage].bytes for one in inside),
        sum(one.held_bytes for one in inside),
        sum(seconds_of(arithmetic, one) for one in inside),
    )


def move_plans(arithmetic: TraceArithmetic, moves: Iterable[Movable], calls: tuple[str, ...]) -> tuple[MovePlan, ...]:
    """The moves as a plan states them, in the order of their first saves."""
    trace = arithmetic.trace
    saves = saves_of(trace)
    found = []
    for one in moves:
        first = min(trace.storages[one.storage].saved_by, key=lambda save: save.order)
        operation = trace.operations[first.operation]
        module = trace.calls[operation.call].module if operation.call >= 0 else ""
        name = f"{module or 'the model'}: {short_name(calls[operation.torch_call])}"
        size = trace.storages[one.storage].bytes
        seconds = seconds_of(arithmetic, one)
        found.append(MovePlan(saves[one.storage], one.how, name, size, one.held_bytes, seconds))
    return tuple(sorted(found, key=lambda plan: plan.saves))


def planned_moves(trace: Trace, plans: Iterable[MovePlan]) -> tuple[Movable, ...]:
    """The moves that a plan states, on ``trace``. Raises :class:`InvalidPlan` where nothing is saved in such a place."""
    places = {saves: index for index, saves in saves_of(trace).items()}
    found = []
    for plan in plans:
        index = places.get(tuple(plan.saves))
        if index is None:
            raise InvalidPlan(f"the plan moves what {plan.name} saves, which this step saves nowhere or elsewhere too")
        found.append(Movable(index, plan.how, plan.held_bytes, out_seconds=plan.added_seconds))
    return tuple(found)
