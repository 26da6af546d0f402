"""Recomputes any range of torch calls: they are recorded as they run, and the backward runs the recorded calls again.

Stands beside ``regrad.torch.regions``, which runs a module's Python again. Here no Python of the user's runs twice, so
a range may begin and end anywhere, across the borders of modules.
"""

from regrad.torch.tape.calls import CallCounter, counts
from regrad.torch.tape.legal import problem_of_range
from regrad.torch.tape.moves import Move, MoveReport, Moves
from regrad.torch.tape.ranges import Range, Ranges
from regrad.torch.tape.tape import RangeReport, Tape

__all__ = [
    "CallCounter",
    "Move",
    "MoveReport",
    "Moves",
    "Range",
    "RangeReport",
    "Ranges",
    "Tape",
    "counts",
    "problem_of_range",
]
