"""Between which values the integers of a recorded storage lie in every step, as far as operations guarantee it.

An operation that makes indices (the place of a maximum, the order of a sort) gives them within the length of what it
searched; one that takes indices raises if they are not. So the bound holds whatever the data.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils import _pytree as pytree

from regrad.torch.record import Record, Signature, TensorSpec

Bound = tuple[int, int]
"""The least and the greatest value."""
_PLANES = {
    "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3,
    "fractional_max_pool2d": 2, "fractional_max_pool3d": 3,
}  # fmt: skip
"""Operations that give places in a plane of their input: of how many dimensions it is."""
_PLACES = {
    "topk", "sort", "argsort", "max", "min", "median", "nanmedian", "kthvalue", "mode", "argmax", "argmin", "cummax",
    "cummin",
}  # fmt: skip
"""Operations that give places along one dimension of their input."""
_TAKES = {
    "gather", "index_select", "embedding", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy",
    "index_fill",
}  # fmt: skip
"""Operations that raise for an index that is negative or beyond a dimension of their first argument."""
_LOSSES = {"nll_loss_forward", "nll_loss2d_forward"}


def bound_of(record: Record, storage: int) -> Bound | None:
    """The bound that whoever made the storage's integers gives, else the one that all who saved them need; None if
    there is none."""
    trace = record.trace
    found = trace.storages[storage]
    written = any(storage in op.writes for op in trace.operations[found.birth + 1 : trace.phase_starts["backward"]])
    made = None if written else _made(record, found.birth)
    if made is not None:
        return made
    taken = [_taken(record, save.operation, storage) for save in found.saved_by]
    known = [bound for bound in taken if bound is not None]
    if not known or len(known) < len(taken):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _signature(record: Record, operation: int) -> tuple[str, Signature, dict[str, Any]]:
    """An operation's name without its overload, and its arguments by name."""
    signature = record.signatures[record.signature_of[operation]]
    schema = signature.func._schema
    args, kwargs = pytree.tree_unflatten(list(signature.leaves), signature.structure)
    named = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    named.update(zip((argument.name for argument in schema.arguments), args, strict=False))
    named.update(kwargs)
    return schema.name.partition("::")[2].rstrip("_"), signature, named


def _made(record: Record, operation: int) -> Bound | None:
    name, _, given = _signature(record, operation)
    taken = given.get("self")
    if not isinstance(taken, TensorSpec):
        return None
    if name in _PLANES:
        return 0, math.prod(taken.shape[-_PLANES[name] :]) - 1
    if name in _PLACES:
        return 0, _length(taken, given.get("dim")) - 1
    return None


def _taken(record: Record, operation: int, storage: int) -> Bound | None:
    name, _, given = _signature(record, operation)
    made = _made(record, operation) if storage in record.trace.operations[operation].makes else None
    if made is not None:
        return made
    taken = given.get("self", given.get("weight"))
    if not isinstance(taken, TensorSpec):
        return None
    if name in _LOSSES:
        classes, ignored = taken.shape[1 if len(taken.shape) > 1 else 0], int(given["ignore_index"])
        return min(0, ignored), max(classes - 1, ignored)
    if name in _TAKES:
        return 0, _length(taken, given.get("dim", 0)) - 1
    return None


def _length(spec: TensorSpec, dim: Any) -> int:
    if not isinstance(dim, int):
        return max(1, math.prod(spec.shape))
    return spec.shape[dim] if spec.shape else 1
