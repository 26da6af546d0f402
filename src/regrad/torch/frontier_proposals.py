"""What each planner and each rule of practice proposes for a profiled step, as priced points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from regrad.core.chain import Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.frontier_curve import BASELINE, CONTROL, PLANNER, FrontierPoint, LeftOut
from regrad.core.plan import Choices
from regrad.planners import (
    Binomial,
    EveryK,
    FirstK,
    Frontier,
    KeepAll,
    KeepOrSnapshot,
    Milp,
    Optimal,
    Planner,
    RecomputeAll,
    SqrtN,
    StateAgnostic,
    Uniform,
)
from regrad.planners.base import recomputable
from regrad.torch.frontier_pricing import Pricing, depth_of, recomputed, simplified
from regrad.torch.profile import Profile
from regrad.torch.spans import NoSuchSpan

NO_LIMIT = 1 << 62
MOST_SETTINGS = 64
"""Of the numbers that a rule takes so many are tried, evenly spread."""
MOST_MILP_SEGMENTS = 30
MILP_SECONDS = 5.0
TIGHTENINGS = 8
"""How often a planner whose plan goes over the budget on the trace is asked again for less."""


@dataclass(frozen=True)
class _Method:
    """A method by name: settings that know no budget, or one planner that is asked for every budget."""

    name: str
    kind: str
    settings: tuple[tuple[str, Planner], ...] = ()
    planner: Planner | None = None
    problem: Problem | None = None


def propose(
    source: Profile, pricing: Pricing, budgets: Sequence[int], report: Callable[[float], None]
) -> tuple[list[FrontierPoint], list[LeftOut]]:
    """The points of every method but ours, and the methods that have none with the reason."""
    points: list[FrontierPoint] = []
    left_out = list(_not_asked(source))
    absent = {one.method for one in left_out}
    methods = [method for method in _methods(source) if method.name not in absent]
    for number, method in enumerate(methods):
        report(number / len(methods))
        found, reason = _points(method, pricing, budgets)
        points += found
        if reason:
            left_out.append(LeftOut(method.name, reason))
    return points, left_out


def _methods(source: Profile) -> Iterator[_Method]:
    problem, chosen = source.problem, source.stateful
    count = len(recomputable(problem))
    numbers = _spread(count)
    for name, kind, planner in (
        ("Optimal", PLANNER, Optimal()),
        ("StateAgnostic", CONTROL, StateAgnostic()),
        ("KeepOrSnapshot", CONTROL, KeepOrSnapshot()),
    ):
        yield _Method(name, kind, planner=planner, problem=chosen)
    yield _Method("Milp", PLANNER, planner=Milp(MILP_SECONDS), problem=problem)
    yield _Method("Optimal, nested", PLANNER, planner=Optimal(nested=True), problem=problem)
    yield _Method("Frontier", PLANNER, planner=Frontier(), problem=replace(chosen, rule="static"))
    yield _Method("KeepAll", CONTROL, (("", KeepAll()),))
    yield _Method("RecomputeAll", BASELINE, (("", RecomputeAll()),))
    yield _Method("FirstK", BASELINE, tuple((f"k = {k}", FirstK(k)) for k in numbers))
    yield _Method("EveryK", BASELINE, tuple((f"k = {k}", EveryK(k)) for k in numbers))
    yield _Method("Uniform", BASELINE, tuple((f"{k} spans", Uniform(k)) for k in numbers))
    yield _Method("SqrtN", BASELINE, (("", SqrtN()),) if count else ())
    yield _Method("Binomial", BASELINE, tuple((f"{k} slots", Binomial(k)) for k in numbers if k < max(count, 2)))


def _spread(count: int) -> list[int]:
    """1 … count, or of those so many that they can be tried."""
    if count <= MOST_SETTINGS:
        return list(range(1, count + 1))
    return sorted({1 + (count - 1) * k // (MOST_SETTINGS - 1) for k in range(MOST_SETTINGS)})


def _not_asked(source: Profile) -> Iterator[LeftOut]:
    problem = source.problem
    count = len(recomputable(problem))
    if find_spec("highspy") is None:
        yield LeftOut("Milp", "its solver is not installed: pip install 'regrad[milp]'")
    elif count > MOST_MILP_SEGMENTS:
        yield LeftOut("Milp", f"{count} segments are more than the {MOST_MILP_SEGMENTS} that it is asked for here")
    elif problem.shares_log:
        yield LeftOut("Milp", "segments share a log of state, which its program does not hold")
    if not any(option.states for segment in source.stateful.chain.segments for option in segment.options):
        reason = "no segment has more than one way to bring its state back"
        yield LeftOut("StateAgnostic", reason)
        yield LeftOut("KeepOrSnapshot", reason)
    yield LeftOut(
        "torch selective, sac_ilp",
        "what they keep within a block is not priced here: python -m regrad.bench side-by-side measures them",
    )


def _points(method: _Method, pricing: Pricing, budgets: Sequence[int]) -> tuple[list[FrontierPoint], str]:
    """A method's points by peak, and why it has fewer than it could; "" if it has all."""
    points: dict[tuple[int, float], FrontierPoint] = {}
    reason = ""
    try:
        for setting, planner in method.settings:
            solution = planner(pricing.source.problem, NO_LIMIT)
            if solution.plan is not None:
                reason = _add(points, method, pricing, setting, None, solution.plan) or reason
        for budget in budgets if method.planner is not None else ():
            plan, reason_now = _within(method, pricing, budget)
            reason = reason_now or reason
            if plan is not None:
                reason = _add(points, method, pricing, "", budget, plan) or reason
    except PlannerMismatch as error:
        reason = str(error)
    return sorted(points.values(), key=lambda point: (point.peak_bytes, point.added_seconds)), reason


def _within(method: _Method, pricing: Pricing, budget: int) -> tuple[Choices | None, str]:
    """The planner's plan that fits ``budget`` on the trace. The chain is an approximation of it: ask for less, then."""
    assert method.planner is not None
    assert method.problem is not None
    target = budget
    for _ in range(TIGHTENINGS):
        plan = method.planner(method.problem, max(target, 0)).plan
        if plan is None:
            return None, ""
        try:
            peak, _ = pricing.price(plan)
        except NoSuchSpan as error:
            return None, str(error)
        if peak <= budget:
            return plan, ""
        target -= max(1, peak - budget)
    return None, ""


def _add(
    points: dict[tuple[int, float], FrontierPoint],
    method: _Method,
    pricing: Pricing,
    setting: str,
    budget: int | None,
    plan: Choices,
) -> str:
    """Price a plan into ``points``; why that cannot be, if so. Of equal plans the first stays."""
    try:
        peak, seconds = pricing.price(plan)
    except NoSuchSpan as error:
        return str(error)
    eager = pricing.source.chain.eager_seconds
    plan = simplified(plan)
    again = recomputed(plan)
    ratio = 1 + seconds / eager if eager > 0 else 1.0
    made = FrontierPoint(
        method.name, method.kind, setting or f"{again} segments", budget, peak, seconds, ratio, again, depth_of(plan),
    )  # fmt: skip
    points.setdefault((peak, seconds), made)
    return ""
