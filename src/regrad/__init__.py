"""regrad fits a training step into a memory budget.

Importing this package loads no framework. PyTorch users go on with ``import regrad.torch as rt``.
"""

from regrad.core.errors import InfeasibleBudget, RegradError
from regrad.core.plan import Plan
from regrad.core.units import Budget, format_bytes, parse_bytes

__version__ = "0.1.0"

__all__ = ["Budget", "InfeasibleBudget", "Plan", "RegradError", "__version__", "format_bytes", "parse_bytes"]
