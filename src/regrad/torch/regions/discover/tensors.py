"""Tensor state by its bytes: what schemas and version counters do not tell.

The unit is the storage: aliases of one storage have one copy. A few bytes of main memory are read and written through a
buffer and not by an operation of torch; more go through an alias, so that torch's own accounts of memory show the copies.
No dispatch mode sees either, and no version counter moves.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from regrad.torch.regions.ambient import unseen
from regrad.torch.regions.kept import Kept

SMALL_BYTES = 256 * 1024
_PEEK = 64
_FEW_BYTES = 2048
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


class Memory:
    """The bytes of one tensor's storage. ``view`` is ``None`` if they cannot be had (fake tensors, wrappers)."""

    __slots__ = ("address", "base", "geometry", "last", "nbytes", "peeks", "ref", "view")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.ref = weakref.ref(tensor, _Forget(id(tensor)))
        self.view: Any = None
        self.address = self.base = self.nbytes = 0
        self.last: weakref.ref[Kept] | None = None
        self.geometry: tuple[Any, ...] = ()
        self.peeks: tuple[Any, ...] = ()
        if not _has_bytes(tensor):
            return
        storage = tensor.untyped_storage()
        self.address, self.base, self.nbytes = tensor.data_ptr(), storage.data_ptr(), storage.nbytes()
        self.geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.device.type == "cpu" and self.base and self.nbytes:
            view = memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.base)).cast("B")
            self.peeks = _peeks(view)
            self.view = view if self.nbytes <= _FEW_BYTES else _Bytes(tensor)
        elif self.nbytes:
            self.view = _Bytes(tensor)

    def read(self) -> Kept:
        """A copy of all bytes; the last one again if nothing changed and someone still holds it."""
        last = None if self.last is None else self.last()
        if last is not None and not self.differs(last):
            return last
        kept = Kept(self.view.tobytes(), self.nbytes)
        self.last = weakref.ref(kept)
        return kept

    def differs(self, kept: Kept) -> bool:
        """Whether the bytes are not those of ``kept``."""
        if isinstance(self.view, _Bytes):
            with unseen():
                return not torch.equal(self.view.alias, kept.data)
        return bool(self.view != kept.data)

    def write(self, kept: Kept) -> None:
        """Put the bytes of ``kept`` in place."""
        self.view[:] = kept.data

    def peek(self) -> tuple[bytes, ...]:
        """A few bytes from the start, the middle and the end, as a cheap sign of change."""
        return tuple(map(bytes, self.peeks))


def _peeks(view: Any) -> tuple[Any, ...]:
    size = len(view)
    if size <= 3 * _PEEK:
        return (view,)
    middle = size // 2
    return view[:_PEEK], view[middle : middle + _PEEK], view[size - _PEEK :]


class _Bytes:
    """The interface of a buffer by an alias of the storage with a version counter of its own."""

    __slots__ = ("alias",)

    def __init__(self, tensor: torch.Tensor) -> None:
        with unseen(), torch.no_grad():
            self.alias = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

    def tobytes(self) -> torch.Tensor:
        with unseen(), torch.no_grad():
            return self.alias.clone()

    def __setitem__(self, where: slice, data: torch.Tensor) -> None:
        with unseen(), torch.no_grad():
            self.alias.copy_(data)


class _Forget:
    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key

    def __call__(self, ref: Any) -> None:
        memory = _MEMORIES.get(self.key)
        if memory is not None and memory.ref is ref:
            del _MEMORIES[self.key]


_MEMORIES: dict[int, Memory] = {}


def memory_of(tensor: torch.Tensor) -> Memory:
    """The :class:`Memory` of ``tensor`` as it stands now (another one after its data were replaced)."""
    memory = _MEMORIES.get(id(tensor))
    if memory is not None and memory.ref() is tensor:
        if memory.view is None and not memory.nbytes:
            if type(tensor) not in _PLAIN_TYPES or not tensor.numel():
                return memory
        elif memory.address == tensor.data_ptr():
            return memory
    memory = _MEMORIES[id(tensor)] = Memory(tensor)
    return memory


def address_of(tensor: torch.Tensor) -> int:
    """Where its data begin, or a number for its storage if it has no memory (fake tensors)."""
    if type(tensor) in _PLAIN_TYPES:
        try:
            return tensor.data_ptr()
        except RuntimeError:
            return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def set_versions(tensors: list[torch.Tensor], versions: list[int]) -> None:
    """Put version counters back, so that a replay's own writes are not taken for the user's."""
    if tensors:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def _has_bytes(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _PLAIN_TYPES and not _is_user_subclass(tensor):
        return False
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return False
    try:
        tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _is_user_subclass(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
