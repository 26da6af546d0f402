"""Programs of the reference machine, as values: storages, generators, segments of operations.

Every operation first reads all its operands and then writes, also where they overlap. Floating-point operations compute
in float64 and round to the type of the view that they write.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from regrad.core.errors import ViewOutOfRange
from regrad.replay.machine.views import View


class Nonlinearity(Enum):
    """Functions that are smooth on the real line and analytic near it, so that every derivative here can be taken."""

    IDENTITY = "identity"
    TANH = "tanh"
    SIN = "sin"
    SIGMOID = "sigmoid"
    BELL = "bell"  # 1 / (1 + z²)


@dataclass(frozen=True, slots=True)
class Affine:
    """``target = nonlinearity(Σ coefficient · view + noise · ξ)``, ξ normal, one draw an element.

    Views have as many elements as the target. Integer views are read as numbers.
    """

    target: View
    terms: tuple[tuple[View, float], ...]
    nonlinearity: Nonlinearity = Nonlinearity.IDENTITY
    noise: float = 0.0
    generator: str = ""


@dataclass(frozen=True, slots=True)
class Copy:
    """The bytes of ``source`` to ``target``, element by element. Both have the same dtype and may overlap."""

    target: View
    source: View


@dataclass(frozen=True, slots=True)
class Scatter:
    """``target[index[i]] = nonlinearity(coefficient · source[i])``, or ``+=`` with ``accumulate``.

    Where an index comes twice, the last write stands; with ``accumulate`` both count. ``index`` is an integer view.
    """

    target: View
    index: View
    source: View
    coefficient: float = 1.0
    nonlinearity: Nonlinearity = Nonlinearity.IDENTITY
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class IntegerWrite:
    """``target = (floor(scale · source) + add) mod modulus`` into an integer view; modulus 0 leaves it as it is.

    The source may hold floating-point numbers: then the write has no gradient, and asking for one is UNSUPPORTED.
    """

    target: View
    source: View
    scale: float = 1.0
    add: int = 0
    modulus: int = 0


Announced = Affine | Copy | Scatter | IntegerWrite


@dataclass(frozen=True, slots=True)
class Unannounced:
    """An operation whose accesses nobody is told of, as of a kernel whose schema is silent about what it writes."""

    operation: Announced


Operation = Announced | Unannounced


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the forward that can be run again."""

    name: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Program:
    """A step: state, generators with their seeds, the views that are differentiated, segments, and a loss.

    The loss is ``Σ weight · element`` over the elements of ``output`` at the end of the forward.
    """

    storages: tuple[tuple[str, int], ...]
    generators: tuple[tuple[str, int], ...]
    inputs: tuple[View, ...]
    segments: tuple[Segment, ...]
    output: View
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.weights) != self.output.count:
            raise ViewOutOfRange(
                f"a loss over {self.output.count} elements needs as many weights, not {len(self.weights)}",
                where=self.output.span,
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The segments' names."""
        return tuple(segment.name for segment in self.segments)

    @cached_property
    def writes(self) -> int:
        """Operations, each of which is one write."""
        return sum(len(segment.operations) for segment in self.segments)

    @cached_property
    def first_write(self) -> tuple[int, ...]:
        """For each segment the number of its first write; write 0 made what the program is given."""
        numbers, at = [], 1
        for segment in self.segments:
            numbers.append(at)
            at += len(segment.operations)
        return tuple(numbers)

    @property
    def coordinates(self) -> int:
        """Elements of all inputs: how many numbers a gradient has."""
        return sum(view.count for view in self.inputs)
