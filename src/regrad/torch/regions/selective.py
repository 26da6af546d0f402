"""Random numbers under a selective policy.

A policy that saves one random operation and recomputes a later one skips the saved one's draw in the replay, and the
stream would be at another place for the later one. So the forward records where the stream stood before each draw, and
the replay puts it there before the same draw, counted over all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from regrad.torch.regions.discover.sources import CPU, CUDA, Source, source_of
from regrad.torch.regions.kept import Kept
from regrad.torch.regions.watch import Quiet, draws


class Draws:
    """The states before each draw of one forward."""

    def __init__(self) -> None:
        self.states: list[tuple[Source, Kept]] = []

    def first(self) -> Any:
        """The mode for the forward."""
        return _Record(self)

    def again(self) -> Any:
        """The mode for a replay."""
        return _Again(self)


def _source(args: Any, kwargs: Any) -> Source:
    generator = (kwargs or {}).get("generator")
    if generator is not None:
        return source_of(generator)
    cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
    device = (kwargs or {}).get("device")
    return CUDA if cuda or (device is not None and torch.device(device).type == "cuda") else CPU


class _Record(Quiet):
    def __init__(self, owner: Draws) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "tags", None) and draws(func):
            source = _source(args, kwargs)
            state = source.get()
            self.owner.states.append((source, Kept(state, source.size(state))))
        return func(*args, **(kwargs or {}))


class _Again(Quiet):
    def __init__(self, owner: Draws) -> None:
        super().__init__()
        self.owner, self.position = owner, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "tags", None) and draws(func) and self.position < len(self.owner.states):
            source, state = self.owner.states[self.position]
            self.position += 1
            source.set(state.data)
        return func(*args, **(kwargs or {}))
