"""What a call finds at its entry, and how that is put in place for a replay and taken away again."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from regrad.core.errors import ModifiedArgument, ReplayDivergence
from regrad.torch.regions import log
from regrad.torch.regions.ambient import Ambient, unseen
from regrad.torch.regions.discover import sources
from regrad.torch.regions.discover.boxes import NAME, Box
from regrad.torch.regions.discover.tensors import SMALL_BYTES, Memory, memory_of, set_versions
from regrad.torch.regions.discover.walk import Found
from regrad.torch.regions.guard import digest
from regrad.torch.regions.kept import Kept
from regrad.torch.regions.old import Old
from regrad.torch.regions.once_only import OnceOnly
from regrad.torch.regions.watch import Versions, storage_key


def signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A cheap sign of change: version counter, place, and a few bytes."""
    memory = memory_of(tensor)
    return (version_of(tensor), memory.address, memory.peek())


def version_of(tensor: torch.Tensor) -> int:
    """The version counter; tensors made in inference mode have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


class Entry:
    """The state of one call at its entry.

    exact     small tensors: a copy of the storage's bytes
    watched   parameters and large tensors: signatures only; what is known to be written is in the epoch log

    own       by storage, copies of large state that this call alone holds, oldest first; the log is not asked for those
              in ``owns``

    With ``large_only`` nothing is copied: the call will not be replayed, and only what it logs matters.
    """

    def __init__(self, found: Found, epoch: int, *, numpy: bool, large_only: bool = False) -> None:
        self.epoch, self.large_only = epoch, large_only
        self.ambient = Ambient()
        self.boxes = found.boxes
        self.exact: list[tuple[torch.Tensor, Memory, Kept]] = []
        self.watched: list[torch.Tensor] = []
        self.signatures: list[tuple[Any, ...]] = []
        self.keys: list[int | None] = []
        self.flags: list[tuple[torch.Tensor, bool]] = []
        self.computed: list[tuple[torch.Tensor, int]] = []
        self.arrays: list[tuple[Any, Kept]] = []
        self._bases: set[int] = set()
        self.substitutes: dict[int, Any] = {}
        self.hidden: dict[int, torch.Tensor] = {}
        self.own: dict[int, list[Old]] = {}
        self.owns: frozenset[int] = frozenset()
        self.owed: list[tuple[torch.Tensor, Any]] = []
        self._values(found)
        self.generators = [] if large_only else self._generators(numpy) + self._objects(found.generators)
        self._once_only = OnceOnly(found, numpy)

    def extend(self, found: Found) -> None:
        """A part of the region runs for the first time in this call: what it holds is still as at the entry."""
        self.boxes = self.boxes + found.boxes
        self._values(found)
        self.generators = self.generators + self._objects(found.generators)

    def _values(self, found: Found) -> None:
        self.flags += [(tensor, tensor.requires_grad) for tensor in found.tensors if tensor.is_leaf]
        self.computed += [(tensor, version_of(tensor)) for tensor in found.tensors if not tensor.is_leaf]
        self._tensors(found.tensors)
        if not self.large_only:
            self.arrays += [(one, Kept(one.tobytes(), one.nbytes)) for one in found.arrays if plain_array(one)]

    def _tensors(self, tensors: list[torch.Tensor]) -> None:
        bases = self._bases
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                continue  # it has no bytes to bring back
            memory = memory_of(tensor)
            small = 0 < memory.nbytes <= SMALL_BYTES and memory.view is not None
            if small and (type(tensor) is torch.Tensor or not isinstance(tensor, torch.nn.Parameter)):
                if memory.base not in bases and not self.large_only:
                    bases.add(memory.base)
                    self.exact.append((tensor, memory, memory.read()))
            else:
                self.watched.append(tensor)
                self.signatures.append(signature(tensor))
                self.keys.append(storage_key(tensor))

    def _generators(self, numpy: bool) -> list[tuple[sources.Source, Kept]]:
        found: list[tuple[sources.Source, Kept]] = [(sources.CPU, sources.take(sources.CPU))]
        if torch.cuda.is_initialized():
            found.append((sources.CUDA, sources.take(sources.CUDA)))
        found.append((sources.PYTHON, sources.take(sources.PYTHON)))
        if numpy and "numpy" in sys.modules:
            found.append((sources.NUMPY, sources.take(sources.NUMPY)))
        return found

    def _objects(self, generators: list[Any]) -> list[tuple[sources.Source, Kept]]:
        found = []
        for one in generators:
            source = sources.source_of(one)
            state = source.get()
            found.append((source, Kept(state, source.size(state))))
        return found

    def add_generators(self, seen: dict[int, tuple[sources.Source, Any]]) -> list[Any]:
        """Add generators that only operations showed, in the state before their first draw; returns the new ones."""
        known = {id(getattr(source, "generator", None)) for source, _ in self.generators}
        new = []
        for key, (source, state) in seen.items():
            if key not in known:
                self.generators.append((source, Kept(state, source.size(state))))
                new.append(getattr(source, "generator", None))
        return new

    def by_address(self) -> dict[int, torch.Tensor]:
        """The tensors that are there at the entry, by where their data begin."""
        found = {memory.address: tensor for tensor, memory, _ in self.exact}
        for tensor, sign in zip(self.watched, self.signatures, strict=True):
            found[sign[1]] = tensor
        found.pop(0, None)
        return found

    def moved(self) -> dict[int, torch.Tensor]:
        """Tensors whose data were replaced in the body (``tensor.data = other``), by where their data begin now."""
        found = {}
        for tensor, memory, _ in self.exact:
            now = memory_of(tensor)
            if now is not memory:
                found[now.address] = tensor
        found.pop(0, None)
        return found

    def what_happened_once(self) -> str | None:
        """After the body: the first thing that it did which cannot be rewound, in words; iterators are arranged for."""
        return self._once_only.after(self)

    def joined_graph(self) -> torch.Tensor | None:
        """After the body: a tensor of the state that an operation with a gradient changed in place."""
        for tensor, _ in self.flags:
            if not tensor.is_leaf:
                return tensor
        for tensor, version in self.computed:
            if version_of(tensor) != version:
                return tensor
        return None

    def name_of(self, value: Any) -> str:
        """What ``value`` is called where it is held."""
        return name_in(self.boxes, value)


def name_in(boxes: list[tuple[Box, Any, Any]], value: Any) -> str:
    """The attribute, key or global under which ``value`` stands in ``boxes``."""
    for how, box, token in boxes:
        if how is NAME and token[0] is value:
            return f"global {box[1]}"
        if how.keyed:
            for key, held in zip(*token, strict=True):
                if held is value:
                    return f"{how.word.removesuffix('s')} {key!r}"
        elif any(held is value for held in how.values(token)):
            return f"an element of a {how.word}"
    return "a tensor"


def plain_array(array: Any) -> bool:
    return bool(array.flags.writeable and not array.dtype.hasobject)


class Swap:
    """Puts the entry in place for one replay, and the present back after it."""

    def __init__(self, entry: Entry, *, name: str) -> None:
        self.entry, self.name = entry, name
        self.boxes = [how.take(box) for how, box, _ in entry.boxes]
        self.memories: list[tuple[torch.Tensor, Memory, Kept]] = []
        self.replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.flags = [tensor.requires_grad for tensor, _ in entry.flags]
        self.arrays = [array.tobytes() for array, _ in entry.arrays]
        self.generators = [source.get() for source, _ in entry.generators]
        self.redo: list[tuple[Old, torch.Tensor]] = []
        self.aside: dict[int, list[Old]] = {}
        self.written: dict[int, list[Old]] = {}
        self.hidden: Versions | None = None
        tensors = [one for one, _, _ in entry.exact] + entry.watched
        self.versioned, self.versions = tensors, [version_of(tensor) for tensor in tensors]
        if -1 in self.versions:
            self.versioned = [tensor for tensor in tensors if not tensor.is_inference()]
            self.versions = [tensor._version for tensor in self.versioned]

    def check(self) -> None:
        """Raise if something that is not copied was changed outside any region."""
        entry = self.entry
        for tensor, own, key in zip(entry.watched, entry.signatures, entry.keys, strict=True):
            now = signature(tensor)
            if key in entry.owns:
                changed = now[1] != own[1]  # whoever wrote it, the copy is what the call saw, if it still lies there
            elif key is None:
                changed = now != own
            else:
                changed = not log.is_as_left(entry.epoch, key, id(tensor), own, now)
            if changed:
                thing = entry.name_of(tensor)
                raise ModifiedArgument(
                    f"{thing} ({list(tensor.shape)}) was modified in place between the forward and the backward, "
                    "outside any region, and is too large to be copied at every call",
                    thing=thing,
                    segment=self.name,
                    hint="Change it after the backward, or inside a region.",
                )

    def to_entry(self) -> None:
        """Bring everything to where the call found it."""
        entry = self.entry
        for (how, box, token), now in zip(entry.boxes, self.boxes, strict=True):
            if entry.substitutes:
                token = _substituted(how, token, entry.substitutes)
            if not (now is token or how.same(box, token)):
                how.put(box, token)
        for tensor, memory, kept in entry.exact:
            current = memory_of(tensor)
            if current is not memory and current.address != memory.address:
                self._replace(tensor, memory, kept)
                continue
            self.memories.append((tensor, current, current.read()))
            if current.differs(kept):
                current.write(kept)
        for (array, kept), now in zip(entry.arrays, self.arrays, strict=True):
            if now != kept.data:
                fill(array, kept.data)
        for key in dict.fromkeys([*(key for key in entry.keys if key is not None), *entry.hidden]):
            aside = self.aside.setdefault(key, [])
            for old in reversed(entry.own[key]) if key in entry.own else log.since(entry.epoch, key):
                if not any(one.covers(old) for one in aside):
                    self.redo.append((old, old.now()))
                    aside.append(old)
                old.put()
        for tensor, flag in entry.flags:
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)
        for source, kept in entry.generators:
            source.bring(kept.data)

    def _replace(self, tensor: torch.Tensor, memory: Memory, kept: Kept) -> None:
        """``tensor.data = other`` was done since: give it a storage with the old bytes for the replay."""
        with unseen(), torch.no_grad():
            self.replaced.append((tensor, tensor.data))
            data = kept.data
            flat = (
                data.clone() if isinstance(data, torch.Tensor) else torch.frombuffer(bytearray(data), dtype=torch.uint8)
            )
            old = torch.empty(0, dtype=tensor.dtype).set_(flat.untyped_storage(), *memory.geometry)
            tensor.data = old

    def to_present(self) -> None:
        """Bring everything back. Each piece is tried, twice if need be, even if another one fails; the first error is raised.
        So one interruption, whenever it comes, does not leave the past in place."""
        errors: list[BaseException] = []
        for step in (
            self._undone, self._generators_back, self._flags_back, self._boxes_back, self._data_back, self._bytes_back,
            self._log_back, self._arrays_back, self._versions_back,
        ):  # fmt: skip
            _attempt(step, errors)
        _raise_first(errors)

    def check_entry(self) -> None:
        """Raise unless large state is what a guarded call found (its digest was taken at the entry)."""
        for tensor, wanted in self.entry.owed:
            if digest(tensor) != wanted:
                thing = self.entry.name_of(tensor)
                raise ReplayDivergence(
                    f"{thing} ({list(tensor.shape)}) is not what the call found, after its old bytes were put back",
                    thing=thing,
                    segment=self.name,
                    hint="It was written by code that no region ran, in a way that moves no version counter.",
                )

    def undo(self, written: dict[int, list[Old]]) -> None:
        """Take a whole call back: what it wrote, then everything that was copied at its entry."""
        self.written = written
        self._undone()
        self.written = {}
        self.to_entry()

    def _undone(self) -> None:
        """Undo what the body of the replay wrote into large storages."""
        _each(old.put for pieces in self.written.values() for old in reversed(pieces))

    def _generators_back(self) -> None:
        for (source, _), state in zip(self.entry.generators, self.generators, strict=True):
            source.bring(state)

    def _flags_back(self) -> None:
        for (tensor, _), flag in zip(self.entry.flags, self.flags, strict=True):
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)

    def _boxes_back(self) -> None:
        for (how, box, _), now in zip(self.entry.boxes, self.boxes, strict=True):
            if not how.same(box, now):
                how.put(box, now)

    def _data_back(self) -> None:
        with unseen(), torch.no_grad():
            for tensor, data in self.replaced:
                tensor.data = data

    def _bytes_back(self) -> None:
        for tensor, memory, kept in self.memories:
            current = memory_of(tensor)
            if current.address != memory.address:
                self.replaced.clear()
                self._replace(tensor, memory, kept)
            elif current.differs(kept):
                current.write(kept)

    def _log_back(self) -> None:
        _each(functools.partial(old.put, now) for old, now in reversed(self.redo))

    def _arrays_back(self) -> None:
        for (array, _), data in zip(self.entry.arrays, self.arrays, strict=True):
            if array.tobytes() != data:
                fill(array, data)

    def _versions_back(self) -> None:
        set_versions(self.versioned, self.versions)
        if self.hidden is not None:
            self.hidden.back()


def _each(steps: Iterable[Callable[[], None]]) -> None:
    """Take all steps, whatever one of them raises; then the first error is raised."""
    errors: list[BaseException] = []
    for step in steps:
        _attempt(step, errors)
    _raise_first(errors)


def _raise_first(errors: list[BaseException]) -> None:
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # or the error would hold itself, by this frame, and with it the graph


def _attempt(step: Callable[[], None], errors: list[BaseException]) -> None:
    """Take a step; if it fails, for whatever reason, once more: each writes what does not depend on what was written."""
    for _ in range(2):
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - collected, and raised by to_present
            errors.append(error)
        else:
            return


def fill(array: Any, data: bytes) -> None:
    numpy = sys.modules["numpy"]
    array[...] = numpy.frombuffer(data, dtype=array.dtype).reshape(array.shape)


def _substituted(how: Box, token: Any, substitutes: dict[int, Any]) -> Any:
    """``token`` with fresh copies of iterators in place of those that were consumed."""
    if not any(id(value) in substitutes for value in how.values(token)):
        return token

    def swap(value: Any) -> Any:
        found = substitutes.get(id(value))
        return value if found is None else copy.copy(found)

    if how.keyed:
        return (token[0], tuple(map(swap, token[1])))
    return type(token)(map(swap, token))
