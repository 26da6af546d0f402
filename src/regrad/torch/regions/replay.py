"""Runs a call again in the state that it found, and leaves the present as it was."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from regrad.core.errors import RegionError
from regrad.torch.regions import log
from regrad.torch.regions.arguments import hold
from regrad.torch.regions.call import Call, Holder, in_backward
from regrad.torch.regions.cut import Cutter
from regrad.torch.regions.entry import Swap
from regrad.torch.regions.frames import LOCAL, LOCK, Frame
from regrad.torch.regions.guard import digest, is_workspace, output_tensors
from regrad.torch.regions.watch import Quiet, Versions, Watch

_CAUSE = (
    "The region consumed something outside its state (time, operating-system entropy, state reached by a name made at "
    "run time), or its kernels are not deterministic. Move it out of the region, or wrap it in rt.once(...)."
)


def replay(call: Call, wanted: Holder) -> None:
    """Fill every holder of ``call`` that is still in a graph. On any exception none is filled, and the present is back."""
    with LOCK:
        if wanted.value is not None:
            return  # another thread was here first
        try:
            _replay(call)
        except RegionError as error:
            error.gradients_touched = error.gradients_touched or in_backward()
            raise


def _replay(call: Call) -> None:
    args, kwargs = call.arguments.give(call.name)  # may replay an enclosing region first
    swap = Swap(call.entry, name=call.name)
    swap.check()
    collected = Collected(call)
    frame = Frame(call, replaying=True)
    before = log.mark()
    LOCAL.stack.append(frame)
    try:
        swap.to_entry()
        swap.check_entry()
        output = call.entry.ambient.run(lambda: _body(call, args, kwargs, collected, swap))
        collected.compare(output)
        del output
        call.region.replays += 1
    except BaseException:
        collected.let_go()
        raise
    finally:
        collected.cutter = None
        LOCAL.stack.pop()
        try:
            swap.to_present()
        finally:
            log.back_to(before)
    collected.commit()
    collected.let_go()


def _body(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], collected: Collected, swap: Swap) -> Any:
    with ExitStack() as stack:
        stack.enter_context(saved_tensors_hooks(collected.pack, _unpack))
        if call.entry.hidden and (call.watched or call.contexts is not None):
            swap.hidden = Versions(call.entry.hidden)
            stack.enter_context(swap.hidden)
        if call.contexts is not None:
            stack.enter_context(call.contexts)
        if call.draws is not None:
            stack.enter_context(call.draws.again())
        elif call.pieces:
            watch = Watch(whole=set(), aside=swap.aside)
            swap.written = watch.touched
            stack.enter_context(watch)
        elif call.watched:
            stack.enter_context(Quiet())
        else:
            collected.cutter = call.cutter()
            if collected.cutter is not None:
                stack.callback(collected.cutter.done)
        return call.function(*args, **kwargs)


class _Packed:
    """What the graph of a replay holds for a saved tensor. It lets go when the replay ends: user code may keep a tensor
    of that graph in a place that no walk finds, and nothing will run backward through it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor


def _unpack(packed: _Packed) -> torch.Tensor:
    if packed.tensor is None:
        raise RuntimeError("this graph belongs to the replay of a region and ended with it; use the forward's tensors")
    return packed.tensor


class Collected:
    """What a replay saves, in order, until it is known to be right."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.count = 0
        self.cutter: Cutter | None = None
        self.fresh: list[tuple[Holder, torch.Tensor]] = []
        self.packed: list[_Packed] = []
        self._values: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> _Packed:
        """Autograd saves ``tensor`` in the graph of the replay."""
        held = hold(tensor)
        packed = _Packed(held)
        self.packed.append(packed)
        index, self.count = self.count, self.count + 1
        if self.cutter is not None:
            self.cutter.saved(index)
        call = self.call
        if index < len(call.holders):
            if call.check is not None and call.metas[index] is not None:
                self._values[index] = held
            holder = call.holders[index]()
            if holder is not None and not holder.kept:
                meta = call.metas[index]
                if meta is not None and call.check_metas and meta != (tensor.shape, tensor.dtype):
                    raise call.error(
                        index,
                        f"saved tensor {index} of {len(call.holders)} was {meta[1]} {list(meta[0])} and is "
                        f"{tensor.dtype} {list(tensor.shape)} when recomputed",
                        _CAUSE,
                    )
                self.fresh.append((holder, held))
        return packed

    def compare(self, output: Any) -> None:
        """Raise unless as many tensors were saved as in the forward and, if this replay is guarded, the same ones."""
        call = self.call
        if self.count != len(call.holders):
            raise call.error(
                min(self.count, len(call.holders)),
                f"it saved {self.count} tensors when recomputed, and {len(call.holders)} in the forward",
                "A value that the forward found was not there or another one (a cached value, an attribute or a setting "
                "changed by other code). " + _CAUSE,
            )
        check = call.check
        if check is None:
            return
        for index, value in self._values.items():
            if not is_workspace(value) and digest(value) != check.saved[index]:
                raise call.error(
                    index,
                    f"saved tensor {index} of {len(call.holders)} ({value.dtype} {list(value.shape)}) has another value "
                    "when recomputed",
                    _CAUSE,
                )
        for index, (tensor, wanted) in enumerate(zip(output_tensors(output), check.outputs, strict=False)):
            if digest(tensor) != wanted:
                raise call.error(-1, f"output {index} has another value when recomputed", _CAUSE)
        call.region.checked(call.signature)
        if call.settings.guard == "first":
            call.check = None

    def commit(self) -> None:
        """Hand the tensors to their holders."""
        for holder, tensor in self.fresh:
            holder.value = tensor

    def let_go(self) -> None:
        """The replay has ended: hold nothing, whoever holds its graph."""
        for packed in self.packed:
            packed.tensor = None
        self.fresh, self.packed, self._values = [], [], {}
