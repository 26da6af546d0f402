"""What is held of the calls of a range from its forward to its backward.

A recording belongs to one outermost range of one forward; the ranges inside it are its sections, intervals of the same
list of calls. Nothing in it holds a tensor that was computed inside, nor anything that leads back to it, so it dies with
the last holder in the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from regrad.core.errors import ModifiedArgument, ReplayDivergence
from regrad.torch.regions.arguments import hold
from regrad.torch.regions.call import in_backward
from regrad.torch.regions.entry import signature, version_of
from regrad.torch.regions.guard import digest, is_workspace
from regrad.torch.regions.kept import Kept
from regrad.torch.tape.ranges import Range
from regrad.torch.tape.setting import Setting

CAUSE = (
    "The range holds a kernel that is not deterministic, or a call that reads what torch does not show (a NumPy view, "
    "another process). Leave that call out of the range."
)


class Stored:
    """A storage that a recorded call made: who wrote it since, and its version after the last of them.

    loose   something that the recording does not see may have touched it: from here on its tensors are held
    graph   a write with gradients on may have made its tensors part of a graph
    """

    __slots__ = ("__weakref__", "birth", "graph", "loose", "version", "writers")

    def __init__(self, birth: int, version: int) -> None:
        self.birth, self.version = birth, version
        self.writers: list[int] = []
        self.loose = self.graph = False


class Ref:
    """Result ``index`` of the recorded call at ``position``; while the range is open it is known by its identity."""

    __slots__ = ("index", "position", "requires_grad", "storage", "weak")

    def __init__(self, tensor: torch.Tensor, position: int, index: int, storage: Stored) -> None:
        self.position, self.index, self.storage = position, index, storage
        self.weak, self.requires_grad = weakref.ref(tensor), tensor.requires_grad

    @property
    def key(self) -> tuple[int, int]:
        """What names it within a recording."""
        return self.position, self.index


class External:
    """A tensor from outside the recording, held as it was when a call used it."""

    __slots__ = ("name", "origin", "requires_grad", "signature", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.name = name
        self.origin = weakref.ref(tensor)
        self.tensor = hold(tensor)
        self.requires_grad = tensor.requires_grad
        self.signature = signature(self.tensor)

    def give(self, title: str) -> torch.Tensor:
        """A leaf of its own for one replay. Raises :class:`ModifiedArgument` if other code changed the data."""
        now = signature(self.tensor)
        if now != self.signature:
            raise ModifiedArgument(
                f"an argument of {self.name} ({self.tensor.dtype} {list(self.tensor.shape)}) was modified in place after "
                "the call used it",
                segment=title,
                thing=f"an argument of {self.name}",
                gradients_touched=in_backward(),
                hint="End the range before that call, or change a copy of the tensor (clone()).",
            )
        tensor = self.tensor.detach()
        return tensor.requires_grad_() if self.requires_grad else tensor


class Private:
    """A statistic that a call writes without saying so: a replay writes a copy, which nobody looks at."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = hold(tensor)


class Holder:
    """What stands in the graph in place of a saved tensor.

    A kept one has its tensor for good and no recording. Any other has it from a replay to its use.
    """

    __slots__ = ("__weakref__", "index", "position", "recording", "value", "version")

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.position = self.index = self.version = -1
        self.value: torch.Tensor | None = None

    def keep(self, tensor: torch.Tensor) -> None:
        """Hold the tensor as an eager graph does."""
        self.value = hold(tensor)


@dataclass(slots=True)
class Saved:
    """A tensor that a recorded call saved, in the order in which it saved them.

    holder    None if the tensor itself is kept in the graph
    source    where the tensor is an argument or a view of one: what it is, with ``geometry``; the call need not run
    """

    holder: weakref.ref[Holder] | None
    meta: tuple[Any, ...]
    storage: Stored | None = None
    version: int = -1
    source: Ref | None = None
    geometry: tuple[Any, ...] = ()
    digest: Any = None

    def pending(self) -> Holder | None:
        """Its holder if that is alive and has nothing to give."""
        holder = None if self.holder is None else self.holder()
        return None if holder is None or holder.value is not None else holder


@dataclass(slots=True)
class Recorded:
    """One call: what runs again, with tensors as :class:`Ref`, :class:`External` and :class:`Private`.

    whole   whether it must run to its end once it runs; a product need not, once it has saved its operands
    """

    ordinal: int
    name: str
    section: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: tuple[Ref, ...]
    setting: Setting | None
    saved: list[Saved] = field(default_factory=list)
    state: Kept | None = None
    generators: tuple[torch.Generator, ...] = ()
    line: str = ""
    whole: bool = False

    def forget(self) -> None:
        """No replay will run it."""
        self.func = self.setting = self.state = None
        self.args, self.kwargs, self.given = (), {}, ()


@dataclass(slots=True)
class Section:
    """A range in the recording: calls ``start`` … ``stop - 1`` of its list (``stop`` is -1 while it is open).

    parent     index of the section around it; -1 for the outermost
    dissolved  its calls belong to its parent: a call inside it wrote what entered it
    entered    storages of the recording that it uses and that are older than it
    lent       what a replay of its parent computed for it
    check      whether its next replay is compared with the forward
    """

    range: Range
    start: int
    parent: int
    check: bool
    stop: int = -1
    dissolved: bool = False
    entered: set[Stored] = field(default_factory=set)
    lent: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


class Recording:
    """The calls and sections of one run of an outermost range. ``tally`` counts what becomes of its ranges."""

    def __init__(self, tally: Any, below: tuple[Any, ...]) -> None:
        self.tally, self.below = tally, below
        self.calls: list[Recorded] = []
        self.sections: list[Section] = []

    def owner(self, index: int) -> int:
        """The section that answers for what was recorded in section ``index``."""
        while self.sections[index].dissolved:
            index = self.sections[index].parent
        return index

    def within(self, inner: int, index: int) -> bool:
        """Whether section ``inner`` is section ``index`` or inside it."""
        inner = self.owner(inner)
        while inner > index:
            inner = self.owner(self.sections[inner].parent)
        return inner == index

    def children(self, index: int) -> Iterator[int]:
        """The sections directly inside section ``index``."""
        for at, section in enumerate(self.sections):
            if not section.dissolved and section.parent >= 0 and self.owner(section.parent) == index:
                yield at

    def stop_of(self, index: int) -> int:
        """Where section ``index`` ends, or has got to."""
        stop = self.sections[index].stop
        return len(self.calls) if stop < 0 else stop

    def error(self, position: int, index: int, what: str) -> ReplayDivergence:
        """The error for saved tensor ``index`` of the call at ``position``."""
        call = self.calls[position]
        return ReplayDivergence(
            f"replay differs from the forward: {what}",
            segment=self.sections[self.owner(call.section)].range.title,
            thing=f"saved tensor {index} of call {call.ordinal} ({call.name})",
            line=call.line,
            gradients_touched=in_backward(),
            hint=CAUSE,
        )


def digest_of(tensor: torch.Tensor) -> Any:
    """A digest of the values, ``None`` where there is nothing to compare."""
    return None if is_workspace(tensor) else digest(tensor)


def unpack(holder: Holder) -> torch.Tensor:
    """Autograd needs what it saved."""
    recording = holder.recording
    if recording is None:
        assert holder.value is not None
        _check_version(holder.value, version_of(holder.value), holder.version)
        return holder.value
    saved = recording.calls[holder.position].saved[holder.index]
    if holder.value is None:
        from regrad.torch.tape.replay import replay

        replay(recording, holder)
    value, holder.value = holder.value, None
    if value is None:
        raise recording.error(holder.position, holder.index, "a tensor that the forward saved was not saved again")
    if saved.storage is not None:
        _check_version(value, saved.storage.version, saved.version)
    return value


def _check_version(tensor: torch.Tensor, now: int, wanted: int) -> None:
    if now != wanted:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {now}; expected version {wanted} instead. (It was "
            "saved inside a recorded range.)"
        )
