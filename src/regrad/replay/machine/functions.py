"""The values of the nonlinearities. Their derivatives are not here: each kind of derivative has its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from regrad.replay.machine.program import Nonlinearity


def apply(function: Nonlinearity, z: NDArray[np.float64]) -> NDArray[np.float64]:
    """``function`` of ``z``, element by element, in float64."""
    if function is Nonlinearity.TANH:
        return np.tanh(z)
    if function is Nonlinearity.SIN:
        return np.sin(z)
    if function is Nonlinearity.SIGMOID:
        return 1.0 / (1.0 + np.exp(-z))
    if function is Nonlinearity.BELL:
        return 1.0 / (1.0 + z * z)
    return z
