"""``regrad frontier``: the time-memory curve of a step, with every planner on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regrad.cli import names, options
from regrad.cli.output import Answer, answering, progress_bar
from regrad.core.codec import plain
from regrad.core.units import Budget
from regrad.report.frontier import PNG, SVG, check_picture_file, frontier_report, write_picture


def frontier(
    subject: options.Subject,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            help="As of regrad plan; may be repeated.",
            show_default="twelve from the least feasible to the eager peak",
        ),
    ] = None,
    segments: Annotated[
        str | None, typer.Option("--segments", help='Modules to choose among, such as "transformer.h.*".')
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the curve into this file.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="The same as a PNG; needs matplotlib.")] = None,
    batch: options.BatchSize = None,
    sequence: options.SequenceLength = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Show what SUBJECT's training step costs in time at every budget, by regrad's plans and by every other method.

    Nothing is trained and nothing but --svg and --png is written.
    """
    with answering(Answer("frontier", subject, as_json)) as answer:
        # Everything that can be refused without loading a framework is refused first.
        wanted = [Budget.parse(one) for one in budget] if budget else None
        settings = options.read_config(config)
        pictures = [(path, ending) for path, ending in ((svg, SVG), (png, PNG)) if path is not None]
        for path, ending in pictures:
            check_picture_file(path, ending)
        import regrad.torch as rt
        from regrad.torch.subject import Wishes, load_subject

        with progress_bar("building the model") as report:
            wishes = Wishes(batch, sequence, names.dtype(dtype), names.optimizer(optimizer), settings)
            step = load_subject(subject, wishes)
            answer.device = str(step.device)
            found = rt.frontier(step, budgets=wanted, segments=segments, progress=report)
        answer.body = {"frontier": plain(found)}
        answer.shown = [frontier_report(found)]
        for path, ending in pictures:
            write_picture(found, path, subject)
            answer.body[f"{ending[1:]}_file"] = str(path)
            answer.shown.append(f"picture in {path}")
