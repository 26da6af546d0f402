"""``regrad plan``: what to keep and what to recompute so that a step fits a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regrad.cli import names, options
from regrad.cli.output import Answer, answering, progress_bar
from regrad.core.codec import plain
from regrad.core.errors import InvalidPlan
from regrad.core.units import Budget
from regrad.report.text import plan_report
from regrad.report.timeline import check_timeline_file, write_timeline


def plan(
    subject: options.Subject,
    budget: Annotated[
        str, typer.Option("--budget", help='"8 GiB", "8GB", bytes, "60%" of what the eager step needs, or "min".')
    ],
    segments: Annotated[
        str | None, typer.Option("--segments", help='Modules to choose among, such as "transformer.h.*".')
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan to this file, as JSON.")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            help="Draw the step's memory over time: .svg, .png, .json (the figures) or .trace.json (for Perfetto).",
        ),
    ] = None,
    batch: options.BatchSize = None,
    sequence: options.SequenceLength = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Choose what to keep and what to recompute so that SUBJECT's training step fits BUDGET.

    Nothing is trained and nothing but --out and --timeline is written. Exit code 1 with the least feasible bytes if
    nothing fits.
    """
    with answering(Answer("plan", subject, as_json)) as answer:
        # Everything that can be refused without loading a framework is refused first.
        wanted = Budget.parse(budget)
        settings = options.read_config(config)
        _check_out(out)
        if timeline is not None:
            check_timeline_file(timeline)
        import regrad.torch as rt
        from regrad.torch.subject import Wishes, load_subject

        with progress_bar() as report:
            report("building the model", 0.0)
            wishes = Wishes(batch, sequence, names.dtype(dtype), names.optimizer(optimizer), settings)
            step = load_subject(subject, wishes)
            answer.device = str(step.device)
            profile = rt.profile(step, segments=segments, progress=report)
            made = rt.plan_profile(profile, wanted, progress=report)
        answer.body = {"plan": plain(made)}
        answer.shown = [plan_report(made)]
        if out is not None:
            out.write_text(made.to_json() + "\n", encoding="utf-8")
            answer.body["plan_file"] = str(out)
            answer.shown.append(f"written to {out}")
        if timeline is not None:
            write_timeline(rt.timeline(profile, made), timeline, title=subject)
            answer.body["timeline_file"] = str(timeline)
            answer.shown.append(f"timeline in {timeline}")


def _check_out(out: Path | None) -> None:
    """Say before the work, not after it, that its result has no place."""
    if out is None:
        return
    if out.is_dir():
        raise InvalidPlan(f"--out {out} is a folder. Give the name of a file.")
    if not out.absolute().parent.is_dir():
        raise InvalidPlan(f"--out {out}: there is no folder {out.absolute().parent}. Make it first.")
