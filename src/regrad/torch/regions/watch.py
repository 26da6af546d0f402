"""Watches the operations of a call: which storages from before it are written, and their bytes before each write.

Used while a region is learnt, and always where a journal or a read set is kept. Costs about four microseconds an
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from regrad.torch.regions.discover.sources import Source, source_of
from regrad.torch.regions.discover.tensors import SMALL_BYTES, set_versions
from regrad.torch.regions.old import Old, rows_written

# Arguments of these names are written although no schema says so: batch norm's running statistics.
_UNDECLARED = ("running_mean", "running_var", "running_min", "running_max")
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


@cache
def writes_of(operation: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an operation writes."""
    found = []
    for position, argument in enumerate(operation._schema.arguments):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or argument.name in _UNDECLARED:
            found.append((position, argument.name))
    return tuple(found)


_OVERWRITES = ("copy_", "fill_", "zero_", "index_copy_", "index_fill_", "masked_fill_")
_PUTS = ("index_put_", "_index_put_impl_")


def only_overwrites(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation replaces elements of its first argument and reads none of them."""
    name = operation._schema.name.partition("::")[2]
    if name in _PUTS:
        return not (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    return name in _OVERWRITES


def written_by(operation: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that a call of ``operation`` is about to write."""
    for position, name in writes_of(operation):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


@cache
def is_view(operation: Any) -> bool:
    """Whether an operation only makes another view, and reads no element."""
    returned = [one.alias_info for one in operation._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


@cache
def draws(operation: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operation.tags


class Quiet(TorchDispatchMode):
    """Passes everything on. A replay runs under it if its forward ran under a :class:`Watch`: a mode that is active
    changes which operations some functions are made of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Versions(Quiet):
    """Notes the version counters of some storages before their first write in a replay.

    A replay writes state that the walk did not find through tensors that nobody knows beforehand; their counters, which
    autograd compares with what it saved, are put back by :meth:`back`.
    """

    def __init__(self, storages: Collection[int]) -> None:
        super().__init__()
        self._storages = storages
        self._noted: dict[int, tuple[torch.Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "_schema", None) is not None:
            for tensor in written_by(func, args, kwargs):
                if storage_key(tensor) in self._storages and not tensor.is_inference():
                    counted = tensor._base if tensor._base is not None else tensor  # views share the counter
                    self._noted.setdefault(id(counted), (counted, tensor._version))
        return func(*args, **kwargs)

    def back(self) -> None:
        """Put the counters back; where two tensors share one, what was noted first was noted before any write."""
        noted = list(reversed(self._noted.values()))
        set_versions([tensor for tensor, _ in noted], [version for _, version in noted])
        self._noted.clear()


class Watch(Quiet):
    """Records old bytes before each write to a storage that was there before the call.

    touched     storage -> its :class:`Old` pieces in the order of the writes
    reads       pieces of large storages as they were read, if ``read_set``
    generators  generator objects that operations drew from, with their state before the first draw

    Small storages, and those in ``whole``, are copied whole at the first write. Of large ones each written piece is
    copied, unless ``snapshot``. With ``wanted`` only storages that it says are copied. What ``aside`` covers of a storage
    is not copied again. ``read_set`` may name the storages whose reads are wanted.
    """

    def __init__(
        self,
        *,
        whole: set[int],
        snapshot: bool = False,
        read_set: bool | Collection[int] = False,
        aside: Mapping[int, list[Old]] | None = None,
        seen: bool = False,
        wanted: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__()
        self._wanted = wanted
        self.touched: dict[int, list[Old]] = {}
        self.reads: dict[int, list[Old]] = {}
        self.generators: dict[int, tuple[Source, Any]] = {}
        self.operations: list[Any] = []
        self.seen: set[int] | None = set() if seen else None
        self._whole, self._snapshot, self._read_set = whole, snapshot, read_set
        self._aside = aside or {}
        self._created: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "_schema", None) is None:
            return func(*args, **kwargs)
        self.operations.append(func)
        for tensor in written_by(func, args, kwargs):
            self._before_write(tensor, func, args)
        if draws(func):
            self._before_draw(kwargs.get("generator"))
        given = set()
        reads = bool(self._read_set) and not is_view(func)
        for position, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            key = storage_key(leaf)
            if key is not None:
                given.add(key)
                if reads and key not in self._created:
                    self._before_read(key, leaf, func, args, kwargs, first=position == 0 and leaf is args[0])
        if self.seen is not None:
            self.seen |= given - self._created
        out = func(*args, **kwargs)
        for leaf in (out,) if isinstance(out, torch.Tensor) else pytree.tree_leaves(out):
            key = storage_key(leaf)
            if key is not None and key not in given and key not in self.touched:
                self._created.add(key)
        return out

    def _before_write(self, tensor: torch.Tensor, func: Any, args: Any) -> None:
        key = storage_key(tensor)
        if key is None or key in self._created or not has_memory(tensor):
            return
        if self._wanted is not None and not self._wanted(key):
            return
        small = tensor.untyped_storage().nbytes() <= SMALL_BYTES
        whole = small or self._snapshot or key in self._whole
        rows = None if whole else rows_written(tensor, func, args)
        piece = rows or Old(tensor, whole=whole, lazy=True)
        pieces = self.touched.get(key, [])
        if not any(one.covers(piece) for one in (*pieces, *self._aside.get(key, ()))):
            self.touched[key] = [*pieces, piece.fill()]

    def _before_read(self, key: int, tensor: torch.Tensor, func: Any, args: Any, kwargs: Any, *, first: bool) -> None:
        if not has_memory(tensor) or tensor.untyped_storage().nbytes() <= SMALL_BYTES or tensor.requires_grad:
            return
        if not (self._read_set is True or key in self._read_set):  # type: ignore[operator]
            return
        pieces = self.reads.setdefault(key, [])
        if first and writes_of(func):
            if only_overwrites(func, args, kwargs):
                return
            rows = rows_written(tensor, func, args)  # of what it adds into, an operation reads no other rows
            if rows is not None:
                if not any(one.covers(rows) for one in pieces):
                    pieces.append(rows.fill())
                return
        piece = Old(tensor, lazy=True)
        if not any(one.covers(piece) for one in pieces):
            pieces.append(piece.fill())

    def _before_draw(self, generator: Any) -> None:
        if generator is not None and id(generator) not in self.generators:
            source = source_of(generator)
            self.generators[id(generator)] = (source, source.get())


def storage_key(value: Any) -> int | None:
    """The identity of a tensor's storage; ``None`` for what has none."""
    if type(value) not in _PLAIN and (
        not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    ):
        return None
    if value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there are bytes to copy."""
    return tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0
