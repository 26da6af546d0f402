"""``regrad plan``: what to keep and what to recompute so that a step fits a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regrad.cli import names, options
from regrad.cli.device import add_device, refuse
from regrad.cli.output import Answer, answering, progress_bar
from regrad.core.codec import plain
from regrad.core.errors import InfeasibleBudget, InvalidPlan, UsageError
from regrad.core.plan import Plan
from regrad.core.timeline import Timeline
from regrad.core.units import Budget
from regrad.memory.devices import Device, as_device
from regrad.report.text import plan_report
from regrad.report.timeline import check_timeline_file, write_timeline

BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help='"8 GiB", "8GB", bytes, "60%" of what the eager step needs, or "min".',
        show_default="what --device leaves",
    ),
]
Segments = Annotated[str | None, typer.Option("--segments", help='Modules to choose among, such as "transformer.h.*".')]
Out = Annotated[Path | None, typer.Option("--out", help="Write the plan to this file, as JSON.")]
TimelineFile = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        help="Draw the step's memory over time: .svg, .png, .json (the figures) or .trace.json (for Perfetto).",
    ),
]


def plan(
    subject: options.Subject,
    budget: BudgetText = None,
    segments: Segments = None,
    offload: options.Offload = None,
    no_pack: options.NoPack = False,
    no_recompute: options.NoRecompute = False,
    keep: options.KeepCalls = None,
    out: Out = None,
    timeline: TimelineFile = None,
    batch: options.BatchSize = None,
    sequence: options.SequenceLength = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    optimizer_dtype: options.OptimizerDtype = None,
    device: options.DeviceName = None,
    device_memory: options.DeviceMemory = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Choose what to keep, to recompute, to pack and to move elsewhere so that SUBJECT's training step fits BUDGET.

    Nothing is trained and nothing but --out and --timeline is written. Exit code 1 with the least feasible bytes if
    nothing fits. With --device the step is planned for a device that need not be here: models of transformers are then
    built without bytes, and the budget is what that device leaves unless it is given.
    """
    with answering(Answer("plan", subject, as_json)) as answer:
        # Everything that can be refused without loading a framework is refused first.
        target = as_device(device, device_memory)
        wanted = _budget(budget, target)
        settings = options.read_config(config)
        _check_files(out, timeline)
        import regrad.torch as rt
        from regrad.torch.moments import with_moments
        from regrad.torch.subject import Wishes, with_subject

        policy = rt.Policy(not no_recompute, not no_pack, offload, tuple(keep or ()))
        with progress_bar("building the model") as report:
            make = with_moments(names.optimizer(optimizer), names.dtype(optimizer_dtype))
            wishes = Wishes(batch, sequence, names.dtype(dtype), make, settings, without_bytes=target is not None)

            def profiled(step: Any) -> Any:
                answer.device = str(step.device) if target is None else target.name
                return rt.profile(step, segments=segments, progress=report, device=target)

            profile = with_subject(subject, wishes, profiled)
            try:
                made = rt.plan_profile(profile, wanted, progress=report, policy=policy)
            except InfeasibleBudget as error:
                refuse(answer, error, profile, target)
                return
        answer.body = {"plan": plain(made)}
        answer.shown = [plan_report(made)]
        if target is not None:
            add_device(answer, profile, made, target)
        if out is not None:
            _write(answer, made, out)
        if timeline is not None:
            _draw(answer, rt.timeline(profile, made), timeline)


def _write(answer: Answer, made: Plan, out: Path) -> None:
    """Write the plan and say where it is."""
    out.write_text(made.to_json() + "\n", encoding="utf-8")
    answer.body["plan_file"] = str(out)
    answer.shown.append(f"written to {out}")


def _draw(answer: Answer, made: Timeline, file: Path) -> None:
    """Draw the timeline and say where it is."""
    write_timeline(made, file, title=answer.subject)
    answer.body["timeline_file"] = str(file)
    answer.shown.append(f"timeline in {file}")


def _budget(budget: str | None, target: Device | None) -> Budget:
    """The budget that was given, else what the device leaves."""
    if budget is not None:
        return Budget.parse(budget)
    if target is None:
        raise UsageError('there is no budget: give --budget "8 GiB", or a device (--device h100-80gb) to plan for.')
    return Budget.parse(target.usable_bytes)


def _check_files(out: Path | None, timeline: Path | None) -> None:
    """Say before the work, not after it, that its results have no place."""
    if timeline is not None:
        check_timeline_file(timeline)
    if out is None:
        return
    if out.is_dir():
        raise InvalidPlan(f"--out {out} is a folder. Give the name of a file.")
    if not out.absolute().parent.is_dir():
        raise InvalidPlan(f"--out {out}: there is no folder {out.absolute().parent}. Make it first.")
