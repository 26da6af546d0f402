"""What the operations of a recorded call write and read of large state, in pieces as the region engine copies them.

The rules are those of ``regions/watch.py`` and ``regions/old.py``, here on shapes instead of tensors: before a write the
rows that an argument names, else the view that is written; before a read the same. Where a view begins is not recorded, so
two views of one shape count as two pieces: a figure may be too large by what they share, never too small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from regrad.torch.record import Record, Signature, TensorSpec
from regrad.torch.regions.old import rows_named
from regrad.torch.regions.watch import is_view, only_overwrites, writes_of

INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that one operation writes or reads: ``payload_bytes`` of state and ``header_bytes`` of row numbers.

    ``full``: the whole storage, so that any other piece is covered by it.
    """

    payload_bytes: int
    header_bytes: int = 0
    full: bool = False

    @property
    def total_bytes(self) -> int:
        """Payload and header."""
        return self.payload_bytes + self.header_bytes


Pieces = tuple[Piece, ...]


def payload(pieces: Iterable[Piece]) -> int:
    """Bytes of state in ``pieces``."""
    return sum(piece.payload_bytes for piece in pieces)


def total(pieces: Iterable[Piece]) -> int:
    """Bytes of ``pieces`` with their row numbers."""
    return sum(piece.total_bytes for piece in pieces)


def uncovered(groups: Sequence[Pieces]) -> list[int]:
    """For each group, in the order in which they are put aside, the bytes that no group before has put aside already."""
    found, covered = [], False
    for group in groups:
        size = 0
        for piece in group:
            if not covered:
                size += piece.payload_bytes
            covered = covered or piece.full
        found.append(size)
    return found


def written(record: Record, index: int, positions: Iterable[int]) -> Pieces:
    """What the operations at ``positions`` overwrite of storage ``index``: what a call that runs them logs."""
    found: list[Piece] = []
    for position in positions:
        if index in record.trace.operations[position].writes:
            _add(found, _piece(record, position, index))
    return tuple(found)


def read(record: Record, index: int, positions: Iterable[int]) -> Pieces:
    """What the operations at ``positions`` read of storage ``index``: what a read set keeps."""
    found: list[Piece] = []
    for position in positions:
        operation = record.trace.operations[position]
        signature = record.signatures[record.signature_of[position]]
        if index not in operation.reads or is_view(signature.func):
            continue
        whole = record.trace.storages[index].bytes
        specs = list(_given(record, position, index))
        if index in operation.writes and operation.reads[0] == index and writes_of(signature.func):
            args, kwargs = _arguments(signature)
            if not only_overwrites(signature.func, args, kwargs):
                _add(found, _piece(record, position, index))
            specs = specs[1:]
        for spec in specs:
            size = min(_bytes(spec), whole)
            _add(found, Piece(size, full=size == whole))
    return tuple(found)


def _add(pieces: list[Piece], piece: Piece) -> None:
    if not any(one.full for one in pieces):
        pieces.append(piece)


def _given(record: Record, position: int, index: int) -> Iterator[TensorSpec]:
    """The arguments of an operation that lie in storage ``index``."""
    signature = record.signatures[record.signature_of[position]]
    specs = (leaf for leaf in signature.leaves if isinstance(leaf, TensorSpec))
    reads = record.trace.operations[position].reads
    return (spec for spec, given in zip(specs, reads, strict=False) if given == index)


def _piece(record: Record, position: int, index: int) -> Piece:
    """What an operation writes of storage ``index``: of its arguments in it the first is the one that is written."""
    whole = record.trace.storages[index].bytes
    spec = next(_given(record, position, index), None)
    if spec is None:
        return Piece(whole, full=True)
    named = _rows(record.signatures[record.signature_of[position]], spec)
    if named is not None:
        count, length = named
        return Piece(_bytes(spec) // max(1, length) * count, INDEX_BYTES * count)
    size = min(_bytes(spec), whole)
    return Piece(size, full=size == whole)


def _rows(signature: Signature, spec: TensorSpec) -> tuple[int, int] | None:
    """How many rows an indexed write names at most, and of how many; None where its arguments name none."""
    named = rows_named(signature.func, _arguments(signature)[0])
    if named is None:
        return None
    dimension, rows = named
    if not isinstance(rows, TensorSpec) or rows.dtype not in (torch.int64, torch.int32) or not spec.shape:
        return None
    length = spec.shape[dimension]
    return min(_bytes(rows) // rows.dtype.itemsize, length), length


def _arguments(signature: Signature) -> tuple[Any, dict[str, Any]]:
    args, kwargs = pytree.tree_unflatten(list(signature.leaves), signature.structure)
    return args, kwargs


def _bytes(spec: TensorSpec) -> int:
    size = spec.dtype.itemsize
    for length in spec.shape:
        size *= length
    return size
