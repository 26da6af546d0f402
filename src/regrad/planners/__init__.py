"""Planners: one algorithm a file, each a value called as ``planner(problem, budget_bytes) -> Solution``."""

from regrad.planners.base import Planner, require
from regrad.planners.binomial import Binomial
from regrad.planners.curve import Curve
from regrad.planners.every_k import EveryK
from regrad.planners.exhaustive import Exhaustive
from regrad.planners.first_k import FirstK
from regrad.planners.keep_all import KeepAll
from regrad.planners.optimal import Optimal
from regrad.planners.portfolio import Portfolio
from regrad.planners.recompute_all import RecomputeAll
from regrad.planners.sqrt_n import SqrtN, closed_form_peak
from regrad.planners.uniform import Uniform

__all__ = [
    "Binomial",
    "Curve",
    "EveryK",
    "Exhaustive",
    "FirstK",
    "KeepAll",
    "Optimal",
    "Planner",
    "Portfolio",
    "RecomputeAll",
    "SqrtN",
    "Uniform",
    "closed_form_peak",
    "require",
]
