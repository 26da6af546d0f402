"""Runs the needed calls of a section again, and leaves the present as it was."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from regrad.core.errors import RegionError
from regrad.torch.regions.ambient import function_modes, unseen
from regrad.torch.regions.arguments import hold
from regrad.torch.regions.call import in_backward
from regrad.torch.regions.frames import LOCK
from regrad.torch.tape.recording import External, Holder, Private, Recorded, Recording, Ref, Saved, digest_of
from regrad.torch.tape.setting import Setting, generator_state, set_generator_state
from regrad.torch.tape.slices import Slice, slice_of


def replay(recording: Recording, wanted: Holder) -> None:
    """Fill every empty holder of the section that ``wanted`` belongs to. On any exception none is filled."""
    with LOCK:
        if wanted.value is not None:
            return  # another thread was here first
        try:
            _replay(recording, recording.owner(recording.calls[wanted.position].section))
        except RegionError as error:
            error.gradients_touched = error.gradients_touched or in_backward()
            raise


def _replay(recording: Recording, index: int) -> None:
    section = recording.sections[index]
    todo = slice_of(recording, index)
    if any(key not in section.lent for key in todo.borrows):
        _replay(recording, recording.owner(section.parent))
    run = _Run(recording, index, todo)
    run.all()
    for holder, tensor in run.filled:
        holder.value = tensor
    for child, lent in run.lent.items():
        recording.sections[child].lent = lent
    if section.check:
        section.check = False
        recording.tally.checked(section.range)
    recording.tally.replayed(section.range, len(todo.run))


def _gone(_: object) -> torch.Tensor:
    raise RuntimeError("this graph belongs to the replay of a range and ended with it; use the forward's tensors")


class _Cut(torch.autograd.Function):
    """A tensor of which gradients are wanted and whose graph holds nothing; a leaf would be held by all that follows."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gone(gradients)


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor.detach()
    with torch.enable_grad():
        cut: torch.Tensor = _Cut.apply(torch.empty(0, requires_grad=True), tensor.detach())  # type: ignore[no-untyped-call]
    return cut


_HELD = {Ref, External, Private, tuple, list}


class _Enough(Exception):
    """Thrown out of a product that has saved all that is wanted of it and whose result nobody needs."""


class _Run:
    """One replay. It holds what it computes no longer than until the last call that reads it has run."""

    def __init__(self, recording: Recording, index: int, todo: Slice) -> None:
        self.recording, self.index, self.todo = recording, index, todo
        self.section = recording.sections[index]
        self.filled: list[tuple[Holder, torch.Tensor]] = []
        self.lent: dict[int, dict[tuple[int, int], torch.Tensor]] = {}
        # taken, not shared: what was lent goes after its last use, and is computed once more if this replay fails
        self.values, self.section.lent = self.section.lent, {}
        self.externals: dict[int, torch.Tensor] = {}
        self.unchecked: list[tuple[int, int, Saved, torch.Tensor]] = []
        self.position = self.count = self.enough = -1
        self.setting: Setting | None = None
        self.inside = ExitStack()
        self._plan()

    def _plan(self) -> None:
        """What happens at which position, and after which one each value has had its last use."""
        recording = self.recording
        last: dict[tuple[int, int], int] = {}
        self.copies: dict[int, list[int]] = {}
        self.lends: dict[int, list[int]] = {}
        for position in self.todo.run:
            for ref in recording.calls[position].given:
                last[ref.key] = max(last.get(ref.key, -1), position)
        for position, index in self.todo.copies:
            self.copies.setdefault(position, []).append(index)
            source = recording.calls[position].saved[index].source
            assert source is not None
            last[source.key] = max(last.get(source.key, -1), position)
        for child, refs in self.todo.lends.items():
            stop = recording.stop_of(child)
            self.lends.setdefault(stop, []).append(child)
            for ref in refs:
                last[ref.key] = max(last.get(ref.key, -1), stop)
        self.used = set(last)
        self.makers = {position for position, _ in last}
        self.frees: dict[int, list[tuple[int, int]]] = {}
        for key, position in last.items():
            self.frees.setdefault(position, []).append(key)
        self.events = sorted(self.todo.run | self.copies.keys() | self.lends.keys())

    def all(self) -> None:
        """Run everything; the present's modes and generators are back at the end, whatever happened."""
        calls = [self.recording.calls[position] for position in self.todo.run]
        drawing = [call for call in calls if call.state is not None]
        generators = list({id(one): one for call in drawing for one in call.generators}.values())
        with ExitStack() as stack:
            if drawing:
                stack.callback(set_generator_state, generator_state(generators), generators)
            stack.enter_context(function_modes(self.recording.below))
            stack.enter_context(saved_tensors_hooks(self._pack, _gone))
            stack.callback(self._switch, None)
            stack.callback(self.values.clear)  # the graph of the replay leads here: an error must not leave them in it
            for position in self.events:
                for child in self.lends.get(position, ()):
                    self._lend(child)
                for index in self.copies.get(position, ()):
                    self._copy(position, index)
                if position in self.todo.run:
                    self._call(position)
                for key in self.frees.get(position, ()):
                    self.values.pop(key, None)

    def _switch(self, setting: Setting | None) -> None:
        if setting is not self.setting:
            self.inside.close()
            self.setting = setting
            if setting is not None:
                self.inside.enter_context(setting.entered())

    def _call(self, position: int) -> None:
        call = self.recording.calls[position]
        self._switch(call.setting)
        args = [self._give(value) if type(value) in _HELD else value for value in call.args]
        kwargs = {name: self._give(value) for name, value in call.kwargs.items()}
        if call.state is not None:
            set_generator_state(call.state.data, list(call.generators))
        self.position, self.count, self.enough = position, 0, self._last_wanted(position, call)
        try:
            result = call.func(*args, **kwargs)
        except _Enough:
            self._compare()
            return
        if self.count != len(call.saved):
            raise self.recording.error(
                position,
                min(self.count, len(call.saved)),
                f"it saved {self.count} tensors when recomputed, and {len(call.saved)} in the forward",
            )
        self._results(position, result)
        self._compare()

    def _last_wanted(self, position: int, call: Recorded) -> int:
        """The saved tensor after which the rest of a call's work is of no use; -1 if all of it is.

        A product saves its operands before it is computed, and some of them are copies that only the call can make.
        """
        if call.whole or position in self.makers:
            return -1
        wanted = [i for i, saved in enumerate(call.saved) if saved.source is None and saved.pending() is not None]
        return wanted[-1] if wanted and self.recording.owner(call.section) == self.index else -1

    def _results(self, position: int, result: Any) -> None:
        index = 0
        left = [result]
        while left:
            value = left.pop()
            if isinstance(value, torch.Tensor):
                if (position, index) in self.used:
                    self.values[position, index] = value
                index += 1
            elif isinstance(value, (tuple, list)):
                left.extend(reversed(value))

    def _give(self, value: Any) -> Any:
        kind = type(value)
        if kind is Ref:
            return self.values[value.position, value.index]
        if kind is External:
            tensor = self.externals.get(id(value))
            if tensor is None:
                tensor = self.externals[id(value)] = value.give(self.section.range.title)
            return tensor
        if kind is tuple or kind is list:
            return kind([self._give(part) for part in value])
        if kind is Private:
            with torch.no_grad():
                return value.tensor.clone()
        return value

    # -- what comes out -----------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> None:
        """Autograd saves ``tensor`` in the graph of the replay, which is given nothing: nobody runs backward through it."""
        index, self.count = self.count, self.count + 1
        call = self.recording.calls[self.position]
        if index < len(call.saved) and self.recording.owner(call.section) == self.index:
            saved = call.saved[index]
            if saved.source is None:
                self._fill(self.position, index, saved, hold(tensor))
        if index == self.enough:
            raise _Enough

    def _copy(self, position: int, index: int) -> None:
        saved = self.recording.calls[position].saved[index]
        assert saved.source is not None
        value = self.values[saved.source.key]
        size, stride, offset, *layout = saved.geometry
        if [value.size(), value.stride(), value.storage_offset()] != layout:
            raise self.recording.error(
                position,
                index,
                f"an argument of the call was {list(layout[0])} and is {list(value.size())}, or lies otherwise in memory, "
                "when recomputed",
            )
        with torch.no_grad():
            self._fill(position, index, saved, value.detach().as_strided(size, stride, offset))
        self._compare()

    def _fill(self, position: int, index: int, saved: Saved, tensor: torch.Tensor) -> None:
        holder = saved.pending()
        if holder is None:
            return
        shape, dtype = saved.meta
        if (tensor.shape, tensor.dtype) != saved.meta:
            raise self.recording.error(
                position,
                index,
                f"it was {dtype} {list(shape)} and is {tensor.dtype} {list(tensor.shape)} when recomputed",
            )
        self.filled.append((holder, tensor))
        if self.section.check and saved.digest is not None:
            self.unchecked.append((position, index, saved, tensor))

    def _compare(self) -> None:
        """At the end of a call, which may fill a tensor after it saved it: whether the values are those of the forward."""
        for position, index, saved, tensor in self.unchecked:
            with unseen():
                same = digest_of(tensor) == saved.digest
            if not same:
                what = f"{saved.meta[1]} {list(saved.meta[0])} has another value when recomputed"
                raise self.recording.error(position, index, what)
        self.unchecked = []

    def _lend(self, child: int) -> None:
        lent = self.lent[child] = {}
        for ref in self.todo.lends[child]:
            lent[ref.key] = _cut(self.values[ref.key])
