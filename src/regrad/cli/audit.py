"""``regrad audit``: is a step under a plan the eager step, to the bit, and if not, where do they part?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from regrad.cli import names, options
from regrad.cli.output import Answer, answering, progress_bar
from regrad.core.codec import plain
from regrad.core.errors import InvalidPlan
from regrad.core.plan import Plan
from regrad.report.audit import audit_report

EngineName = Literal["regrad", "torch"]


def audit(
    subject: options.Subject,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="A plan that regrad plan --out wrote; without one every segment is recomputed."),
    ] = None,
    engine: Annotated[
        EngineName, typer.Option("--engine", help="What recomputes: regrad, or torch.utils.checkpoint.")
    ] = "regrad",
    segments: Annotated[
        str | None, typer.Option("--segments", help='Without a plan: modules to recompute, such as "transformer.h.*".')
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps of each run.")] = 3,
    batch: options.BatchSize = None,
    sequence: options.SequenceLength = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Run SUBJECT's step eagerly and under a plan from the same start, and compare every byte that they leave.

    Exit code 0 if they are the same, 1 if they differ (with the first difference) or cannot be compared.
    """
    with answering(Answer("audit", subject, as_json)) as answer:
        # Everything that can be refused without loading a framework is refused first.
        settings = options.read_config(config)
        made = _read(plan)
        import regrad.torch as rt
        from regrad.torch.audit.audit import torchs
        from regrad.torch.subject import Wishes, load_subject

        with progress_bar("building the model") as report:
            wishes = Wishes(batch, sequence, names.dtype(dtype), names.optimizer(optimizer), settings)
            step = load_subject(subject, wishes)
            answer.device = str(step.device)
            theirs = engine == "torch"
            found = rt.audit(
                step, plan=made, segments=segments, engine=torchs if theirs else None, steps=steps,
                compare_torch=not theirs, progress=report,
            )  # fmt: skip
        answer.body = {"audit": plain(found) | {"replays": found.replays}}
        answer.shown = [audit_report(found)]
        answer.exit_code = 0 if found.exact else 1


def _read(file: Path | None) -> Plan | None:
    if file is None:
        return None
    if not file.is_file():
        raise InvalidPlan(f"--plan {file}: there is no such file. Make one with regrad plan SUBJECT --out {file}.")
    return Plan.from_json(file.read_text(encoding="utf-8"))
