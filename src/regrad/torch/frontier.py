"""``rt.frontier``: the time-memory curve of a step with every planner on it, priced on the trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from regrad.core.errors import InfeasibleBudget, UsageError
from regrad.core.frontier_curve import OURS, PLANNER, Frontier, FrontierPoint, LeftOut, spread_budgets
from regrad.core.plan import Plan
from regrad.core.units import Budget, format_bytes
from regrad.torch.frontier_pricing import Pricing, depth_of
from regrad.torch.frontier_proposals import propose
from regrad.torch.plan import plan_profile
from regrad.torch.profile import Profile, Progress, profile_of
from regrad.torch.step import Step

BUDGETS = 12


def frontier(
    model: nn.Module | Step,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budgets: Sequence[str | int | Budget] | None = None,
    segments: str | None = None,
    profile: Profile | None = None,
    progress: Progress | None = None,
) -> Frontier:
    """What every planner makes of every budget: the time-memory curve of one training step of ``model``.

    budgets   as of :func:`regrad.torch.plan`, one or more; left out, twelve from the least feasible to the eager peak

    The other arguments are those of :func:`regrad.torch.plan`. On the curve are ``rt.plan``'s own plans, each planner of
    :mod:`regrad.planners` and the rules that people use (the first k blocks, every k-th, equal spans, all of them). All
    are priced by the same arithmetic on the same trace. Rules are shown with every number that they have, planners with
    their answer for every budget. What is left out stands in ``left_out`` with the reason.

    Nothing of the user's is changed and nothing is trained. Cost: one profile, then a plan for each budget and
    milliseconds for each point: about a minute for a dozen blocks and budgets. Raises :class:`UsageError` for no budgets, and
    what :func:`regrad.torch.plan` raises, save that a budget that cannot be met is a reason in ``left_out``.
    """
    began = time.monotonic()
    say = progress or (lambda stage, done: None)
    if budgets is not None and (isinstance(budgets, str) or not len(budgets)):
        raise UsageError(f"budgets={budgets!r}: give a list with one budget or more, such as ['75%', '50%']")
    wanted = None if budgets is None else [Budget.parse(budget) for budget in budgets]
    step = model if isinstance(model, Step) else Step(model, batch, loss, optimizer)
    profile = profile_of(step, profile, segments, progress)
    least = plan_profile(profile, "min")
    in_bytes = _resolve(wanted, least)
    points, left_out = _ours(profile, in_bytes, say)
    others, reasons = propose(profile, Pricing(profile), in_bytes, lambda done: say("pricing planners", done))
    return Frontier(
        fingerprint=least.fingerprint,
        device=least.device,
        budgets_bytes=in_bytes,
        points=(*points, *others),
        persistent_bytes=least.persistent_bytes,
        eager_peak_bytes=least.eager_peak_bytes,
        eager_seconds=least.eager_seconds,
        least_bytes=least.least_bytes,
        predicted_by=least.predicted_by,
        band_ratio=least.band_ratio,
        left_out=(*left_out, *reasons),
        notes=profile.notes,
        planning_seconds=time.monotonic() - began,
    )


def _resolve(wanted: Sequence[Budget] | None, least: Plan) -> tuple[int, ...]:
    """The budgets in bytes, ascending, each once."""
    if wanted is None:
        return spread_budgets(least.least_bytes, least.eager_peak_bytes, BUDGETS)
    found = {
        budget.resolve(
            persistent_bytes=least.persistent_bytes,
            eager_peak_bytes=least.eager_peak_bytes,
            least_bytes=least.least_bytes,
        )
        for budget in wanted
    }
    return tuple(sorted(found))


def _ours(
    profile: Profile, budgets: Sequence[int], say: Callable[[str, float], None]
) -> tuple[list[FrontierPoint], list[LeftOut]]:
    """What ``rt.plan`` gives for each budget."""
    points, left_out = [], []
    for number, budget in enumerate(budgets):
        say("planning", number / len(budgets))
        try:
            plan = plan_profile(profile, budget)
        except InfeasibleBudget as error:
            reason = f"nothing fits {format_bytes(budget)}: the least is {format_bytes(error.least_bytes)}"
            left_out.append(LeftOut(OURS, reason))
            continue
        depth = max(depth_of(plan.choices), *(one.depth + 1 for one in plan.ranges), int(bool(plan.recomputed)))
        points.append(
            FrontierPoint(
                OURS, PLANNER, plan.setting, budget, plan.predicted_peak_bytes, plan.added_seconds, plan.step_ratio,
                len(plan.recomputed), depth,
            )
        )  # fmt: skip
    return points, left_out
