"""``regrad demo``: a language model trained inside a budget in which the eager run dies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from regrad.cli import options
from regrad.cli.output import Answer, answering, progress_bar
from regrad.report.demo import demo_report

ModelName = Literal["gpt", "gpt2"]


def demo(
    model: Annotated[
        ModelName, typer.Option("--model", help="A GPT of our own, or the GPT-2 class of transformers.")
    ] = "gpt",
    steps: Annotated[int, typer.Option("--steps", min=2, help="Training steps of each run.")] = 20,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for the results and the timeline.")] = None,
    as_json: options.Json = False,
) -> None:
    """Train a GPT eagerly, with every block recomputed and by plan, and compare bytes, seconds and results.

    Do the same with a model that holds state (routers that count tokens, batch norm), beside torch's own checkpoint. Then
    prove the GPT's plan under a limit of the operating system: the eager run dies, the planned one finishes. Exit code 1
    if any of that does not come out.
    """
    with answering(Answer("demo", model, as_json)) as answer:
        from regrad.demo.run import run_demo

        with progress_bar() as report:
            result = run_demo(model=model, out=out, steps=steps, progress=report)
        answer.body = result.to_dict()
        answer.device = answer.body.pop("device")
        answer.shown = [demo_report(result.to_dict())]
        answer.exit_code = 1 if result.failures else 0
