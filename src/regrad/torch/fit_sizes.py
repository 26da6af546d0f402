"""From trials to the figures that a user gets: peaks, and seconds that can be compared between sizes."""

from __future__ import annotations

from dataclasses import replace

from regrad.core.fit import BATCH, Size, smoothed_seconds
from regrad.core.units import format_bytes
from regrad.torch.fit_trials import Trial, Trials


def sizes_of(trials: Trials) -> list[Size]:
    """Every size of which is known whether it fits, by a plan or because it needs none; ascending, without plans."""
    profiles = [(trial, trial.profile) for trial in trials if trial.profile is not None]
    seconds = {trial.size: profile.chain.eager_seconds - trial.optimizer_seconds for trial, profile in profiles}
    if trials.question.device is None:
        seconds = smoothed_seconds(seconds)
    budget_bytes = trials.question.budget_bytes
    known = [one for one in trials if one.plan or one.error or one.eager_peak_bytes <= budget_bytes]
    return [_size(trials, trial, seconds) for trial in known]


def _size(trials: Trials, trial: Trial, micro_seconds: dict[int, float]) -> Size:
    """The figures of one size; ``micro_seconds`` are those of one forward and backward without a plan."""
    asked, plan, micro = trials.question, trial.plan, trials.question.micro_batch(trial.size)
    found = Size(
        trial.size, micro, asked.accumulation_steps(trial.size), asked.gradients(trial.size), fits=False,
        measured_peak_bytes=trial.measured_bytes,
    )  # fmt: skip
    if trial.error is not None:
        return replace(found, why=f"its step does not run: {told(trial.error)}")
    peak = trial.eager_peak_bytes if plan is None else plan.predicted_peak_bytes
    over = max(peak, trial.measured_bytes or 0) - asked.budget_bytes
    once, often = trial.optimizer_seconds, 1.0 if asked.effective_batch is None else asked.effective_batch / micro
    # A plan's share of its own step is steadier than seconds that were taken at another moment.
    ratio = 1.0 if plan is None else 1 + plan.added_seconds / max(plan.eager_seconds - once, 1e-12)
    eager = often * micro_seconds[trial.size] + once
    seconds = often * micro_seconds[trial.size] * ratio + once
    units = often * micro * (1 if asked.over == BATCH else trial.size)
    return replace(
        found, fits=over <= 0, eager_peak_bytes=trial.eager_peak_bytes, peak_bytes=peak, step_seconds=seconds,
        eager_step_seconds=eager, step_ratio=seconds / eager if eager > 0 else 1.0, unit_seconds=seconds / units,
        why=f"over the budget by {format_bytes(over)}" if over > 0 else "",
    )  # fmt: skip


def told(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}"
