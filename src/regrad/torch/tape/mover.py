"""Carries moves out: while a call runs, hooks stand in for what it saves; after it the storage is packed once and let go.

Every tensor that is saved of a storage shares its payload. In the backward the storage is made again once and lives as long
as some node uses it. If somebody kept the saved one alive meanwhile, it is that storage itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from regrad.core.errors import PlaceFailed
from regrad.torch.offload import FilePlace, Place, Spool
from regrad.torch.regions.ambient import modes_active, unseen
from regrad.torch.regions.arguments import hold
from regrad.torch.regions.entry import version_of
from regrad.torch.tape.codec import OFFLOAD, SIGNS, Packed, pack
from regrad.torch.tape.moves import Move, Moves, MoveTally

_C: Any = torch._C
_aten: Any = torch.ops.aten
RELUS = frozenset(
    {
        torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_, torch.nn.functional.relu,
        _aten.relu, _aten.relu_, _aten.relu.default, _aten.relu_.default,
    }
)  # fmt: skip
"""Calls whose backward only asks where their result is positive. They save nothing else."""

_NOTHING = contextlib.nullcontext()


class Payload:
    """What stands for one storage at one version: packed elements, or a spool and its ticket; a number of bytes for fakes."""

    __slots__ = ("__weakref__", "_data", "_lock", "_made", "_origin", "_row", "_spool", "move", "seed", "tally")

    def __init__(self, move: Move, tally: MoveTally, tensor: torch.Tensor, data: Any, spool: Spool | None) -> None:
        self.move, self.tally, self._data, self._spool = move, tally, data, spool
        with _hidden():
            self._origin = StorageWeakRef(tensor.untyped_storage())
            self.seed = tensor.new_empty(0)
        self._made: StorageWeakRef | None = None
        self._row: weakref.ref[torch.Tensor] | None = None
        self._lock = threading.Lock()

    def storage(self) -> torch.UntypedStorage:
        """The storage: the saved one if it is still there, else the one that was last made again, else a new one."""
        with self._lock:
            for ref in (self._origin, self._made):
                alive = None if ref is None else torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
                if alive is not None:
                    found: torch.UntypedStorage = alive
                    return found
            storage = self._again().untyped_storage()
            self._made = StorageWeakRef(storage)
            return storage

    def fake_row(self) -> torch.Tensor:
        """For fake tensors, which cannot be put over a storage: all elements, made again unless they are there."""
        row = None if self._row is None else self._row()
        if row is None:
            row = self._again()
            self._row = weakref.ref(row)
        return row

    def _again(self) -> torch.Tensor:
        self.tally.restored[self.move] += 1
        if isinstance(self._data, Packed):
            return self._data.unpack()
        if self._spool is None:
            return self.seed.new_empty(self._data, dtype=torch.uint8)
        return self._spool.get(self._data, self.seed)

    def __del__(self) -> None:
        if self._spool is not None:
            self._spool.free(self._data)


class Slot:
    """What stands in the graph in place of a saved tensor: the tensor itself, or its payload and where it lies in that.

    ``counter`` is a tensor without bytes that shares the version counter of the saved one: it tells whether that was changed
    since, and whoever saves what is unpacked will be told of later changes too.
    """

    __slots__ = ("counter", "dtype", "geometry", "payload", "value", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value: torch.Tensor | None = tensor if tensor.is_leaf and tensor.requires_grad else hold(tensor)
        self.version = version_of(tensor)
        self.payload: Payload | None = None
        self.counter: torch.Tensor | None = None

    def move(self, payload: Payload) -> None:
        """Let go of the tensor."""
        tensor, self.value = self.value, None
        assert tensor is not None
        self.payload, self.dtype = payload, tensor.dtype
        self.geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        if not isinstance(tensor, FakeTensor):
            with _hidden():
                self.counter = tensor.detach()
                self.counter.data = payload.seed


def unpack(slot: Slot) -> torch.Tensor:
    """Autograd needs what it saved. Raises eager's error if that was changed in place since."""
    counter = slot.counter if slot.value is None else slot.value
    if counter is not None and version_of(counter) != slot.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{counter.type()} {list(counter.shape if slot.payload is None else slot.geometry[1])}] is at version "
            f"{counter._version}; expected version {slot.version} instead."
        )
    if slot.payload is None:
        assert slot.value is not None
        return slot.value
    offset, size, stride = slot.geometry
    if counter is None:
        row = slot.payload.fake_row()
        return (row if row.dtype == slot.dtype else row.view(slot.dtype)).as_strided(size, stride, offset)
    storage = slot.payload.storage()
    with _hidden():
        tensor = counter.detach()
        tensor.data = torch.empty(0, dtype=slot.dtype, device=counter.device).set_(storage, offset, size, stride)
    return tensor


class Mover:
    """Carries out the moves of one forward.

    Raises :class:`PlaceFailed` if there is no room for what is to be put away, before anything has run.
    """

    def __init__(self, moves: Moves, tally: MoveTally, place: Place | None) -> None:
        self.moves, self.tally, self.place = moves, tally, place or FilePlace()
        self._payloads: weakref.WeakValueDictionary[tuple[int, int, str], Payload] = weakref.WeakValueDictionary()
        self._spool: Spool | None = None
        self._room_bytes = 0
        tally.seen(moves)
        if moves.offloads and _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is None:
            room, tally.room_bytes = max(moves.reserve_bytes, tally.room_bytes), 0
            self._spool = self.place.open(room)
            tally.room_bytes = room
        for move in moves.inside:
            tally.kept(move, "a call that saves it is inside a range that is recomputed")

    def run(self, ordinal: int, func: Any, args: tuple[Any, ...], kwargs: Any, obstacle: str) -> Any:
        """Run a call of whose saved tensors some are to be moved."""
        wanted = self.moves.by_call[ordinal]
        if not obstacle and not torch.is_grad_enabled():
            obstacle = "gradients are off in the call, so it saves nothing"
        if obstacle:
            self.keep(ordinal, obstacle)
            return func(*args, **kwargs)
        slots: list[Slot] = []

        def stand_in(tensor: torch.Tensor) -> Slot:
            slots.append(Slot(tensor))
            return slots[-1]

        _C._autograd._push_saved_tensors_default_hooks(stand_in, unpack)
        try:
            result = func(*args, **kwargs)
        finally:
            _C._autograd._pop_saved_tensors_default_hooks()
        made = slots.copy()
        slots.clear()  # stand_in stays in the graph: one node's slot must not hold those of the others
        for index, move in wanted.items():
            reason = self._move(move, func, made[index]) if index < len(made) else f"its call saved {len(made)} tensors"
            if reason:
                self.tally.kept(move, reason)
        return result

    def keep(self, ordinal: int, reason: str) -> None:
        """Nothing of this call is moved."""
        for move in self.moves.by_call[ordinal].values():
            self.tally.kept(move, reason)

    def end(self, *, lost_from: int | None, reason: str) -> None:
        """The forward has ended, or taken another path from call ``lost_from`` on: what is moved stays so."""
        if lost_from is not None:
            for ordinal in self.moves.by_call:
                if ordinal >= lost_from:
                    self.keep(ordinal, reason)
        self.tally.room_bytes = max(self.tally.room_bytes, self._room_bytes)
        self._payloads, self._spool = weakref.WeakValueDictionary(), None

    def _move(self, move: Move, func: Any, slot: Slot) -> str:
        """Move one saved tensor; the reason if it is kept instead."""
        tensor = slot.value
        assert tensor is not None
        reason = _unmovable(move, func, tensor, slot.version)
        if reason:
            return reason
        key = (tensor.untyped_storage()._cdata, slot.version, move.how)
        payload = self._payloads.get(key)
        if payload is None:
            made = self._pack(move, tensor)
            if isinstance(made, str):
                return made
            payload = self._payloads[key] = made
        slot.move(payload)
        self.tally.moved[move] += 1
        return ""

    def _pack(self, move: Move, tensor: torch.Tensor) -> Payload | str:
        size = tensor.untyped_storage().nbytes()
        fake = isinstance(tensor, FakeTensor)
        data: Any = size
        if move.how != OFFLOAD:
            elements, rest = divmod(size, tensor.element_size())
            if rest:
                return "its storage is no whole number of elements"
            row = tensor.as_strided((elements,), (1,), 0) if fake else _row_over(tensor, tensor.dtype, elements)
            data = pack(move.how, row, width=move.held_bytes // max(1, elements))
            if isinstance(data, str):
                return data
            self.tally.packed(move, data.nbytes)
            return Payload(move, self.tally, tensor, data, None)
        if not fake:
            assert self._spool is not None
            self._room_bytes += size
            try:
                data = self._spool.put(_row_over(tensor, torch.uint8, size))
            except PlaceFailed as error:
                return f"{self.place} took no more ({os.strerror(error.errno) if error.errno else error.what})"
        self.tally.packed(move, 0)
        return Payload(move, self.tally, tensor, data, None if fake else self._spool)


def _unmovable(move: Move, func: Any, tensor: torch.Tensor, version: int) -> str:
    if type(tensor) not in (torch.Tensor, FakeTensor) or tensor.layout is not torch.strided:
        return "it is a parameter, or no plain strided tensor"
    if tensor.is_leaf and tensor.requires_grad:
        return "it is a leaf that gets a gradient"
    if version < 0 or version_of(tensor) != version:
        return "it was made in inference mode" if version < 0 else "its call changed it in place after saving it"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a lazy conjugate or negative"
    if not tensor.untyped_storage().nbytes():
        return "it has no elements"
    if move.how == SIGNS and func not in RELUS:
        return "it is not saved by relu"
    return ""


def _row_over(tensor: torch.Tensor, dtype: torch.dtype, elements: int) -> torch.Tensor:
    """The whole storage of ``tensor`` as one row."""
    with _hidden():
        return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), 0, (elements,), (1,))


def _hidden() -> Any:
    """:func:`unseen` where somebody would see it."""
    return unseen() if modes_active() else _NOTHING
