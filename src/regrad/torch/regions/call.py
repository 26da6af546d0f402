"""One call of a region: what its forward saved, and the decision at its end to drop, refer or keep."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from regrad.core.errors import ReplayDivergence
from regrad.torch.regions import log
from regrad.torch.regions.arguments import Arguments, hold
from regrad.torch.regions.cut import Cutter, find_cut
from regrad.torch.regions.discover.tensors import address_of
from regrad.torch.regions.entry import Entry, version_of
from regrad.torch.regions.frames import Frame
from regrad.torch.regions.guard import Check, digest, is_workspace, output_tensors, user_line
from regrad.torch.regions.region import Region
from regrad.torch.regions.settings import Settings


class Holder:
    """What stands in the graph in place of a saved tensor. It keeps its call alive, never the other way round.

    ``value`` is the tensor while it is there: for good if ``kept``, else from a replay to its use.
    """

    __slots__ = ("__weakref__", "call", "index", "kept", "value", "version")

    def __init__(self, call: Call, index: int) -> None:
        self.call, self.index = call, index
        self.value: torch.Tensor | None = None
        self.kept, self.version = False, -1
        call.alive += 1

    def __del__(self) -> None:
        self.call.lost()

    def borrow(self) -> torch.Tensor:
        """The tensor, from a replay if need be."""
        return unpack(self)


class Lent:
    """A tensor that a replay lends to a call inside it: there as long as someone holds this."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def borrow(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor


class Call:
    """Everything that one call needs for its replays. Alive as long as something that it saved is in a graph."""

    def __init__(self, region: Region, settings: Settings, function: Any, arguments: Arguments, entry: Entry) -> None:
        self.region, self.settings, self.function = region, settings, function
        self.arguments, self.entry = arguments, entry
        self.name = region.name
        self.holders: list[weakref.ref[Holder]] = []
        self.saved: list[tuple[torch.Tensor, int, torch.Tensor | None]] | None = []
        self.state = entry.by_address()
        self.lent: dict[tuple[int, int], weakref.ref[Holder]] = {}
        self.metas: list[tuple[Any, Any] | None] = []
        self.check: Check | None = None
        self.once: list[Any] = []
        self.signature: Any = None
        self.watched = self.pieces = False
        self.operations: list[Any] | None = None
        self.positions: list[int] = []
        self.contexts: Any = None
        self.draws: Any = None
        self.check_metas = True
        self.epoch = entry.epoch
        self.alive = 0

    def __del__(self) -> None:
        log.end(self.epoch)

    # -- while the forward runs ---------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Holder:
        """Autograd saves ``tensor``."""
        assert self.saved is not None
        holder = Holder(self, len(self.saved))
        address = address_of(tensor)
        state = self.state.get(address)
        if state is not None and address_of(state) != address:
            state = None  # the state moved away, and other data came to lie where it was
        self.saved.append((tensor, version_of(tensor), state))
        self.holders.append(weakref.ref(holder))
        if self.check is not None:
            self.check.lines.append(user_line())
        if self.operations is not None:
            self.positions.append(len(self.operations))
        return holder

    def lend(self, frame: Frame, key: tuple[int, int], tensor: torch.Tensor) -> Any:
        """A call inside this one (or inside a replay of it) hands over an argument."""
        if frame.replaying:
            holder = self.lent.get(key)
            owner = None if holder is None else holder()
            if owner is not None:
                owner.value = tensor
            return Lent(tensor)
        made = Holder(self, -1)
        self.lent[key] = weakref.ref(made)
        made.value = tensor
        return made

    # -- at its end ---------------------------------------------------------------------------------------------------

    def finish(self, output: Any, *, keep: bool, nested: bool) -> None:
        """Decide what becomes of each saved tensor."""
        saved, self.saved = self.saved, None
        assert saved is not None
        moved, arguments = self.entry.moved(), self._argument_addresses(nested)
        self.state = {}
        for (tensor, version, state), ref in zip(saved, self.holders, strict=True):
            holder = ref()
            if holder is None:
                self.metas.append(None)
                continue
            address = address_of(tensor)
            state = state if state is not None else moved.get(address)
            if keep or state is not None or address in arguments:
                holder.value, holder.kept, holder.version = _reference(tensor, state), True, version
                self.metas.append(None)
            else:
                self.metas.append((tensor.shape, tensor.dtype))
        if self.check is not None and not keep:
            self.check.saved = [
                None if meta is None or is_workspace(tensor) else digest(tensor)
                for (tensor, *_), meta in zip(saved, self.metas, strict=True)
            ]
            self.check.outputs = [digest(tensor) for tensor in output_tensors(output)]
        for ref in self.lent.values():
            holder = ref()
            if holder is not None:
                holder.kept = keep
                holder.value = holder.value if keep else None
        if keep or not (self.lent or any(self.metas)):
            self._let_go()
        elif self.operations is not None and self.contexts is None:
            needed = [meta is not None for meta in self.metas]
            cut = None if self.lent else find_cut(self.operations, self.positions, needed, self.region.reach.names)
            self.region.cuts[self.signature] = cut
        self.operations, self.positions = None, []

    def cutter(self) -> Cutter | None:
        """How this call's replay can be cut short, if it can."""
        cut = self.region.cuts.get(self.signature)
        if cut is None or self.check is not None or self.watched or self.lent or self.contexts is not None:
            return None
        if cut.count != len(self.holders) or any(self.metas[cut.last + 1 :]):
            return None
        return Cutter(cut)

    def lost(self) -> None:
        """One of its holders died. After the last one nothing asks for a replay, though what the call holds may lead
        back to its own graph: a context variable or a container that collects outputs."""
        self.alive -= 1
        if not self.alive and self.saved is None:
            self._let_go()

    def _let_go(self) -> None:
        """Nothing will be replayed: hold none of what only a replay needs."""
        log.end(self.epoch)
        self.function = self.arguments = self.entry = self.check = self.contexts = self.draws = None  # type: ignore[assignment]
        self.once = []

    def _argument_addresses(self, nested: bool) -> set[int]:
        if nested:
            return set()
        return {held.signature[1] for held in self.arguments.held if held.old is None} - {0}

    # -- in the backward ----------------------------------------------------------------------------------------------

    def error(self, index: int, what: str, hint: str) -> ReplayDivergence:
        """The error for saved tensor ``index``."""
        lines = [] if self.check is None else self.check.lines
        line = lines[index] if 0 <= index < len(lines) else self.region.line
        return ReplayDivergence(
            f"replay differs from the forward: {what}",
            segment=self.name,
            thing=f"saved tensor {index}",
            line=line,
            gradients_touched=in_backward(),
            hint=hint,
        )


def unpack(holder: Holder) -> torch.Tensor:
    """Autograd needs what it saved."""
    call = holder.call
    if call.saved is not None:  # its forward still runs
        if holder.index < 0:
            assert holder.value is not None
            return holder.value
        tensor, version, _ = call.saved[holder.index]
        _check_version(tensor, version)
        return tensor
    value = holder.value
    if value is None:
        from regrad.torch.regions.replay import replay

        replay(call, holder)
        value = holder.value
        if value is None:
            raise call.error(holder.index, "a tensor that the forward saved was not saved again", "")
    if holder.kept:
        if holder.index >= 0:
            _check_version(value, holder.version)
    else:
        holder.value = None
    return value


def _reference(saved: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    """What to hold for a saved tensor that will not be computed again: the state itself if it is all of it.

    Autograd saves a leaf and not its data: after ``tensor.data = other`` an eager backward finds the other.
    """
    if state is not None and state.is_leaf and state.shape == saved.shape and state.stride() == saved.stride():
        return state
    return hold(saved)


def _check_version(tensor: torch.Tensor, version: int) -> None:
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {version_of(tensor)}; expected version {version} "
            "instead. (It was saved inside a checkpointed region and belongs to state or an argument.)"
        )


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread now."""
    return bool(torch._C._current_graph_task_id() != -1)
