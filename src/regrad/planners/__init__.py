"""Planners: one algorithm a file, each a value called as ``planner(problem, budget_bytes) -> Solution``."""

from regrad.planners.advice import Finding, Journalling, Why, journalling
from regrad.planners.base import Planner, require
from regrad.planners.binomial import Binomial
from regrad.planners.curve import Curve
from regrad.planners.every_k import EveryK
from regrad.planners.exhaustive import Exhaustive
from regrad.planners.first_k import FirstK
from regrad.planners.frontier import Frontier
from regrad.planners.keep_all import KeepAll
from regrad.planners.keep_or_snapshot import KeepOrSnapshot
from regrad.planners.milp import Milp
from regrad.planners.optimal import Optimal
from regrad.planners.portfolio import Portfolio
from regrad.planners.recompute_all import RecomputeAll
from regrad.planners.sqrt_n import SqrtN, closed_form_peak
from regrad.planners.state_agnostic import StateAgnostic
from regrad.planners.uniform import Uniform

__all__ = [
    "Binomial",
    "Curve",
    "EveryK",
    "Exhaustive",
    "Finding",
    "FirstK",
    "Frontier",
    "Journalling",
    "KeepAll",
    "KeepOrSnapshot",
    "Milp",
    "Optimal",
    "Planner",
    "Portfolio",
    "RecomputeAll",
    "SqrtN",
    "StateAgnostic",
    "Uniform",
    "Why",
    "closed_form_peak",
    "journalling",
    "require",
]
