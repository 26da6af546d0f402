"""Finite differences: the machine itself, on inputs that differ along one direction.

Central differences at two steps, extrapolated (Richardson), so the error is of the fourth order in the step. Not for
programs that round to float32 on the way: their loss is a staircase at this scale.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from regrad.replay.machine.program import Program
from regrad.replay.machine.run import Inputs, Machine

STEP = 1e-3


def directional(program: Program, inputs: Inputs, direction: NDArray[np.float64], step: float = STEP) -> float:
    """The derivative of the loss along ``direction``, a number per coordinate of the inputs. Cost: four runs.

    The error is of the order of ``step**4`` times the fifth derivative plus 1e-16 / ``step``.
    """
    near = _central(program, inputs, direction, step)
    far = _central(program, inputs, direction, 2 * step)
    return (4 * near - far) / 3


def _central(program: Program, inputs: Inputs, direction: NDArray[np.float64], step: float) -> float:
    return (_loss(program, inputs, step * direction) - _loss(program, inputs, -step * direction)) / (2 * step)


def _loss(program: Program, inputs: Inputs, change: NDArray[np.float64]) -> float:
    moved, at = dict(inputs), 0
    for view in program.inputs:
        moved[view] = moved[view] + change[at : at + view.count]
        at += view.count
    machine = Machine(program, tuple(moved.items()))
    for segment in range(len(program.segments)):
        machine.run(segment)
    output = machine.memory.array(program.output).astype(np.float64)
    return float(np.dot(output, np.asarray(program.weights)))
