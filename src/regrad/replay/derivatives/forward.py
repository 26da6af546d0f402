"""Forward mode: a second interpreter, in which every byte address carries the tangents of the element that starts there.

It knows nothing of versions, tapes or engines. Whether an element is whole is read off tags beside the bytes: which
type wrote a byte, and the how-manieth byte of its element it is. Where bytes are no whole element, tangents that are not
zero become NaN, so that what has no derivative never looks like one. Values are float64, tangents numpy's widest float:
the rounding error in a comparison is then that of the other side. Where numpy has no wider float it is that of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrad.replay.machine.program import Affine, Copy, IntegerWrite, Nonlinearity, Program, Scatter, Unannounced
from regrad.replay.machine.run import Inputs
from regrad.replay.machine.views import View

Wide = NDArray[Any]


@dataclass(frozen=True)
class Jacobian:
    """``matrix[k, c]``: derivative of element k of the output in coordinate c; ``storages`` and ``loss`` of the run."""

    matrix: Wide
    storages: dict[str, bytes]
    loss: float
    weights: tuple[float, ...]

    @property
    def gradient(self) -> NDArray[np.float64]:
        """The loss's, one number a coordinate."""
        weights = np.asarray(self.weights, self.matrix.dtype)
        total: Wide = np.sum(weights[:, None] * self.matrix, axis=0)
        return total.astype(np.float64)


def jacobian(program: Program, inputs: Inputs, width: type[np.floating[Any]] = np.longdouble) -> Jacobian:
    """Run ``program`` with tangents for every coordinate of its inputs. Danger: views are not checked.

    Cost: one run on arrays that are ``coordinates`` times as wide, and as many wide floats a byte of state.
    """
    duals = _Duals(program, inputs, width)
    for segment in program.segments:
        for operation in segment.operations:
            duals.operate(operation.operation if isinstance(operation, Unannounced) else operation)
    values, tangents = duals.load(program.output)
    loss = float(np.dot(values.astype(np.float64), np.asarray(program.weights)))
    return Jacobian(tangents, {name: data.tobytes() for name, data in duals.data.items()}, loss, program.weights)


class _Duals:
    def __init__(self, program: Program, inputs: Inputs, width: type[np.floating[Any]]) -> None:
        self.width, self.coordinates = width, program.coordinates
        self.data = {name: np.zeros(size, np.uint8) for name, size in program.storages}
        self.tags = {name: np.zeros(size, np.int16) for name, size in program.storages}
        self.tangents = {name: np.zeros((size, self.coordinates), width) for name, size in program.storages}
        self.streams = {name: np.random.default_rng(np.random.PCG64(seed)) for name, seed in program.generators}
        given = dict(inputs)
        for view, values in given.items():
            self.store(view, values, np.zeros((view.count, self.coordinates), width))
        column = 0
        for view in program.inputs:
            unit = np.zeros((view.count, self.coordinates), width)
            unit[np.arange(view.count), column + np.arange(view.count)] = 1
            self.store(view, given[view], unit)
            column += view.count

    def load(self, view: View) -> tuple[NDArray[Any], Wide]:
        """Values and tangents of ``view``, both copies."""
        addresses = view.offset + np.arange(view.count) * view.step
        within = np.arange(view.itemsize)
        rows = addresses[:, None] + within
        values = self.data[view.storage][rows].reshape(-1).view(view.dtype).copy()
        whole = (self.tags[view.storage][rows] == 16 * view.code + within).all(axis=1)
        tangents = self.tangents[view.storage][addresses].copy()
        for row in np.flatnonzero(~whole):
            # the elements that these bytes are parts of start at most seven bytes earlier
            near = self.tangents[view.storage][max(0, addresses[row] - 7) : addresses[row] + view.itemsize]
            tangents[row] = np.where((near != 0).any(axis=0), np.nan, 0)
        return values, tangents

    def store(self, view: View, values: NDArray[Any], tangents: Wide, at: NDArray[Any] | None = None) -> None:
        """Write elements, one after the other in effect, and take apart what they fall on."""
        addresses = view.offset + np.arange(view.count) * view.step
        if at is not None:
            addresses = addresses[at]
        rows = addresses[:, None] + np.arange(view.itemsize)
        raw = np.ascontiguousarray(values.astype(view.dtype)).view(np.uint8).reshape(len(addresses), view.itemsize)
        self.data[view.storage][rows] = raw
        self.tags[view.storage][rows] = 16 * view.code + np.arange(view.itemsize)
        if not view.is_float:
            tangents = np.where(tangents != 0, np.nan, 0).astype(self.width)
        inner = rows[:, 1:].reshape(-1)
        self.tangents[view.storage][inner] = 0  # no element starts inside another one
        self.tangents[view.storage][addresses] = tangents

    def operate(self, operation: Affine | Copy | Scatter | IntegerWrite) -> None:
        if isinstance(operation, Affine):
            self._affine(operation)
        elif isinstance(operation, Copy):
            self.store(operation.target, *self.load(operation.source))
        elif isinstance(operation, Scatter):
            self._scatter(operation)
        else:
            values, tangents = self.load(operation.source)
            if operation.source.is_float or operation.scale != 1.0:
                values = np.floor(operation.scale * values.astype(np.float64)).astype(np.int64)
            values = values.astype(np.int64) + operation.add
            self.store(operation.target, values % operation.modulus if operation.modulus else values, tangents)

    def _affine(self, operation: Affine) -> None:
        z = np.zeros(operation.target.count)
        tangents = np.zeros((operation.target.count, self.coordinates), self.width)
        for view, coefficient in operation.terms:
            values, carried = self.load(view)
            z = z + coefficient * values.astype(np.float64)
            tangents += self.width(coefficient) * carried
        if operation.noise:
            z = z + operation.noise * self.streams[operation.generator].standard_normal(operation.target.count)
        values, rates = self._function(operation.nonlinearity, z)
        self.store(operation.target, values, rates[:, None] * tangents)

    def _scatter(self, operation: Scatter) -> None:
        index = self.load(operation.index)[0].astype(np.int64)
        values, tangents = self.load(operation.source)
        values, rates = self._function(operation.nonlinearity, operation.coefficient * values.astype(np.float64))
        tangents = rates[:, None] * self.width(operation.coefficient) * tangents
        if operation.accumulate:
            totals, carried = self.load(operation.target)
            sums = totals.astype(np.float64)
            for row, where in enumerate(index):
                sums[where] += values[row]
                carried[where] += tangents[row]
            hit = np.unique(index)
            self.store(operation.target, sums[hit], carried[hit], hit)
            return
        last = {int(where): row for row, where in enumerate(index)}
        rows = np.fromiter(last.values(), np.int64)
        self.store(operation.target, values[rows], tangents[rows], np.fromiter(last.keys(), np.int64))

    def _function(self, function: Nonlinearity, z: NDArray[np.float64]) -> tuple[NDArray[np.float64], Wide]:
        """Value in float64 and derivative in the wide type, by other formulas than the reverse pass uses."""
        wide = z.astype(self.width)
        if function is Nonlinearity.TANH:
            return np.tanh(z), 1 / np.cosh(wide) ** 2
        if function is Nonlinearity.SIN:
            return np.sin(z), 1 - 2 * np.sin(wide / 2) ** 2
        if function is Nonlinearity.SIGMOID:
            return 1.0 / (1.0 + np.exp(-z)), 1 / (2 + 2 * np.cosh(wide))
        if function is Nonlinearity.BELL:
            bell = 1 / (1 + wide * wide)
            return 1.0 / (1.0 + z * z), -2 * wide * bell * bell
        return z, np.ones_like(wide)
