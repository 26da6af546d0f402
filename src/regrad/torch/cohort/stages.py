"""What a program's segment is made of: views of its memory, products, reads, draws, bends, writes, and a raw copy."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# A program stands for a user's. Discovery does not read the library's own code, so this must not look like a part of it.
sys.modules["cohort_programs"] = sys.modules[__name__]
__name__ = "cohort_programs"

# name -> a smooth function by element; none of them shrinks a gradient to nothing
BENDS: dict[str, Any] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "elu": functional.elu,
    "softplus": functional.softplus,
    "bell": lambda h: h * torch.exp(-0.5 * h * h),
}

DRAWS: dict[str, Any] = {
    "normal added": lambda h: h + 0.5 * torch.randn_like(h),
    "normal of a size": lambda h: h + torch.normal(0.0, 0.5, h.shape, dtype=h.dtype),
    "uniform factor": lambda h: h * (0.5 + torch.rand_like(h)),
    "exponential factor": lambda h: h * torch.empty_like(h).exponential_(1.0).clamp(0.1, 2.0),
    "dropout": lambda h: functional.dropout(h, 0.3, training=True),
    "bernoulli mask": lambda h: h * (0.5 + torch.bernoulli(torch.full_like(h, 0.5))),
    "row order": lambda h: h[torch.randperm(h.shape[0])] + 0.5 * torch.rand_like(h),
}


class View(ABC):
    """A view of a matrix, made anew at each use."""

    @abstractmethod
    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The view of ``memory``."""


@dataclass(frozen=True)
class Block(View):
    """Every ``k``-th row and column of a rectangle, transposed or not."""

    rows: slice
    columns: slice
    transposed: bool = False

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The view of ``memory``, which may lie in any order."""
        view = memory[self.rows, self.columns]
        return view.t() if self.transposed else view


@dataclass(frozen=True)
class Stretch(View):
    """Every ``step``-th element from ``start`` on, across the ends of rows."""

    start: int
    step: int
    shape: tuple[int, int]

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The view of ``memory``, which must be contiguous."""
        count = self.shape[0] * self.shape[1]
        elements = memory.view(-1)[self.start : self.start + self.step * count : self.step]
        return elements.view(self.shape)


@dataclass(frozen=True, eq=False)
class Ready(View):
    """A view that was made when the program was built: an alias that the segment captures beside the buffer."""

    tensor: torch.Tensor

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The captured alias."""
        return self.tensor


class Stage(ABC):
    """One step of a segment: from a matrix ``h`` and the memory to the next ``h``."""

    @abstractmethod
    def run(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """The next ``h``, with the same number of rows."""


@dataclass(frozen=True, eq=False)
class Product(Stage):
    """``h`` times a weight that is stored by row or by column, with a bias or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def run(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """A matrix product."""
        return h @ self.weight if self.bias is None else torch.addmm(self.bias, h, self.weight)


@dataclass(frozen=True)
class Read(Stage):
    """``how``: "inside" adds a view, "gate" multiplies by one, "mix" takes a product with one (square)."""

    view: View
    how: str
    scale: float

    def run(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Combine. Nothing is saved by reference: a later write must not be one that autograd refuses."""
        seen = self.view.of(memory)
        if self.how == "inside":
            return h + self.scale * seen
        if self.how == "gate":
            return h * (1 + self.scale * seen)
        return h + self.scale * (h @ seen.clone())


@dataclass(frozen=True)
class Draw(Stage):
    """Noise from torch's generator."""

    kind: str

    def run(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Draw and combine."""
        out: torch.Tensor = DRAWS[self.kind](h)
        return out


@dataclass(frozen=True)
class Bend(Stage):
    """A nonlinearity."""

    kind: str

    def run(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Bend each element."""
        out: torch.Tensor = BENDS[self.kind](h)
        return out


@dataclass(frozen=True, eq=False)
class Write(Stage):
    """Overwrite or add to memory, with values that come from ``h``.

    how      "copy", "assign", "fill", "rows", "put" overwrite; "add", "sub", "product", "rows added", "put added" add
    rows     numbers of the rows that the kinds with rows or put write; ``pattern`` is what a row looks like
    graph    whether gradients flow through the write (a copy of the segment's own) or not (a captured buffer)
    """

    view: View
    how: str
    rows: torch.Tensor
    pattern: torch.Tensor
    graph: bool

    def run(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Write, and hand ``h`` on."""
        value = h if self.graph else h.detach()
        target = self.view.of(memory)
        if value.shape != target.shape:
            value = value.mean() * torch.ones_like(target)
        value = torch.tanh(value)
        if self.how == "copy":
            target.copy_(value)
        elif self.how == "assign":
            target[:] = value
        elif self.how == "fill":
            target.fill_(value.mean())
        elif self.how == "rows":
            memory.index_copy_(0, self.rows, self.pattern * value.mean())
        elif self.how == "put":
            memory[self.rows] = self.pattern * value.mean()
        elif self.how == "add":
            target.add_(value, alpha=0.5)
        elif self.how == "sub":
            target.sub_(value, alpha=0.5)
        elif self.how == "product":
            target.addcmul_(value, value + 1, value=0.5)
        elif self.how == "rows added":
            memory.index_add_(0, self.rows, self.pattern * value.mean())
        else:
            memory.index_put_((self.rows,), self.pattern * value.mean(), accumulate=True)
        return h


@dataclass(frozen=True)
class RawCopy(Stage):
    """Copies a dense range of memory onto another one that it overlaps. PyTorch refuses it."""

    target: View
    source: View
    how: str

    def run(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Raises ``RuntimeError`` in eager."""
        source, target = self.source.of(memory), self.target.of(memory)
        if self.how == "copy":
            target.copy_(source)
        else:
            target[:] = source
        return h


def run_stages(stages: tuple[Stage, ...], x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """One run of a segment. ``values`` is there for who watches what becomes of them."""
    values = [memory, x]
    for stage in stages:
        values.append(stage.run(values[-1], memory))
    return values[-1]


class InModule(nn.Module):
    """Captures its memory as a registered buffer."""

    def __init__(self, stages: tuple[Stage, ...], memory: torch.Tensor, parameters: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.stages = stages
        self.weights = nn.ParameterList(parameters)
        self.register_buffer("memory", memory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One run."""
        assert isinstance(self.memory, torch.Tensor)
        return run_stages(self.stages, x, self.memory)


class InObject:
    """Captures its memory as an attribute of a plain object."""

    def __init__(self, stages: tuple[Stage, ...], memory: torch.Tensor) -> None:
        self.stages, self.memory = stages, memory

    def call(self, x: torch.Tensor) -> torch.Tensor:
        """One run."""
        return run_stages(self.stages, x, self.memory)


def segment_of(
    holder: str, stages: tuple[Stage, ...], memory: torch.Tensor, parameters: tuple[torch.Tensor, ...]
) -> Callable[..., Any]:
    """``segment(x)``, or with an argument for the state; ``holder`` says which, and how the memory is captured."""
    if holder == "argument, read":
        return lambda x, state: run_stages(stages, x, state.clone())
    if holder == "argument, returned":

        def with_state(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            own = state.clone()
            return run_stages(stages, x, own), own

        return with_state
    if holder == "module":
        return InModule(stages, memory, parameters)
    if holder == "object":
        return InObject(stages, memory).call
    return lambda x: run_stages(stages, x, memory)
