"""Runs segments: reads operands, tells whoever listens, writes, and leaves a tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from regrad.core.errors import ReplayError, ViewOutOfRange
from regrad.replay.machine.functions import apply
from regrad.replay.machine.memory import Memory
from regrad.replay.machine.program import Affine, Copy, IntegerWrite, Nonlinearity, Operation, Scatter, Unannounced
from regrad.replay.machine.program import Program as Program
from regrad.replay.machine.tape import CONSTANT, OPAQUE, Entry, Tape
from regrad.replay.machine.views import View
from regrad.replay.ranges import ByteRange, Ranges

Cells = NDArray[np.int64]
Inputs = tuple[tuple[View, NDArray[Any]], ...]


class Listener(Protocol):
    """Who is told of accesses before they happen. Every retention is one."""

    def before_read(self, ranges: Ranges) -> None:
        """Bytes are about to be read."""
        ...

    def before_write(self, ranges: Ranges) -> None:
        """Bytes are about to be overwritten."""
        ...

    def before_draw(self, generator: str) -> None:
        """A generator is about to be drawn from."""
        ...


class Machine:
    """A program in memory. ``on_operation`` is called after each operation, with its segment and number."""

    def __init__(self, program: Program, inputs: Inputs) -> None:
        self.program = program
        self.memory = Memory(dict(program.storages), dict(program.generators))
        self.on_operation: Callable[[int, int], None] = lambda segment, operation: None
        self._tape: Tape | None = None
        self._listener: Listener | None = None
        self._at = (0, 0, 0)  # segment, operation, write
        self._opaque: tuple[ByteRange, str] | None = None
        differentiated = set(program.inputs)
        self.input_cells: list[Cells] = []
        found: dict[View, Cells] = {}
        for view, values in inputs:
            self.memory.check(view, write=True)
            active = np.full(view.count, view in differentiated)
            first = self.memory.put(view, values, 0, active)
            found[view] = np.arange(first, first + view.count)
        for view in program.inputs:
            if view not in found or not view.is_float:
                raise ViewOutOfRange(f"the input {view} is given no floating-point values", where=view.span)
            self.input_cells.append(found[view])

    def run(self, segment: int, listener: Listener | None = None, tape: Tape | None = None) -> None:
        """Run segment number ``segment``. A :class:`ReplayError` names it.

        The operation that raises has neither drawn nor written. ``listener`` hears of accesses; what comes to the
        reverse pass goes to ``tape``.
        """
        self._tape = tape
        first = self.program.first_write[segment]
        for number, operation in enumerate(self.program.segments[segment].operations):
            self._at, self._opaque = (segment, number, first + number), None
            self._listener = None if isinstance(operation, Unannounced) else listener
            try:
                with np.errstate(all="ignore"):  # bytes of another type may be any number; NaN is reproduced like 1.0
                    self._operate(operation.operation if isinstance(operation, Unannounced) else operation)
            except ReplayError as error:
                if error.segment is None:
                    error.segment = f"{self.program.names[segment]}, operation {number}"
                if error.version is None:
                    error.version = f"v{first + number}, not made"
                raise
            self.on_operation(segment, number)

    def _operate(self, operation: Operation) -> None:
        match operation:
            case Affine():
                self._affine(operation)
            case Copy():
                self._copy(operation)
            case Scatter():
                self._scatter(operation)
            case IntegerWrite():
                self._integer(operation)
            case Unannounced():
                raise ViewOutOfRange("an unannounced operation within an unannounced operation")
            case _:
                assert_never(operation)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def _read(self, view: View) -> tuple[NDArray[Any], Cells]:
        """The values of ``view`` and of each the cell, CONSTANT or OPAQUE."""
        memory = self.memory
        memory.check(view)
        spread = memory.cells_of(view)
        if self._listener is not None:
            self._listener.before_read(view.ranges)
        cells = spread[:, 0].copy()
        whole = (spread == cells[:, None]).all(axis=1)
        whole &= (memory.cell_code[cells] == view.code) & (memory.cell_start[cells] == view.starts)
        active = memory.cell_active[spread].any(axis=1)
        cells[~active] = CONSTANT
        mixed = active & ~whole
        if mixed.any():
            cells[mixed] = OPAQUE
            at = int(view.starts[np.flatnonzero(mixed)[0]])
            where = ByteRange(view.storage, at, at + view.itemsize)
            self._opaque = self._opaque or (where, memory.version_at(where))
        return memory.array(view).copy(), cells

    def _announce(self, ranges: Ranges) -> None:
        if self._listener is not None:
            self._listener.before_write(ranges)

    def _record(self, target: View, first: int, count: int, **rest: Any) -> None:
        if self._tape is None:
            return
        segment, operation, write = self._at
        if rest.get("function", Nonlinearity.IDENTITY) is Nonlinearity.IDENTITY:
            rest["argument"] = None
        self._tape.entries.append(
            Entry(segment, operation, write, target.span, first, count, opaque=self._opaque, **rest)
        )

    # -- operations ---------------------------------------------------------------------------------------------------

    def _affine(self, operation: Affine) -> None:
        target = operation.target
        self.memory.check(target, write=True)
        _need(target.is_float, f"an affine combination is written to {target}; it needs a floating-point view", target)
        z, through = np.zeros(target.count), []
        active = np.zeros(target.count, np.bool_)
        for view, coefficient in operation.terms:
            _need(view.count == target.count, f"{view} has {view.count} elements, its target {target.count}", view)
            values, cells = self._read(view)
            z = z + coefficient * values.astype(np.float64)
            active |= cells != CONSTANT
            through.append((cells, coefficient))
        # all that may fail comes before the draw: an operation that raises has neither drawn nor written
        stream = self.memory.generator(operation.generator) if operation.noise else None
        if stream is not None and self._listener is not None:
            self._listener.before_draw(operation.generator)
        self._announce(target.ranges)
        noise = None
        if stream is not None:
            noise = operation.noise * stream.normal(target.count)
            z = z + noise
        values = apply(operation.nonlinearity, z)
        first = self.memory.put(target, values, self._at[2], active)
        self._record(
            target,
            first,
            target.count,
            through=tuple(through),
            function=operation.nonlinearity,
            argument=z,
            noise=noise,
        )

    def _copy(self, operation: Copy) -> None:
        source, target = operation.source, operation.target
        self.memory.check(target, write=True)
        same = source.count == target.count and source.dtype == target.dtype
        _need(same, f"{source} cannot be copied to {target}: count and dtype must be the same", target)
        values, cells = self._read(source)
        self._announce(target.ranges)
        first = self.memory.put(target, values, self._at[2], cells != CONSTANT)
        self._record(target, first, target.count, through=((cells, 1.0),), integer=_no_slope(target, cells))

    def _scatter(self, operation: Scatter) -> None:
        target, source = operation.target, operation.source
        self.memory.check(target, write=True)
        _need(target.is_float, f"a scatter is written to {target}; it needs a floating-point view", target)
        _need(not operation.index.is_float, f"the index {operation.index} is not an integer view", operation.index)
        _need(operation.index.count == source.count, f"{source} and its index differ in count", source)
        index = self._read(operation.index)[0].astype(np.int64)
        wrong = np.flatnonzero((index < 0) | (index >= target.count))
        if wrong.size:
            at = int(wrong[0])
            raise ViewOutOfRange(
                f"index {at} of a scatter is {int(index[at])}, and {target} has {target.count} elements",
                where=operation.index.span,
                version=self.memory.version_at(operation.index.span),
            )
        values, cells = self._read(source)
        z = operation.coefficient * values.astype(np.float64)
        made = apply(operation.nonlinearity, z)
        through = ((cells, operation.coefficient),)
        common: dict[str, Any] = {"through": through, "function": operation.nonlinearity, "argument": z}
        if not operation.accumulate:
            self._announce(target.at(index))
            first = self.memory.put(target, made, self._at[2], cells != CONSTANT, index)
            self._record(target, first, source.count, **common)
            return
        places, outs = np.unique(index, return_inverse=True)
        old, old_cells = self._read(target)
        total = old[places].astype(np.float64)
        np.add.at(total, outs, made)
        direct = old_cells[places]
        active = direct != CONSTANT
        np.logical_or.at(active, outs, cells != CONSTANT)
        self._announce(target.at(places))
        first = self.memory.put(target, total, self._at[2], active, places, reserve=source.count)
        self._record(target, first, len(places), outs=outs, direct=direct, **common)

    def _integer(self, operation: IntegerWrite) -> None:
        target, source = operation.target, operation.source
        self.memory.check(target, write=True)
        _need(not target.is_float, f"an integer write to {target}: it needs an integer view", target)
        _need(source.count == target.count, f"{source} has {source.count} elements, {target} {target.count}", source)
        values, cells = self._read(source)
        if source.is_float or operation.scale != 1.0:
            number = np.floor(operation.scale * values.astype(np.float64)).astype(np.int64)
        else:
            number = values.astype(np.int64)
        number = number + operation.add
        if operation.modulus:
            number = number % operation.modulus
        self._announce(target.ranges)
        first = self.memory.put(target, number.astype(target.dtype), self._at[2], cells != CONSTANT)
        self._record(target, first, target.count, through=((cells, 1.0),), integer=_no_slope(target, cells))


def _no_slope(target: View, cells: Cells) -> bool:
    return not target.is_float and bool((cells != CONSTANT).any())


def _need(holds: bool, what: str, view: View) -> None:
    if not holds:
        raise ViewOutOfRange(what, where=view.span)
