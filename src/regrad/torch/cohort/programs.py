"""Seeded random programs, five a seed: each is one segment with noise, run for three steps with its state carried on.

A  local view, read                the state is an argument, read through strided views of a fresh copy
B  local view, write               the segment writes through views of its own copy and returns it
C  hidden buffer, overwrite        reads a captured buffer, then overwrites a part of what it read
D  hidden buffer, accumulate       reads a captured buffer through one view, adds into it through one that overlaps
E  raw overlapping copy            copies a captured buffer onto an overlapping range of itself, which eager refuses

Everything that a definition leaves open is drawn: shapes, types, layouts, offsets, strides, the number of views and of
draws, nonlinearities, kinds of reads and writes, and how the buffer is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regrad.torch.cohort.stages import (
    BENDS,
    DRAWS,
    Bend,
    Block,
    Draw,
    Product,
    RawCopy,
    Read,
    Ready,
    Stage,
    Stretch,
    View,
    Write,
    segment_of,
)

CONDITIONS = "ABCDE"
STEPS = 3
LOCAL = "AB"  # the state is an argument; the others capture it
OVERWRITES = ("copy", "assign", "fill", "rows", "put")
ACCUMULATES = ("add", "sub", "product", "rows added", "put added")
LEAST_BYTES, MOST_BYTES = 272 * 1024, 640 * 1024  # more than what is copied at every call whatever the engine


@dataclass
class Program:
    """One program, ready for its first step.

    segment   ``segment(x)``, or ``segment(x, state)`` under A and B; returns the output, under B also the state
    memory    the state: what is handed over at the next step, or the captured buffer, a matrix
    storage   all of the storage that ``memory`` was made in, flat
    aliases   views of it that the segment captured
    read_first  the views that are read before anything is written
    """

    condition: str
    segment: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    probe: torch.Tensor
    field: torch.Tensor
    parameters: tuple[torch.Tensor, ...]
    memory: torch.Tensor
    storage: torch.Tensor
    aliases: tuple[torch.Tensor, ...]
    read_first: tuple[View, ...]
    facts: dict[str, Any]

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What the segment gets beside its input."""
        return (self.memory,) if self.condition in LOCAL else ()


class _Builder:
    """Draws one program. All choices come from ``random``, all numbers from ``generator``; torch's own stays put."""

    def __init__(self, seed: int, condition: str) -> None:
        self.condition = condition
        self.random = np.random.default_rng([seed, CONDITIONS.index(condition)])
        self.generator = torch.Generator().manual_seed(int(self.random.integers(2**62)))
        self.dtype = (torch.float32, torch.float64)[int(self.random.integers(2))]
        self.rows = int(self.random.integers(2, 8))
        self.width = int(self.random.integers(3, 12))
        self.parameters: list[torch.Tensor] = []
        self.aliases: list[torch.Tensor] = []
        self._memory()

    def _memory(self) -> None:
        size = int(self.random.integers(LEAST_BYTES, MOST_BYTES)) // self.dtype.itemsize
        columns = int(self.random.integers(24, 97))
        count = size // columns
        self.by_column = self.condition != "E" and self.random.random() < 0.25
        self.offset = int(self.random.integers(0, 200)) if self.random.random() < 0.5 else 0
        self.storage = self.normal(self.offset + count * columns)
        flat = self.storage[self.offset :]
        self.memory = flat.view(columns, count).t() if self.by_column else flat.view(count, columns)
        self.places = torch.arange(count * columns).view(count, columns)

    # -- draws --------------------------------------------------------------------------------------------------------

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers of the program's type."""
        return scale * torch.randn(*shape, generator=self.generator, dtype=self.dtype)

    def one_of(self, names: Any) -> Any:
        """One of ``names``."""
        names = tuple(names)
        return names[int(self.random.integers(len(names)))]

    def view(self, shape: tuple[int, int]) -> View:
        """A view of ``shape`` somewhere in memory, made at each use."""
        if not self.by_column and self.random.random() < 0.35:
            step, count = int(self.random.integers(1, 6)), shape[0] * shape[1]
            return Stretch(int(self.random.integers(self.memory.numel() - step * count)), step, shape)
        transposed = self.random.random() < 0.3
        sizes = shape[::-1] if transposed else shape
        slices = []
        for size, length in zip(sizes, self.memory.shape, strict=True):
            step = int(self.random.integers(1, max(2, min(5, (length - 1) // size))))
            start = int(self.random.integers(length - step * size))
            slices.append(slice(start, start + step * size, step))
        return Block(slices[0], slices[1], transposed)

    def overlapping(self, shape: tuple[int, int], other: View) -> View:
        """A view that shares some elements with ``other`` and is another one."""
        wanted = other.of(self.places)
        for _ in range(10_000):
            start, column = divmod(int(self.random.choice(wanted.flatten().numpy())), self.memory.shape[1])
            row_step, step = int(self.random.integers(1, 4)), int(self.random.integers(1, 3))
            first = start - row_step * int(self.random.integers(shape[0]))
            left = column - step * int(self.random.integers(shape[1]))
            ends = (first + row_step * shape[0], left + step * shape[1])
            if first < 0 or left < 0 or ends[0] > self.memory.shape[0] or ends[1] > self.memory.shape[1]:
                continue
            found = Block(slice(first, ends[0], row_step), slice(left, ends[1], step))
            if not torch.equal(found.of(self.places), wanted):
                return found
        raise AssertionError("no view overlaps")

    def captured(self, view: View) -> View:
        """``view``, or an alias of it that the segment captures."""
        if self.condition in LOCAL or self.random.random() < 0.5:
            return view
        self.aliases.append(view.of(self.memory))
        return Ready(self.aliases[-1])

    # -- stages -------------------------------------------------------------------------------------------------------

    def product(self) -> Product:
        """To a new width."""
        before, self.width = self.width, int(self.random.integers(3, 12))
        by_row = self.random.random() < 0.7
        shape = (before, self.width) if by_row else (self.width, before)
        weight = self.normal(*shape, scale=1.2 / before**0.5).requires_grad_()
        bias = self.normal(self.width, scale=0.3).requires_grad_() if self.random.random() < 0.5 else None
        self.parameters += [weight] if bias is None else [weight, bias]
        return Product(weight if by_row else weight.t(), bias)

    def read(self) -> tuple[Read, View]:
        """A read through a view of its own, and that view."""
        how = self.one_of(("inside", "inside", "gate", "mix"))
        shape = (self.width, self.width) if how == "mix" else (self.rows, self.width)
        view = self.view(shape)
        return Read(self.captured(view), how, float(self.random.uniform(0.4, 0.9))), view

    def write(self, overlaps: View) -> Write:
        """A write of the condition's kind into something that ``overlaps`` shares elements with."""
        kinds = {"C": OVERWRITES, "D": ACCUMULATES}.get(self.condition, OVERWRITES + ACCUMULATES)
        how = self.one_of(kinds)
        shape = (self.rows, self.width)
        view: View = self.overlapping(shape, overlaps)
        touched = torch.div(overlaps.of(self.places).flatten(), self.memory.shape[1], rounding_mode="floor")
        if self.random.random() < 0.2:  # a large part: more than a quarter of memory
            part = int(self.memory.shape[0] * self.random.uniform(0.3, 0.8))
            low, high = max(0, int(touched[0]) - part + 1), min(int(touched[0]), self.memory.shape[0] - part)
            start = int(self.random.integers(low, high + 1))
            view = Block(slice(start, start + part), slice(None))
        others = torch.randperm(self.memory.shape[0], generator=self.generator)[: int(self.random.integers(1, 4))]
        rows = torch.cat([touched[:1], others[others != touched[0]]])
        pattern = self.normal(len(rows), self.memory.shape[1])
        return Write(self.captured(view), how, rows, pattern, graph=self.condition == "B")

    def raw_copy(self) -> RawCopy:
        """Dense ranges of one length that overlap: whole rows, or elements across rows."""
        rows, columns = self.memory.shape
        if self.random.random() < 0.5:
            length = int(self.random.integers(2, rows // 2))
            shift = int(self.random.integers(1, length))
            start = int(self.random.integers(rows - length - shift))
            low: View = Block(slice(start, start + length), slice(None))
            high: View = Block(slice(start + shift, start + shift + length), slice(None))
        else:
            length = int(self.random.integers(8, columns * rows // 2))
            shift = int(self.random.integers(1, length))
            start = int(self.random.integers(columns * rows - length - shift))
            low, high = (Stretch(at, 1, (1, length)) for at in (start, start + shift))
        target, source = (low, high) if self.random.random() < 0.5 else (high, low)
        return RawCopy(self.captured(target), self.captured(source), self.one_of(("copy", "assign")))

    def stages(self) -> tuple[list[Stage], list[View]]:
        """Two to four groups of product, read, draw, bend; writes after the first read; views read before any write."""
        groups = int(self.random.integers(2, 5))
        noisy = {int(self.random.integers(groups))} | {g for g in range(groups) if self.random.random() < 0.4}
        found: list[Stage] = []
        reads: list[View] = []
        read_first: list[View] = []
        for group in range(groups):
            found.append(self.product())
            if group == 0 or self.random.random() < 0.6:
                stage, view = self.read()
                found.append(stage)
                reads.append(view)
            if not any(isinstance(stage, Write) for stage in found):
                read_first = list(reads)
            found += [Draw(self.one_of(DRAWS))] if group in noisy else []
            found.append(Bend(self.one_of(BENDS)))
            if self.condition in "BCD" and (group == groups - 1 or self.random.random() < 0.4):
                found.append(self.write(self.one_of(read_first)))
        if self.condition == "E":
            at = int(
                self.random.integers(max(i for i, s in enumerate(found) if isinstance(s, Draw)) + 1, len(found) + 1)
            )
            found.insert(at, self.raw_copy())
        return found, read_first

    def build(self) -> Program:
        """The program."""
        width = self.width
        inputs = tuple(self.normal(self.rows, width) for _ in range(STEPS))
        stages, read_first = self.stages()
        holders = {"A": ("argument, read",), "B": ("argument, returned",)}
        holder = str(self.one_of(holders.get(self.condition, ("module", "object", "closure"))))
        asks_state = self.condition in LOCAL and self.random.random() < 0.5
        counts = {
            name: sum(isinstance(stage, kind) for stage in stages)
            for name, kind in (("reads", Read), ("writes", Write), ("draws", Draw), ("products", Product))
        }
        facts = counts | {
            "held_by": holder,
            "state_bytes": self.storage.numel() * self.dtype.itemsize,
            "element_bytes": self.dtype.itemsize,
            "captured_views": len(self.aliases),
            "state_gradient": asks_state,
        }
        parameters = tuple(self.parameters)
        return Program(
            condition=self.condition,
            segment=segment_of(holder, tuple(stages), self.memory, parameters),
            inputs=inputs,
            probe=self.normal(self.rows, self.width),
            field=self.normal(*self.memory.shape),
            parameters=parameters,
            memory=self.memory.clone().requires_grad_() if asks_state else self.memory,
            storage=self.storage,
            aliases=tuple(self.aliases),
            read_first=tuple(read_first),
            facts=facts,
        )


def build(seed: int, condition: str) -> Program:
    """The program of ``seed`` and ``condition``; two builds are equal. Torch's own generator is not touched."""
    return _Builder(seed, condition).build()
