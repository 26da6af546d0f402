"""What ``rt.plan`` promises: it fits, the number is right, no whole-block plan is faster, nothing is disturbed."""

from __future__ import annotations

import itertools
import random
from typing import Any

import models
import pytest
import torch
from comparing import snapshot
from test_execute import transformers_model
from torch import nn

import regrad.torch as rt
from regrad.core.errors import InfeasibleBudget, InvalidQuantity, InvalidSubject, PlannerMismatch, is_users
from regrad.core.plan import Plan
from regrad.core.simulate_trace import live_levels
from regrad.planners.optimal import Optimal
from regrad.planners.recompute_all import RecomputeAll
from regrad.torch.describe import UNSEEN_BYTES

BUDGETS = ("75%", "50%", "35%", "25%", "15%")


def fresh(model: nn.Module, batch: Any, **settings: Any) -> rt.Step:
    """A step in its steady state: the optimizer's state is there, gradients are not."""
    step = rt.Step(model, batch, optimizer=torch.optim.AdamW(model.parameters()), gradients="fresh", **settings)
    step()
    step.clear_gradients()
    return step


def gpt_step() -> rt.Step:
    return fresh(models.GPT(blocks=6, width=128), models.gpt_batch(16))


def plan_or_floor(profile: rt.Profile, budget: str) -> tuple[Plan, InfeasibleBudget | None]:
    """The plan for a budget, or the least plan with the refusal that brought it."""
    try:
        return rt.plan_profile(profile, budget), None
    except InfeasibleBudget as error:
        return error.plan, error


def measured_under(step: rt.Step, plan: Any) -> int:
    rt.apply(step.model, plan)
    try:
        return rt.measure(step, steps=1).peak_bytes
    finally:
        rt.remove(step.model)
        step.clear_gradients()


@pytest.mark.parametrize(
    ("subject", "band"),
    [
        (gpt_step, 0.01),
        (lambda: fresh(*transformers_model("gpt2")), 0.02),
        (lambda: fresh(*transformers_model("llama")), 0.05),
        (lambda: fresh(models.ConvNet("group"), models.digits_batch(64)), 0.02),
    ],
    ids=["gpt", "transformers GPT-2", "transformers Llama", "conv"],
)
def test_it_fits_and_the_number_is_right(subject: Any, band: float) -> None:
    step = subject()
    profile = rt.profile(step)
    floors = set()
    for budget in BUDGETS:
        plan, refusal = plan_or_floor(profile, budget)
        if refusal is not None:
            floors.add(refusal.least_bytes)
            assert plan.budget_bytes == refusal.least_bytes > refusal.budget_bytes
        measured = measured_under(step, plan)
        assert measured <= plan.budget_bytes
        assert abs(plan.predicted_peak_bytes / measured - 1) <= band
    assert len(floors) <= 1, "there is one floor, whatever the budget asked for"


def test_no_plan_of_whole_blocks_that_fits_is_faster() -> None:
    step = gpt_step()
    profile = rt.profile(step)
    blocks = [i for i, piece in enumerate(profile.pieces) if piece.module]
    priced = []
    for flags in itertools.product(("keep", "recompute"), repeat=len(blocks)):
        options = ["keep"] * len(profile.pieces)
        for index, option in zip(blocks, flags, strict=True):
            options[index] = option
        levels = profile.levels(tuple(options))
        priced.append((levels.peak_bytes, levels.added_seconds))
    for budget in ("85%", "70%", "55%", "min"):
        plan = rt.plan_profile(profile, budget)
        fitting = [seconds for peak, seconds in priced if peak <= plan.budget_bytes - UNSEEN_BYTES]
        assert fitting or budget == "min"
        assert all(plan.added_seconds <= seconds * (1 + 1e-9) for seconds in fitting)


def test_the_floor_is_at_or_under_the_least_peak_of_all_whole_block_plans() -> None:
    profile = rt.profile(fresh(models.GPT(blocks=4), models.gpt_batch()))
    blocks = [i for i, piece in enumerate(profile.pieces) if piece.module]
    peaks = []
    for flags in itertools.product(("keep", "recompute"), repeat=len(blocks)):
        options = ["keep"] * len(profile.pieces)
        for index, option in zip(blocks, flags, strict=True):
            options[index] = option
        peaks.append(profile.levels(tuple(options)).peak_bytes)
    least = min(peaks) + UNSEEN_BYTES
    assert rt.plan_profile(profile, "min", planner=Optimal()).predicted_peak_bytes <= least
    assert rt.plan_profile(profile, "min").predicted_peak_bytes <= least


def test_arithmetic_and_dry_runs_agree() -> None:
    """Trace arithmetic against recorded steps on copies: two ways to the same peak."""
    profile = rt.profile(gpt_step())
    chooser = random.Random(3)
    for _ in range(6):
        options = tuple("recompute" if p.module and chooser.random() < 0.5 else "keep" for p in profile.pieces)
        recorded = live_levels(profile.dry_run(options)).peak_bytes
        assert abs(profile.levels(options).peak_bytes / recorded - 1) < 0.001


def test_a_larger_budget_is_never_slower_in_the_model() -> None:
    profile = rt.profile(gpt_step())
    plans = [rt.plan_profile(profile, budget) for budget in ("min", "55%", "65%", "80%", "90%", "100%")]
    added = [plan.added_seconds for plan in plans]
    assert added == sorted(added, reverse=True)
    assert not plans[-1].recomputed
    assert added[-1] == 0


@pytest.mark.parametrize("gradients", ["fresh", "kept"])
@pytest.mark.parametrize("optimizer", ["none", "sgd", "adamw"])
def test_the_steady_state_is_planned(gradients: str, optimizer: str) -> None:
    """Planned before the first step, right from the second on: optimizer state and kept gradients count."""
    model, batch = models.GPT(blocks=3), models.gpt_batch()
    make = {
        "none": lambda: None,
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
    }[optimizer]
    step = rt.Step(model, batch, optimizer=make(), gradients=gradients)
    plan = rt.plan(step, budget="60%")
    assert plan.gradients == gradients
    measured = measured_under(step, plan)
    assert measured <= plan.budget_bytes
    assert abs(plan.predicted_peak_bytes / measured - 1) <= 0.01


def test_the_users_gradients_decide_the_mode() -> None:
    model, batch = models.GPT(blocks=2), models.gpt_batch()
    assert rt.plan(model, batch, budget="100%").gradients == "fresh"
    model(*batch).backward()
    assert rt.plan(model, batch, budget="100%").gradients == "kept"


def test_a_plan_can_be_made_in_the_middle_of_training() -> None:
    step = gpt_step()
    first = rt.plan(step, budget="50%", planner=RecomputeAll())
    for _ in range(3):
        step()
    step.clear_gradients()
    again = rt.plan(step, budget="50%", planner=RecomputeAll())
    assert again.predicted_peak_bytes == first.predicted_peak_bytes
    assert again.eager_peak_bytes == first.eager_peak_bytes


def test_a_model_under_a_plan_can_be_planned_again() -> None:
    step = gpt_step()
    first = rt.plan(step, budget="60%")
    rt.apply(step.model, first)
    again = rt.plan(step, budget="60%")
    assert again.calls == first.calls
    assert (again.budget_bytes, again.eager_peak_bytes) == (first.budget_bytes, first.eager_peak_bytes)
    assert rt.is_applied(step.model)


def test_success_leaves_everything_as_it_was() -> None:
    step = gpt_step()
    step()
    seen: list[int] = []
    step.model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    step.loss = lambda model, batch: (seen.append(2), model(*batch))[1]
    before = snapshot(step)
    rt.plan(step, budget="50%")
    assert snapshot(step) == before
    assert seen == []


@pytest.mark.parametrize("way", ["infeasible", "model", "loss", "backward"])
def test_failure_leaves_everything_as_it_was(way: str) -> None:
    step = fresh(models.GPT(blocks=2), models.gpt_batch())
    torch.set_grad_enabled(True)
    if way == "model":
        step.batch = (step.batch[0], step.batch[1][:3])
    elif way == "loss":
        step.loss = lambda model, batch: model(*batch) / {}["missing"]
    elif way == "backward":
        step.loss = lambda model, batch: _Failing.apply(model(*batch))
    before = snapshot(step)
    expected = {"infeasible": InfeasibleBudget, "model": ValueError, "loss": KeyError, "backward": ArithmeticError}[way]
    with pytest.raises(expected) as caught:
        rt.plan(step, budget=1000)
    assert is_users(caught.value) == (way != "infeasible")
    assert snapshot(step) == before
    assert not rt.is_applied(step.model)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


def test_an_infeasible_budget_says_what_would_be_enough() -> None:
    step = fresh(models.GPT(blocks=3), models.gpt_batch())
    with pytest.raises(InfeasibleBudget) as caught:
        rt.plan(step, budget="10 KiB")
    error = caught.value
    assert error.budget_bytes == 10 * 1024
    assert f"{error.least_bytes:,} bytes" in str(error)
    plan = rt.plan(step, budget=error.least_bytes)
    assert plan.predicted_peak_bytes <= error.least_bytes
    with pytest.raises(InfeasibleBudget):
        rt.plan(step, budget=error.least_bytes - 1)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: rt.plan(nn.ReLU(), torch.ones(3), budget="min"), InvalidSubject, "no parameter that requires a gradient"),
        (lambda: rt.plan(nn.Linear(3, 3), torch.ones(2, 3), budget="min"), InvalidSubject, "must be a scalar"),
        (lambda: rt.plan(nn.Linear(3, 1), torch.ones(1, 3, device="meta"), budget="min"), InvalidSubject, "is on meta"),
        (lambda: rt.plan(nn.Linear(3, 1), torch.ones(1, 3), budget="8 QiB"), InvalidQuantity, "QiB"),
        (lambda: rt.plan(nn.Linear(3, 1), torch.ones(1, 3), budget="min", planner=Optimal), PlannerMismatch, r"Optimal\(\)"),
        (
            lambda: rt.plan(nn.Linear(3, 1), torch.ones(1, 3), loss=lambda m, b: m(b).detach().sum(), budget="min"),
            InvalidSubject,
            "has no gradient",
        ),
        (
            lambda: rt.plan(models.GPT(), models.gpt_batch(), budget="min", segments="layers.*"),
            InvalidSubject,
            "matches no module",
        ),
    ],
)  # fmt: skip
def test_bad_input(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()


def test_a_step_that_branches_on_values_is_run_for_real_on_a_copy() -> None:
    class Branching(models.GPT):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = super().forward(tokens, targets)
            return loss if loss.item() > 0 else loss * 2

    step = fresh(Branching(), models.gpt_batch())
    before = snapshot(step)
    plan = rt.plan(step, budget="60%")
    assert snapshot(step) == before
    assert plan.predicted_by == "trace"
    assert any("run for real" in note for note in plan.notes)
    measured = measured_under(step, plan)
    assert measured <= plan.budget_bytes
    assert abs(plan.predicted_peak_bytes / measured - 1) <= 0.02


def test_a_loss_that_closes_over_the_model_is_run_on_the_copy() -> None:
    step = gpt_step()
    model = step.model
    step.loss = lambda _, batch: model(*batch)
    before = snapshot(step)
    plan = rt.plan(step, budget="60%")
    assert snapshot(step) == before
    assert plan.predicted_by == "fake trace"


def test_a_loss_that_takes_the_model_from_a_global_name_is_refused() -> None:
    step = gpt_step()
    globals()["_elsewhere"] = step.model
    step.loss = lambda _, batch: globals()["_elsewhere"](*batch)
    before = snapshot(step)
    with pytest.raises(InvalidSubject, match="global name"):
        rt.plan(step, budget="60%")
    assert snapshot(step) == before


def test_printing_a_plan_names_what_matters() -> None:
    plan = rt.plan(gpt_step(), budget="50%")
    text = str(plan)
    assert "blocks.0" in text
    assert "recompute" in text
    assert plan.peak_moment.operation in text
