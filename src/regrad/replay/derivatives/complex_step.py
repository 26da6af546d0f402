"""Complex step: run the program on ``x + ih`` and read the derivative off the imaginary part, one coordinate a run.

The third interpreter. Real parts live in bytes and are rounded to the type of their view, as in the machine; imaginary
parts live beside the address of their element. With h = 1e-30 nothing is subtracted, so
nothing cancels (Squire and Trapp 1998; Martins, Sturdza and Alonso 2003). Not for programs that read bytes of an input
as another type; those have no gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrad.replay.machine.program import Affine, Copy, Nonlinearity, Program, Scatter, Unannounced
from regrad.replay.machine.run import Inputs
from regrad.replay.machine.views import View

STEP = 1e-30


def complex_step(
    program: Program, inputs: Inputs, coordinate: int, width: type[np.complexfloating[Any, Any]] = np.complex128
) -> float:
    """The derivative of the loss in one coordinate of the inputs. Cost: one run."""
    run = _Complex(program, inputs, coordinate, width)
    for segment in program.segments:
        for operation in segment.operations:
            run.operate(operation.operation if isinstance(operation, Unannounced) else operation)
    imaginary = run.load(program.output).imag
    return float(np.sum(np.asarray(program.weights, imaginary.dtype) * imaginary) / STEP)


class _Complex:
    def __init__(
        self, program: Program, inputs: Inputs, coordinate: int, width: type[np.complexfloating[Any, Any]]
    ) -> None:
        self.width = width
        self.real = {name: bytearray(size) for name, size in program.storages}
        part = np.zeros(1, width).imag.dtype
        self.imaginary = {name: np.zeros(size, part) for name, size in program.storages}
        self.streams = {name: np.random.Generator(np.random.PCG64(seed)) for name, seed in program.generators}
        for view, values in inputs:
            self.store(view, values.astype(width))
        for view in program.inputs:
            if 0 <= coordinate < view.count:
                self.imaginary[view.storage][view.offset + coordinate * view.step] = STEP
            coordinate -= view.count

    def load(self, view: View) -> NDArray[Any]:
        """The elements of ``view`` as complex numbers."""
        raw = np.ndarray((view.count,), view.dtype, self.real[view.storage], view.offset, (view.step,))
        if not view.is_float:
            return raw.astype(self.width)
        return raw.astype(self.width) + 1j * self.imaginary[view.storage][view.offset : view.stop : view.step]

    def store(self, view: View, values: NDArray[Any], at: NDArray[Any] | None = None) -> None:
        """Write elements; nothing that they cover keeps an imaginary part."""
        raw = np.ndarray((view.count,), view.dtype, self.real[view.storage], view.offset, (view.step,))
        for row, element in enumerate(range(view.count) if at is None else at):
            raw[element] = values[row].real
            first = view.offset + int(element) * view.step
            self.imaginary[view.storage][first : first + view.itemsize] = 0
            self.imaginary[view.storage][first] = values[row].imag

    def operate(self, operation: Any) -> None:
        if isinstance(operation, Affine):
            total = np.zeros(operation.target.count, self.width)
            for view, coefficient in operation.terms:
                term = self.load(view)
                # the real sum is the machine's: float64, in the order of the terms
                real = total.real.astype(np.float64) + coefficient * term.real.astype(np.float64)
                total = real.astype(self.width) + 1j * (total.imag + coefficient * term.imag)
            if operation.noise:
                drawn = operation.noise * self.streams[operation.generator].standard_normal(operation.target.count)
                total = (total.real.astype(np.float64) + drawn).astype(self.width) + 1j * total.imag
            self.store(operation.target, _function(operation.nonlinearity, total))
        elif isinstance(operation, Copy):
            self.store(operation.target, self.load(operation.source))
        elif isinstance(operation, Scatter):
            self._scatter(operation)
        else:
            source = self.load(operation.source).real.astype(np.float64)
            number = np.floor(operation.scale * source) + operation.add
            self.store(operation.target, (number % operation.modulus if operation.modulus else number) + 0j)

    def _scatter(self, operation: Scatter) -> None:
        index = self.load(operation.index).real.astype(np.int64)
        source = self.load(operation.source)
        real = operation.coefficient * source.real.astype(np.float64)
        made = _function(operation.nonlinearity, real.astype(self.width) + 1j * (operation.coefficient * source.imag))
        if not operation.accumulate:
            self.store(operation.target, made, index)
            return
        total = self.load(operation.target)
        for row, where in enumerate(index):
            total[where] = np.float64(total[where].real + made[row].real) + 1j * (total[where].imag + made[row].imag)
        hit = np.unique(index)
        self.store(operation.target, total[hit], hit)


def _function(function: Nonlinearity, z: NDArray[Any]) -> NDArray[Any]:
    value: NDArray[Any] = z
    if function is Nonlinearity.TANH:
        value = np.tanh(z)
    elif function is Nonlinearity.SIN:
        value = np.sin(z)
    elif function is Nonlinearity.SIGMOID:
        value = 1 / (1 + np.exp(-z))
    elif function is Nonlinearity.BELL:
        value = 1 / (1 + z * z)
    return value
