"""``regrad demo``: plan for half the memory, train three ways, compare everything, then prove it under a real limit.

A second, small model holds state in its blocks: it shows what a recomputation has to bring back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

import regrad.torch as rt
from regrad.core.errors import UsageError
from regrad.core.plan import Plan
from regrad.core.timeline import Timeline
from regrad.demo.corpus import Batches
from regrad.demo.limits import Proof, prove
from regrad.demo.result import EAGER, EVERY_BLOCK, PLANNED, DemoResult, Limits, Row
from regrad.demo.stateful import EXPERTS, run_stateful
from regrad.demo.subject import Subject
from regrad.demo.train import Run, compare, counting_forwards, train_in_turns
from regrad.planners.recompute_all import RecomputeAll
from regrad.report.timeline import can_draw, write_timeline
from regrad.torch.measure import measure_peak

Progress = Callable[[str, float], None]
CHILD_STEPS = 5


def run_demo(
    *,
    model: str = "gpt",
    out: Path | None = None,
    steps: int = 20,
    budget: str = "50%",
    progress: Progress | None = None,
    subject: Subject | None = None,
    child_steps: int = CHILD_STEPS,
    stateful: Subject = EXPERTS,
) -> DemoResult:
    """Fit a language model's training step into ``budget`` and show that nothing but its memory changed.

    model        "gpt" (the demo's own) or "gpt2" (transformers'), about 12 million parameters each
    out          a folder for ``demo.json``, ``plan.json``, ``timeline.json`` and ``timeline.svg`` (with matplotlib only)
    steps        training steps of each of the three runs: eager, every block recomputed, planned
    budget       as in :func:`regrad.torch.plan`
    progress     called as ``progress(stage, share_done)``
    subject      other sizes than the demo's; its ``model`` then counts
    child_steps  training steps of the children under the limit (fewer if ``steps`` is fewer)
    stateful     sizes of the model with state, see :func:`regrad.demo.stateful.run_stateful`

    Prints nothing. Takes about two minutes on two cores and 2 GiB. Raises :class:`UsageError` for an unknown model or
    ``steps`` below 2 (the optimizer's state exists from the second step on), and what :func:`regrad.torch.plan` raises.
    """
    if steps < 2:
        raise UsageError(f"steps={steps}: at least 2, for the optimizer's state exists from the second step on")
    began = time.monotonic()
    say = progress or (lambda stage, done: None)
    subject = subject or Subject(model=model)
    batches = subject.batches()
    plan, every, timeline = _plans(subject, batches, budget, say)
    runs = [Run(name, subject.step(*batches[0])) for name in (EAGER, EVERY_BLOCK, PLANNED)]
    rt.apply(runs[1].step.model, every)
    rt.apply(runs[2].step.model, plan)
    train_in_turns(runs, batches, steps, lambda done: say("training three ways", done))
    rows = _rows(runs, (plan.eager_peak_bytes, every.predicted_peak_bytes, plan.predicted_peak_bytes), subject, say)
    with_state = run_stateful(subject=stateful, budget=budget, progress=say)
    result = DemoResult(
        model=subject.model,
        parameters=sum(parameter.numel() for parameter in runs[0].step.model.parameters()),
        text_bytes=subject.corpus_bytes,
        device=plan.device,
        threads=torch.get_num_threads(),
        steps=steps,
        budget=budget,
        plan=plan,
        rows=tuple(rows),
        limits=_prove(subject, budget, min(child_steps, steps), rows, runs, say),
        stateful=with_state,
        seconds=time.monotonic() - began,
    )
    if out is not None:
        _write(result, timeline, out)
    return result


def _plans(subject: Subject, batches: Batches, budget: str, say: Progress) -> tuple[Plan, Plan, Timeline]:
    """The plan for ``budget``, the one that recomputes every block, and the first one's timeline; from one profile."""
    profile = rt.profile(subject.step(*batches[0]), progress=say)
    plan = rt.plan_profile(profile, budget, progress=say)
    every = rt.plan_profile(profile, plan.eager_peak_bytes, RecomputeAll(), progress=say)
    return plan, every, rt.timeline(profile, plan)


def _write(result: DemoResult, timeline: Timeline, out: Path) -> None:
    """The result and the planned step over time, as a picture too where there is something to draw it with."""
    result.write(out)
    title = f"One step of {result.model}, planned for {result.budget}"
    for name in ("timeline.json", "timeline.svg") if can_draw() else ("timeline.json",):
        write_timeline(timeline, out / name, title)


def _rows(runs: list[Run], predicted: tuple[int, ...], subject: Subject, say: Progress) -> list[Row]:
    """Compare the runs, then measure one more step of each."""
    eager = runs[0]
    identities = [compare(run, eager) for run in runs]
    rows: list[Row] = []
    for index, run in enumerate(runs):
        say("measuring peaks", index / len(runs))
        with torch.random.fork_rng(devices=[]), counting_forwards(subject.counted_class()) as count:
            peak = measure_peak(run.step, warmup=1)
        forwards = count.calls // 2
        identity = identities[index]
        rows.append(
            Row(
                name=run.name,
                predicted_peak_bytes=predicted[index],
                measured_peak_bytes=peak.peak_bytes,
                step_seconds=run.median_seconds,
                step_ratio=run.median_seconds / eager.median_seconds,
                block_forwards=forwards,
                extra_forwards=forwards - (rows[0].block_forwards if rows else forwards),
                first_loss=run.losses[0],
                last_loss=run.losses[-1],
                losses_identical=identity.losses,
                gradients_identical=identity.gradients,
                weights_identical=identity.weights,
                optimizer_identical=identity.optimizer,
                generator_identical=identity.generator,
            )
        )
    say("measuring peaks", 1.0)
    return rows


def _prove(subject: Subject, budget: str, steps: int, rows: list[Row], runs: list[Run], say: Progress) -> Limits:
    """The proof in children, after the parent has let go of its own models."""
    eager, _, planned = rows
    proof = Proof(
        subject=subject,
        budget=budget,
        steps=steps,
        eager_peak_bytes=eager.measured_peak_bytes,
        plan_peak_bytes=planned.measured_peak_bytes,
        eager_losses=tuple(runs[0].losses),
    )
    runs.clear()
    return prove(proof, lambda done: say("training under a real limit", done))
