"""Predicted against measured peaks of models in training, pair by pair of a model and a setting.

Predicted is what a user gets before anything ran: ``rt.estimate`` for the eager step, ``rt.plan`` where blocks or stretches
are recomputed. Measured is one step after a warm-up step, by the profiler's memory events and, in a process that was
started under the counting allocator of the tests, by that as well. Not for: other devices than the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import regrad.torch as rt
from regrad.bench.estimates_subjects import EAGER, EVERY_BLOCK, Setting, Subject
from regrad.bench.prediction import Counter
from regrad.bench.zoo.model import BENCH
from regrad.core.chain import KEEP
from regrad.core.errors import InfeasibleBudget
from regrad.core.plan import Plan
from regrad.planners.recompute_all import RecomputeAll
from regrad.torch.measure import measure_peak

BUDGET = "50%"
MICRO_BATCHES = 2
TRANSFORMER_RATIO, OTHER_RATIO = 0.01, 0.05
UNDER_RATIO = 0.02
"""How far a measured peak may lie from a prediction at most, either way and above it."""
WITHOUT_LIMIT_BYTES = 1 << 60

EXCEPTIONS: Mapping[tuple[str, str], float] = {}
"""Pairs that are known to miss, by model and setting, with the error that they are allowed instead."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pair. Ratios of errors are predicted over measured, less 1; the allocator's figures are None without it.

    predicted_by      "fake trace", or "trace" where the model does not run without values and a real step was recorded
    changed           segments that are not simply kept, or ranges where there are more of those
    least             no plan is within the budget; this is the one of the least peak
    eager_peak_bytes  predicted for the same step without a plan
    within            by every measure that there is
    exception         the pair is listed in EXCEPTIONS and is within what stands there
    """

    model: str
    kind: str
    recompute: str
    optimizer: str
    precision: str
    accumulate: bool
    predicted_by: str
    changed: int
    least: bool
    eager_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    allocator_peak_bytes: int | None
    error_ratio: float
    allocator_error_ratio: float | None
    allowed_ratio: float
    within: bool
    exception: bool
    predict_seconds: float

    @property
    def setting(self) -> Setting:
        """The setting of the pair."""
        return Setting(self.recompute, self.optimizer, self.precision, self.accumulate)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a user is told of a step that never ran; ``plan`` is None where nothing is recomputed."""

    peak_bytes: int
    eager_peak_bytes: int
    by: str
    plan: Plan | None = None
    least: bool = False

    @property
    def changed(self) -> int:
        """Segments that the plan does not simply keep, or ranges where there are more of those."""
        if self.plan is None:
            return 0
        return max(len(self.plan.ranges), sum(segment.option != KEEP for segment in self.plan.segments))


def is_within(error_ratio: float, allowed_ratio: float) -> bool:
    """Whether a prediction is near enough: within ``allowed_ratio`` either way, and never low by more than 2 %."""
    return -min(allowed_ratio, UNDER_RATIO) <= error_ratio <= allowed_ratio


def predict(step: rt.Step, recompute: str) -> Prediction:
    """Ask for the peak of ``step``, eager, with every block recomputed, or planned at half of what it needs."""
    if recompute == EAGER:
        found = rt.estimate(step)
        return Prediction(found.training.peak_bytes, found.training.peak_bytes, found.method)
    least = False
    if recompute == EVERY_BLOCK:
        plan = rt.plan(step, budget=WITHOUT_LIMIT_BYTES, planner=RecomputeAll())
    else:
        try:
            plan = rt.plan(step, budget=BUDGET)
        except InfeasibleBudget as error:
            plan, least = error.plan, True
    return Prediction(plan.predicted_peak_bytes, plan.eager_peak_bytes, plan.predicted_by, plan, least)


def accumulating(step: rt.Step) -> Callable[[], None]:
    """A step that adds up the gradients of two micro-batches, as a training loop writes it."""

    def run() -> None:
        step.model.zero_grad(set_to_none=True)
        for _ in range(MICRO_BATCHES):
            (step.compute_loss() / MICRO_BATCHES).backward()
        if step.optimizer is not None:
            step.optimizer.step()

    return run


def measured(step: rt.Step, plan: Plan | None, *, accumulate: bool) -> tuple[int, int | None]:
    """The peak of a step under ``plan``, by memory events and by the counting allocator (None without one)."""
    run: Callable[[], object] = accumulating(step) if accumulate else step
    if plan is not None:
        rt.apply(step.model, plan)
    try:
        peak = measure_peak(run, persistent=step).peak_bytes
        return peak, Counter().peak(step, run)
    finally:
        rt.remove(step.model)
        step.model.zero_grad(set_to_none=True)


def try_pair(subject: Subject, setting: Setting, size: str = BENCH) -> Row:
    """One pair, predicted and then measured."""
    step = subject.make(setting, size)
    began = time.monotonic()
    told = predict(step, setting.recompute)
    seconds = time.monotonic() - began
    peak, counted = measured(step, told.plan, accumulate=setting.accumulate)
    error = told.peak_bytes / peak - 1
    counted_error = None if counted is None else told.peak_bytes / counted - 1
    allowed = TRANSFORMER_RATIO if subject.transformer else OTHER_RATIO
    errors = [error] if counted_error is None else [error, counted_error]
    known = EXCEPTIONS.get((subject.name, str(setting)))
    return Row(
        model=subject.name,
        kind=subject.kind,
        recompute=setting.recompute,
        optimizer=setting.optimizer,
        precision=setting.precision,
        accumulate=setting.accumulate,
        predicted_by=told.by,
        changed=told.changed,
        least=told.least,
        eager_peak_bytes=told.eager_peak_bytes,
        predicted_peak_bytes=told.peak_bytes,
        measured_peak_bytes=peak,
        allocator_peak_bytes=counted,
        error_ratio=error,
        allocator_error_ratio=counted_error,
        allowed_ratio=allowed,
        within=all(is_within(one, allowed) for one in errors),
        exception=known is not None and all(abs(one) <= abs(known) for one in errors),
        predict_seconds=seconds,
    )


def defects(rows: Sequence[Row]) -> list[str]:
    """What no result may hold, in words: predictions that miss and are not listed, and plans that show nothing."""
    found = []
    for row in rows:
        name = f"{row.model}, {row.setting}"
        if not row.within and not row.exception:
            by = "" if row.allocator_error_ratio is None else f" ({row.allocator_error_ratio:+.2%} by the allocator)"
            found.append(
                f"{name}: the prediction is off by {row.error_ratio:+.2%}{by}, {row.allowed_ratio:.0%} is allowed"
            )
        if row.recompute != EAGER and not row.changed:
            found.append(f"{name}: the plan changes nothing, so the pair says no more than the eager one")
    return found
