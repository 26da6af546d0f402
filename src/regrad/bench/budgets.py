"""The main job at many budgets: predicted against measured peak, time against eager, the same bytes.

For each subject one profile serves all budgets. A budget that has no plan is answered with the least one that has, and
that one is run: the true floor is then measured, not only reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import regrad
import regrad.torch as rt
from regrad.core.errors import InfeasibleBudget
from regrad.core.plan import Plan
from regrad.torch.measure import measure_pair, measure_peak
from regrad.torch.subject import Wishes, load_subject

BUDGETS = ("75%", "50%", "35%", "25%", "15%")
ROUNDS = 3
_TRAIN_SEED = 1


@dataclass(frozen=True, slots=True)
class Case:
    """A subject by a short name: ``subject`` as on the command line, ``settings`` as with ``--config``."""

    name: str
    subject: str
    settings: tuple[tuple[str, str], ...] = ()

    def step(self) -> rt.Step:
        """A new step; the same one every time."""
        return load_subject(self.subject, Wishes(config=dict(self.settings)))


CASES = (
    Case("gpt", f"{Path(regrad.__file__).parent / 'demo' / 'subject.py'}:make_step"),
    Case(
        "gpt2",
        "transformers:GPT2Config",
        (("n_layer", "12"), ("n_embd", "288"), ("n_head", "6"), ("vocab_size", "256")),
    ),
    Case(
        "llama",
        "transformers:LlamaConfig",
        (
            ("num_hidden_layers", "12"),
            ("hidden_size", "288"),
            ("intermediate_size", "768"),
            ("num_attention_heads", "6"),
            ("num_key_value_heads", "6"),
            ("vocab_size", "256"),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One subject at one budget.

    feasible              whether the budget has a plan; if not, the row is of the least plan that there is
    error_ratio           predicted over measured peak, less 1
    within_budget         measured <= budget (of the least plan: measured <= predicted_peak_bytes)
    step_ratio            measured: medians of process CPU seconds, timed in turns with the eager step
    predicted_step_ratio  of the plan
    bit_identical         losses, gradients and weights after two steps, against the eager run
    """

    budget: str
    budget_bytes: int
    feasible: bool
    least_bytes: int
    segments: int
    recomputed: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    error_ratio: float
    within_budget: bool
    step_ratio: float
    predicted_step_ratio: float
    bit_identical: bool
    solve_seconds: float


def run_case(case: Case, budgets: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Everything about one subject as plain values. Takes about a minute for twelve blocks."""
    say(f"{case.name}: profiling")
    profile = rt.profile(case.step())
    eager = case.step()
    reference = _train(eager)
    peak = measure_peak(eager)
    rows = []
    for budget in budgets:
        say(f"{case.name}: {budget}")
        rows.append(_run_budget(case, profile, budget, eager, reference))
    first = rt.plan_profile(profile, "100%")
    return {
        "name": case.name,
        "settings": dict(case.settings),
        "parameters": sum(parameter.numel() for parameter in eager.model.parameters()),
        "persistent_bytes": first.persistent_bytes,
        "eager_peak_bytes": peak.peak_bytes,
        "predicted_eager_peak_bytes": first.eager_peak_bytes,
        "predicted_by": first.predicted_by,
        "profile_seconds": profile.seconds,
        "planning_seconds": first.planning_seconds,
        "rows": [asdict(row) for row in rows],
    }


def _run_budget(case: Case, profile: rt.Profile, budget: str, eager: rt.Step, reference: list[torch.Tensor]) -> Row:
    try:
        plan, feasible = rt.plan_profile(profile, budget), True
        budget_bytes = plan.budget_bytes
    except InfeasibleBudget as error:
        made: Plan = error.plan
        plan, feasible, budget_bytes = made, False, error.budget_bytes
    step = case.step()
    rt.apply(step.model, plan)
    left = _train(step)
    peak_bytes = measure_peak(step).peak_bytes
    allowed = budget_bytes if feasible else plan.predicted_peak_bytes
    return Row(
        budget=budget,
        budget_bytes=budget_bytes,
        feasible=feasible,
        least_bytes=plan.least_bytes,
        segments=len(plan.segments),
        recomputed=len(plan.recomputed),
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=peak_bytes,
        error_ratio=plan.predicted_peak_bytes / peak_bytes - 1,
        within_budget=peak_bytes <= allowed,
        step_ratio=measure_pair(eager, step, rounds=ROUNDS).ratio,
        predicted_step_ratio=plan.step_ratio,
        bit_identical=all(torch.equal(ours, theirs) for ours, theirs in zip(left, reference, strict=True)),
        solve_seconds=plan.solve_seconds,
    )


def _train(step: rt.Step) -> list[torch.Tensor]:
    """Two steps from a seed; losses, gradients and weights, copied."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_TRAIN_SEED)
        left = [step(), step()]
    for parameter in step.model.parameters():
        left.append(parameter.detach().clone())
        if parameter.grad is not None:
            left.append(parameter.grad.clone())
    return left
