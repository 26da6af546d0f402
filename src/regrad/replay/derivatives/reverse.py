"""Reverse accumulation over versions: ``v̄_p(k) += v̄_k · f'_k(v_p(k))``, from the last write to the first.

A cell's adjoint is complete when its own write is reached, since every use of a version comes after the write that made
it. Adjoints are float64, as a framework's would be; what they are compared with is carried wider.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrad.core.errors import UnsupportedGradient
from regrad.replay.machine.program import Nonlinearity
from regrad.replay.machine.tape import OPAQUE, Entry, Tape

Wide = NDArray[Any]


class Adjoints:
    """An adjoint for each cell, and whether one was asked of it at all."""

    def __init__(self, cells: int, width: type[np.floating[Any]] = np.float64) -> None:
        self.values: Wide = np.zeros(cells, width)
        self.asked = np.zeros(cells, np.bool_)
        self._width = width

    def seed(self, cells: NDArray[np.int64], weights: tuple[float, ...]) -> None:
        """Start from ``Σ weight · cell``; cells below 0 are constants."""
        real = cells >= 0
        np.add.at(self.values, cells[real], np.asarray(weights, self._width)[real])
        self.asked[cells[real]] = True

    def accumulate(self, tape: Tape, names: tuple[str, ...]) -> None:
        """Take one segment's tape backward. Raises :class:`UnsupportedGradient`, and names the write.

        ``names`` are the segments' names, for that error.
        """
        for entry in reversed(tape.entries):
            cells = slice(entry.first, entry.first + entry.count)
            if not self.asked[cells].any():
                continue
            if entry.integer or (entry.opaque is not None and self._asks_opaque(entry)):
                raise _refusal(entry, names)
            self._entry(entry, self.values[cells], self.asked[cells])

    def _entry(self, entry: Entry, bar: Wide, asked: NDArray[np.bool_]) -> None:
        if entry.direct is not None:
            self._add(entry.direct, bar, asked)
        if entry.outs is not None:
            bar, asked = bar[entry.outs], asked[entry.outs]
        if entry.argument is not None:
            bar = bar * slope(entry.function, entry.argument.astype(self._width))
        for cells, coefficient in entry.through:
            self._add(cells, bar * self._width(coefficient), asked)

    def _add(self, cells: NDArray[np.int64], amounts: Wide, asked: NDArray[np.bool_]) -> None:
        real = (cells >= 0) & asked
        np.add.at(self.values, cells[real], amounts[real])
        self.asked[cells[real]] = True

    def _asks_opaque(self, entry: Entry) -> bool:
        asked = self.asked[entry.first : entry.first + entry.count]
        inside = asked if entry.outs is None else asked[entry.outs]
        if any(((operands == OPAQUE) & inside).any() for operands, _ in entry.through):
            return True
        return entry.direct is not None and bool(((entry.direct == OPAQUE) & asked).any())


def _refusal(entry: Entry, names: tuple[str, ...]) -> UnsupportedGradient:
    if entry.integer:
        what, where, version = "this write rounds to integers", entry.where, f"v{entry.write}"
    else:
        assert entry.opaque is not None
        what, (where, version) = "these bytes were not written as the type that they are read as", entry.opaque
    return UnsupportedGradient(
        f"a gradient was asked for that does not exist: {what}",
        segment=f"{names[entry.segment]}, operation {entry.operation}",
        where=where,
        version=version,
        hint="Stop the gradient before this operation, or keep the operation out of what is differentiated.",
    )


def slope(function: Nonlinearity, z: Wide) -> Wide:
    """``f'(z)``, in the precision of ``z``."""
    value: Wide = np.ones_like(z)
    if function is Nonlinearity.TANH:
        value = 1 - np.tanh(z) ** 2
    elif function is Nonlinearity.SIN:
        value = np.cos(z)
    elif function is Nonlinearity.SIGMOID:
        value = 1 / (1 + np.exp(-z))
        value = value * (1 - value)
    elif function is Nonlinearity.BELL:
        value = -2 * z / (1 + z * z) ** 2
    return value
