"""Checkpoints that are wrong in one way each. A suite that does not catch every one of them fails.

Those with a swap of their own are the real engine with one step taken out, and with its guard off, so that what is seen
is the comparison's work and not the guard's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regrad.torch.cohort.modes import Mode, eager, ours
from regrad.torch.cohort.programs import Program
from regrad.torch.regions import replay
from regrad.torch.regions.entry import Swap
from regrad.torch.regions.public import Checkpoint


class _ForgottenGenerator(Swap):
    """Replays from wherever the generators stand."""

    def to_entry(self) -> None:
        super().to_entry()
        for (source, _), state in zip(self.entry.generators, self.generators, strict=True):
            source.bring(state)


class _LeftGenerator(Swap):
    """Restores bytes, and leaves the generators where the replay left them."""

    def _generators_back(self) -> None:
        pass


class _FinalStorage(Swap):
    """Replays from the bytes that stand in large storages now."""

    def to_entry(self) -> None:
        super().to_entry()
        for old, now in reversed(self.redo):
            old.put(now)


class _PresentNotBack(Swap):
    """Leaves large storages at what the call found."""

    def _log_back(self) -> None:
        for old, _ in self.redo:
            old.put()


class _Hoard(TorchDispatchMode):
    """Holds on to every result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.results.append(out)
        return out


def _twice(function: Callable[..., Any], *args: Any) -> Any:
    function(*args)
    return function(*args)


class _ClonesSources(TorchDispatchMode):
    """Copies from a clone, so that eager's refusal of overlapping ranges never comes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args = (args[0], args[1].clone(), *args[2:])
        return func(*args, **(kwargs or {}))


def _accepts(function: Callable[..., Any], x: torch.Tensor) -> Any:
    with _ClonesSources():
        return function(x)


def _refuses_late(function: Callable[..., Any], x: torch.Tensor) -> Any:
    try:
        return function(x)
    finally:
        torch.rand(1)


def _hoards(program: Program) -> tuple[Callable[..., Any], Checkpoint]:
    checkpoint = ours(program, "journal", "declared")[1]
    hoard = _Hoard()

    def call(function: Callable[..., Any], *args: Any) -> Any:
        hoard.results.clear()
        with hoard:
            return checkpoint(function, *args)

    return call, checkpoint


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    conditions  where it must be seen
    swap        what stands in for the engine's own swap while it runs
    refused_for  if it must be the engine that sees it: words of its error
    """

    mode: Mode
    conditions: str
    swap: type[Swap] = Swap
    refused_for: str = ""

    @contextmanager
    def planted(self) -> Iterator[Mode]:
        """While planted."""
        names = vars(replay)
        sound, names["Swap"] = names["Swap"], self.swap
        try:
            yield self.mode
        finally:
            names["Swap"] = sound


def _plain(name: str, checkpoint: Callable[..., Any]) -> Mode:
    return Mode(name, lambda program: (checkpoint, None))


def _engine(name: str, engine: str = "journal", guard: str = "off") -> Mode:
    return Mode(name, functools.partial(ours, engine=engine, state="declared", guard=guard))


FAULTS = (
    Fault(_plain("runs the body twice", _twice), "ABCD"),
    Fault(_plain("never runs the body again", eager), "ABCD"),
    Fault(Mode("holds what it recomputes", _hoards), "ABCD"),
    Fault(_engine("forgets the generator"), "ABCD", _ForgottenGenerator),
    Fault(_engine("restores bytes and leaves the generator"), "ABCD", _LeftGenerator),
    Fault(_engine("reads the final storage"), "CD", _FinalStorage),
    Fault(_engine("does not bring the present back"), "CD", _PresentNotBack),
    Fault(
        _engine("reads the final storage, guarded", "guarded", "first"),
        "CD",
        _FinalStorage,
        refused_for="after its old bytes were put back",
    ),
    Fault(_plain("runs where eager refuses", _accepts), "E"),
    Fault(_plain("refuses and has drawn once more", _refuses_late), "E"),
)
