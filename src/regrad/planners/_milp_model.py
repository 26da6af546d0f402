"""A mixed-integer program, built column by column and row by row, bytes in its rows, and HiGHS, which solves it.

The solver comes with the extra ``milp`` and is imported when the first program is solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import gcd, inf, isfinite
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from regrad.core.errors import UsageError

P = TypeVar("P")
MOST_UNITS = 1 << 22


class End(Enum):
    """How a solve ended: proved, proved that there is none, or stopped."""

    SOLVED = "solved"
    INFEASIBLE = "infeasible"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``values`` of the columns, None if no solution was found; ``bound``: no solution costs less."""

    end: End
    values: NDArray[np.float64] | None
    bound: float


@dataclass
class Model:
    """Columns with bounds, some of them whole, and rows with bounds over their weighted sums."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    indices: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)

    def column(self, *, whole: bool = False, upper: float = 1.0) -> int:
        """A new column from 0 to ``upper``; its number."""
        self.lower.append(0.0)
        self.upper.append(upper)
        if whole:
            self.whole.append(len(self.lower) - 1)
        return len(self.lower) - 1

    def row(self, terms: Iterable[tuple[int, float]], *, lower: float = -inf, upper: float = inf) -> None:
        """``lower <= Σ weight · column <= upper``; a column may stand in ``terms`` more than once."""
        total: dict[int, float] = {}
        for column, weight in terms:
            total[column] = total.get(column, 0.0) + weight
        kept = {column: weight for column, weight in total.items() if weight}
        self.indices += kept.keys()
        self.weights += kept.values()
        self.starts.append(len(self.indices))
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def forbid(self, columns: Iterable[int]) -> None:
        """Exclude that all of ``columns`` are 1."""
        terms = [(column, 1.0) for column in columns]
        self.row(terms, upper=len(terms) - 1.0)

    def solve(
        self, costs: Mapping[int, float], tops: Mapping[int, float], *, seconds: float, gap_ratio: float = 0.0
    ) -> Outcome:
        """Minimise ``costs`` with the upper bounds of ``tops`` in place of the model's own.

        Stops after ``seconds``. A solution whose cost is within ``gap_ratio`` of the bound counts as solved. Raises
        :class:`UsageError` if the solver is not installed.
        """
        highspy = load_solver()
        solver = highspy.Highs.__base__()  # the wrapper prints a greeting when it is made; what it wraps does not
        for name, value in _SETTINGS.items():
            solver.setOptionValue(name, value)
        solver.setOptionValue("mip_rel_gap", float(gap_ratio))
        if isfinite(seconds):
            solver.setOptionValue("time_limit", max(0.0, seconds))
        solver.passModel(self._program(highspy, costs, tops))
        solver.run()
        return self._outcome(highspy, solver)

    def _program(self, highspy: Any, costs: Mapping[int, float], tops: Mapping[int, float]) -> Any:
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self.lower), len(self.row_lower)
        cost, upper = np.zeros(len(self.lower)), np.array(self.upper)
        for column, value in costs.items():
            cost[column] = value
        for column, value in tops.items():
            upper[column] = value
        program.col_cost_, program.col_lower_, program.col_upper_ = cost, np.array(self.lower), upper
        program.row_lower_, program.row_upper_ = np.array(self.row_lower), np.array(self.row_upper)
        kinds = [highspy.HighsVarType.kContinuous] * len(self.lower)
        for column in self.whole:
            kinds[column] = highspy.HighsVarType.kInteger
        program.integrality_ = kinds
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = program.num_col_, program.num_row_
        matrix.start_ = np.array(self.starts, dtype=np.int32)
        matrix.index_ = np.array(self.indices, dtype=np.int32)
        matrix.value_ = np.array(self.weights)
        return program

    def _outcome(self, highspy: Any, solver: Any) -> Outcome:
        status, info = solver.getModelStatus(), solver.getInfo()
        known = highspy.HighsModelStatus
        if status in (known.kInfeasible, known.kUnboundedOrInfeasible):  # every column that costs has two bounds
            return Outcome(End.INFEASIBLE, None, inf)
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else None
        solved = status == known.kOptimal and values is not None
        bound = float(info.mip_dual_bound) if self.whole else float(info.objective_function_value) if solved else -inf
        return Outcome(End.SOLVED if solved else End.STOPPED, values, bound if isfinite(bound) else -inf)


_SETTINGS: dict[str, Any] = {
    "output_flag": False,
    "threads": 1,  # one process may run several planners, and the same problem is to give the same plan
    "random_seed": 0,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": 1e-9,
    "primal_feasibility_tolerance": 1e-9,
}


def load_solver() -> Any:
    """The module ``highspy``. Raises :class:`UsageError` if it is not installed."""
    try:
        import highspy
    except ImportError as error:
        raise UsageError(
            "the planner Milp hands its program to the solver HiGHS, and the package highspy is not installed. "
            "Install it: pip install 'regrad[milp]'; or take Optimal, which needs no solver but plans chains alone."
        ) from error
    return highspy


@dataclass(frozen=True, slots=True)
class Units:
    """Bytes above P in rows of a program: whole numbers of ``unit``, over ``scale``, a power of two above the largest.

    The unit divides every figure where that leaves at most 2**22 of it; then rows are exact. Otherwise figures are
    rounded downward: the program then admits all plans that fit, and some that do not, which their exact bytes give
    away. A budget has half a unit more, so that no level is within the solver's tolerance of it.
    """

    unit: int
    scale: float
    floor_bytes: int

    @classmethod
    def of(cls, figures: Iterable[int], floor_bytes: int) -> Units:
        """Units for rows over ``figures``, above ``floor_bytes``."""
        grain = most = 0
        for figure in figures:
            grain, most = gcd(grain, figure), max(most, abs(figure))
        unit = max(grain, 1)
        if most // unit > MOST_UNITS:
            unit = -(-most // MOST_UNITS)
        return cls(unit, float(1 << (most // unit).bit_length()), floor_bytes)

    def weight(self, size: int) -> float:
        """``size`` bytes as a weight in a row."""
        return (size // self.unit) / self.scale

    def room_of(self, budget_bytes: int) -> float:
        """The upper bound of a row for a budget; below zero if the budget is below the floor."""
        return ((budget_bytes - self.floor_bytes) // self.unit + 0.5) / self.scale

    def bytes_of(self, room: float) -> int:
        """The fewest bytes of a plan whose rows need ``room``, a bound that may be off by a hundredth of a unit."""
        units = -int(-(room * self.scale - 0.01) // 1)
        return self.floor_bytes + units * self.unit


@dataclass(frozen=True)
class Formulation(Generic[P]):
    """A problem as a program, and the way back.

    seconds  what each whole column costs
    room     the column that no level of the step may pass; ``units`` turn a budget into its upper bound and back
    fastest  seconds below which no plan is
    read     a solution as a plan; ``price`` the simulator's peak and seconds of a plan
    blame    columns that are 1 in a plan; in any plan in which all of them are, some level is as high as its peak
    simple   plans that need no solver
    """

    model: Model
    seconds: Mapping[int, float]
    room: int
    units: Units
    fastest: float
    read: Callable[[NDArray[np.float64]], P]
    price: Callable[[P], tuple[int, float]]
    blame: Callable[[P], list[int]]
    simple: tuple[P, ...]
