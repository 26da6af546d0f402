"""Planners of nested plans on real models: their spans run as ranges of torch calls, at the priced peak."""

from __future__ import annotations

import copy

import pytest
import torch
from comparing import train

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.core.errors import InfeasibleBudget, InvalidPlan
from regrad.core.plan import RangePlan
from regrad.planners import Binomial, Optimal, SqrtN, Uniform
from regrad.torch.measure import measure_peak
from regrad.torch.tape_plan import tape_ranges


@pytest.mark.parametrize("name", ["gpt", "unet", "lstm"])
def test_spans_run_and_fit(name: str) -> None:
    step = ZOO[name].make("small")
    step()
    step.clear_gradients()
    profile = rt.profile(step)
    nested = 0
    for planner in (Optimal(nested=True), Binomial(), SqrtN(), Uniform()):
        for budget in ("50%", "35%"):
            try:
                plan = rt.plan_profile(profile, budget, planner=planner)
            except InfeasibleBudget:
                continue
            rt.apply(step.model, plan)
            measured = measure_peak(step).peak_bytes
            rt.remove(step.model)
            assert measured <= plan.predicted_peak_bytes <= plan.budget_bytes
            assert plan.predicted_peak_bytes / measured - 1 <= 0.02
            nested += any(one.depth for one in plan.ranges)
    assert nested or name == "lstm", "some plan has a span inside a span"


def test_a_nested_plan_leaves_the_eager_bytes() -> None:
    step = ZOO["unet"].make("small")
    twin = copy.deepcopy(step.model)
    plan = rt.plan(step, budget="50%", planner=Binomial())
    assert max(one.depth for one in plan.ranges) >= 2
    rt.apply(step.model, plan)
    loss = torch.manual_seed(1) and train(step.model, step.batch)
    torch.manual_seed(1)
    assert loss == train(twin, step.batch)


def test_ranges_that_the_step_does_not_have_are_refused() -> None:
    profile = rt.profile(ZOO["lstm"].make("small"))
    with pytest.raises(InvalidPlan, match="which this step has not"):
        tape_ranges(profile.arithmetic.trace, (RangePlan(5, 100_000, "x", "a", "b", 0, 0.0),))
