"""What the forward leaves for the reverse pass: per write its operands' versions, coefficients, noise and argument."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from regrad.replay.machine.program import Nonlinearity
from regrad.replay.ranges import ByteRange

CONSTANT = -1  # an operand that depends on no input
OPAQUE = -2  # an operand that does, through bytes that are no version of it


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One write: ``cells[k] = direct[k] + f(Σ coefficient · operand + noise)``.

    ``through`` are the operands inside ``f``, each a cell per element, with its coefficient; ``argument`` is what ``f``
    was taken of, ``None`` for the identity. ``outs[j]`` is the element that argument j ended in, ``None``: element j.
    ``integer``: a write to an integer view whose operand depends on an input. ``opaque``: bytes and version of the
    first operand that was read as another type than it was written as. Through neither is there a gradient.
    """

    segment: int
    operation: int
    write: int
    where: ByteRange
    first: int
    count: int
    through: tuple[tuple[NDArray[np.int64], float], ...]
    function: Nonlinearity = Nonlinearity.IDENTITY
    argument: NDArray[np.float64] | None = None
    noise: NDArray[np.float64] | None = None
    outs: NDArray[np.int64] | None = None
    direct: NDArray[np.int64] | None = None
    integer: bool = False
    opaque: tuple[ByteRange, str] | None = None

    @property
    def saved_bytes(self) -> int:
        """Bytes of values that it holds. Cells and coefficients are the graph's own."""
        return sum(held.nbytes for held in (self.argument, self.noise) if held is not None)


@dataclass(slots=True)
class Tape:
    """The writes of one segment, in order."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def saved_bytes(self) -> int:
        """Bytes of values that it holds."""
        return sum(entry.saved_bytes for entry in self.entries)

    @property
    def saved_operations(self) -> int:
        """Operations whose operands it holds."""
        return sum(entry.argument is not None for entry in self.entries)
