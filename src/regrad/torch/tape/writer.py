"""Records the calls of a range as they run: what each was given, made, wrote and saved."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from regrad.torch.regions.call import _reference
from regrad.torch.regions.entry import version_of
from regrad.torch.regions.guard import user_line
from regrad.torch.regions.kept import Kept
from regrad.torch.tape.calls import Kind
from regrad.torch.tape.masks import DROPOUT, Mask, masked
from regrad.torch.tape.ranges import Range
from regrad.torch.tape.recording import (
    External,
    Holder,
    Private,
    Recorded,
    Recording,
    Ref,
    Saved,
    Section,
    Stored,
    digest_of,
    unpack,
)
from regrad.torch.tape.setting import Settings, generator_state, state_bytes
from regrad.torch.tape.slices import forget_unneeded

_KNOWN_TYPES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor}
_CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.Size, torch.device}
_SHAPED_AS = {
    "Tensor.view_as": torch.Tensor.view,
    "Tensor.reshape_as": torch.Tensor.reshape,
    "Tensor.expand_as": torch.Tensor.expand,
}
_C: Any = torch._C


class _Argument:
    """A tensor that a call is given. ``storage`` is None if it is not the recording's own."""

    __slots__ = ("storage", "tensor", "version", "what")

    def __init__(self, tensor: torch.Tensor, version: int, storage: Stored | None, what: Any) -> None:
        self.tensor, self.version, self.storage, self.what = tensor, version, storage, what


class _Statistic:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Packed:
    """What the call that runs saves. Its ``pack`` stays in the graph, so it leads to no recording and to no tensor."""

    __slots__ = ("saved",)

    def __init__(self) -> None:
        self.saved: list[tuple[torch.Tensor, int, Holder]] = []

    def pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder()
        self.saved.append((tensor, tensor._version, holder))
        return holder

    def take(self) -> list[tuple[torch.Tensor, int, Holder]]:
        """What was saved since the last time."""
        saved, self.saved = self.saved, []
        return saved


class _Mixed(Exception):
    """A call that cannot be recorded: it runs as it is."""


class Writer:
    """Fills one :class:`Recording` while its outermost range is open."""

    def __init__(self, recording: Recording, settings: Settings, *, masks: bool = False) -> None:
        self.recording, self.settings, self.masks = recording, settings, masks
        self.open: list[int] = []
        self.checking = False
        self._made: dict[int, Ref] = {}
        self._externals: dict[tuple[int, int], External] = {}
        self._packed = _Packed()

    # -- sections -----------------------------------------------------------------------------------------------------

    def enter(self, one: Range, *, check: bool) -> None:
        """``one`` begins with the next call."""
        recording = self.recording
        parent = self.open[-1] if self.open else -1
        self.open.append(len(recording.sections))
        recording.sections.append(Section(one, len(recording.calls), parent, check))
        self.checking = self.checking or check

    def leave(self) -> bool:
        """The innermost open range has ended; whether that was the outermost."""
        self.recording.sections[self.open.pop()].stop = len(self.recording.calls)
        self.checking = any(self.recording.sections[index].check for index in self.open)
        if self.open:
            return False
        self._made, self._externals = {}, {}
        forget_unneeded(self.recording)
        return True

    # -- calls --------------------------------------------------------------------------------------------------------

    def run(self, ordinal: int, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and record it."""
        given: list[_Argument] = []
        generators: list[torch.Generator] = []
        again, recorded = func, args
        if kind.name in _SHAPED_AS and len(args) == 2 and isinstance(args[1], torch.Tensor):
            # only the shape of the other tensor is used, so the tensor is not held
            again, recorded = _SHAPED_AS[kind.name], (args[0], args[1].size())
        try:
            taken = self._arguments(kind, recorded, given, generators)
            named = kwargs and {name: self._take(value, kind.name, given, generators) for name, value in kwargs.items()}
        except _Mixed:
            return func(*args, **kwargs)
        call = Recorded(
            ordinal, kind.name, self.open[-1], again, taken, named,
            tuple([one.what for one in given if one.storage is not None]), self.settings.now(few=not kind.switches),
        )  # fmt: skip
        state = generator_state(generators) if kind.may_draw else None
        if call.setting.grad:  # type: ignore[union-attr]
            _C._autograd._push_saved_tensors_default_hooks(self._packed.pack, unpack)
            try:
                result = func(*args, **kwargs)
            finally:
                _C._autograd._pop_saved_tensors_default_hooks()
                packed = self._packed.take()
        else:
            packed, result = [], func(*args, **kwargs)
        if state is not None and generator_state(generators) != state:
            call.state, call.generators = Kept(state, state_bytes(state)), tuple(generators)
        self._settle(kind, call, given, packed, result)
        return result

    def _arguments(
        self, kind: Kind, args: tuple[Any, ...], given: list[_Argument], generators: list[torch.Generator]
    ) -> tuple[Any, ...]:
        if kind.statistics and len(args) > kind.statistics[-1] and args[kind.statistics[-1]]:
            places = kind.statistics[:-1]
            args = tuple(
                [
                    _Statistic(value) if i in places and isinstance(value, torch.Tensor) else value
                    for i, value in enumerate(args)
                ]
            )
        return tuple(
            [value if type(value) in _CONSTANTS else self._take(value, kind.name, given, generators) for value in args]
        )

    def _take(self, value: Any, name: str, given: list[_Argument], generators: list[torch.Generator]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name, given)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._take(part, name, given, generators) for part in value])
        if kind is _Statistic:
            made = self._made.get(id(value.tensor))
            if made is not None and made.weak() is value.tensor:
                raise _Mixed
            private = Private(value.tensor)
            given.append(_Argument(value.tensor, version_of(value.tensor), None, private))
            return private
        if kind is torch.Generator:
            generators.append(value)
        elif kind is dict or (kind is not torch.Size and isinstance(value, tuple) and hasattr(value, "_make")):
            raise _Mixed
        return value

    def _tensor(self, tensor: torch.Tensor, name: str, given: list[_Argument]) -> Any:
        if type(tensor) not in _KNOWN_TYPES or tensor.layout is not torch.strided:
            raise _Mixed
        version = version_of(tensor)
        if version < 0:
            raise _Mixed
        made = self._made.get(id(tensor))
        if made is not None and made.weak() is tensor:
            storage = made.storage
            if storage.version != version:
                storage.loose = True
            if not storage.loose and (made.requires_grad == tensor.requires_grad or storage.graph):
                given.append(_Argument(tensor, version, storage, made))
                return made
        key = (id(tensor), version)
        external = self._externals.get(key)
        if external is None or external.origin() is not tensor or external.requires_grad != tensor.requires_grad:
            external = self._externals[key] = External(tensor, name)
        given.append(_Argument(tensor, version, None, external))
        return external

    # -- after a call -------------------------------------------------------------------------------------------------

    def _settle(
        self,
        kind: Kind,
        call: Recorded,
        given: list[_Argument],
        packed: list[tuple[torch.Tensor, int, Holder]],
        result: Any,
    ) -> None:
        results: list[torch.Tensor] = []
        _flatten(result, results)
        written = [one for one in given if one.tensor._version != one.version]
        if any(one.storage is None for one in written) or kind.rebinds or not all(map(_is_plain, results)):
            self._keep(given, written, packed, rebinds=kind.rebinds)
            return
        keys = [one.tensor.untyped_storage()._cdata for one in given] if results or packed else []
        position = len(self.recording.calls)
        call.whole = bool(written) or not kind.product
        self.recording.calls.append(call)
        for one in written:
            self._write(one, position)
        changed = {one.storage for one in written}
        fresh = self._results(results, given, keys, position)
        if len(self.recording.sections) > 1:
            self._place(call, given, changed, makes=bool(fresh))
        if self.checking and packed:
            call.line = user_line()
        for tensor, version, holder in packed:
            call.saved.append(
                self._saved(tensor, version, holder, given, keys, fresh, changed, position, len(call.saved))
            )
            if self.checking and call.saved[-1].holder is not None:
                call.saved[-1].digest = digest_of(tensor)
        if call.state is not None and kind.name == DROPOUT and self.masks and len(packed) == 1 and not written:
            self._keep_draw(call, packed[0][0], keys)

    def _keep_draw(self, call: Recorded, noise: torch.Tensor, keys: list[int]) -> None:
        """Dropout has drawn: keep the draw as bits, and let the replay be the product that is left."""
        if noise.untyped_storage()._cdata in keys or type(call.args[0]) not in (Ref, External):
            return
        mask = Mask.of(noise)
        if mask is not None:
            call.func, call.args, call.kwargs = masked, (call.args[0], mask), {}
            call.state, call.generators, call.whole = None, (), False

    def _keep(
        self,
        given: list[_Argument],
        written: list[_Argument],
        packed: list[tuple[torch.Tensor, int, Holder]],
        *,
        rebinds: bool,
    ) -> None:
        """A call that wrote what is not the recording's own will not run again: what it saved is kept as eager does."""
        for tensor, version, holder in packed:
            holder.value, holder.version = _reference(tensor, None), version
        for one in given if rebinds else written:
            if one.storage is not None:
                one.storage.loose, one.storage.version = True, one.tensor._version

    def _write(self, one: _Argument, position: int) -> None:
        storage = one.storage
        assert storage is not None
        if not storage.writers or storage.writers[-1] != position:
            storage.writers.append(position)
        storage.version = one.tensor._version
        storage.graph = storage.graph or torch.is_grad_enabled()
        made = self._made.get(id(one.tensor))
        if made is not None:
            made.requires_grad = one.tensor.requires_grad

    def _place(self, call: Recorded, given: list[_Argument], changed: set[Stored | None], *, makes: bool) -> None:
        """Find the section that a call belongs to: none that is younger than a storage that the call writes.

        A section that has used what is written now could not be run again from what entered it: it is dissolved. One
        that has not will find it as it is left here, because no legal section uses what is written later.
        """
        sections, depth = self.recording.sections, len(self.open) - 1
        for storage in changed:
            assert storage is not None
            for at, index in enumerate(self.open[: depth + 1]):
                if at and storage.birth < sections[index].start:
                    if makes:
                        self._dissolve(sections[index])
                    else:
                        depth = at - 1
                        break
            for section in sections[1:]:
                if storage in section.entered:
                    self._dissolve(section)
        call.section = self.open[depth]
        for one in given:
            if one.storage is not None:
                for index in self.open[1 : depth + 1]:
                    if one.storage.birth < sections[index].start:
                        sections[index].entered.add(one.storage)

    def _dissolve(self, section: Section) -> None:
        if not section.dissolved:
            section.dissolved = True
            self.recording.tally.kept(
                section.range, "a call writes in place what entered it, so it is recomputed with the range around it"
            )

    def _results(
        self, results: list[torch.Tensor], given: list[_Argument], keys: list[int], position: int
    ) -> dict[int, Stored]:
        """Make the results known, those apart that lie in memory from outside; storages of the new ones by address."""
        fresh: dict[int, Stored] = {}
        for index, tensor in enumerate(results):
            if any(one.tensor is tensor for one in given):
                continue
            key, version = tensor.untyped_storage()._cdata, tensor._version
            if key in keys:
                storage = given[keys.index(key)].storage
                if storage is None:
                    continue
                if version != storage.version:
                    storage.loose = True
                    continue
            else:
                storage = fresh.get(key)
                if storage is None:
                    storage = fresh[key] = Stored(position, version)
            self._made[id(tensor)] = Ref(tensor, position, index, storage)
        return fresh

    def _saved(
        self, tensor: torch.Tensor, version: int, holder: Holder, given: list[_Argument], keys: list[int],
        fresh: dict[int, Stored], changed: set[Stored | None], position: int, index: int,
    ) -> Saved:  # fmt: skip
        meta = (tensor.shape, tensor.dtype)
        key = _storage_of(tensor)
        argument = given[keys.index(key)] if key in keys else None
        if key is None or (argument is not None and (argument.storage is None or argument.storage.loose)):
            holder.value, holder.version = _reference(tensor, None), version
            return Saved(None, meta)
        holder.recording, holder.position, holder.index = self.recording, position, index
        saved = Saved(weakref.ref(holder), meta, fresh.get(key), version)
        if argument is not None:
            saved.storage = argument.storage
            if (
                argument.storage not in changed
                and tensor.dtype == argument.tensor.dtype
                and not (tensor.is_conj() or tensor.is_neg())
            ):
                saved.source = argument.what
                saved.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset(), *_layout(argument.tensor))
        return saved


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.storage_offset()


def _flatten(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _flatten(part, found)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _KNOWN_TYPES and tensor.layout is torch.strided and version_of(tensor) >= 0


def _storage_of(tensor: torch.Tensor) -> int | None:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
