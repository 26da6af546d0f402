"""``regrad verify``: the suites that prove the replay engines, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.cli.output import Answer, answering, progress_bar

if TYPE_CHECKING:
    from regrad.verify.records import Grid, Summary

# nine columns in 80 characters
COLUMNS = {
    "programs": 8,
    "exact": 6,
    "diverged": 8,
    "unsupported": 11,
    "not run": 4,
    "max error": 7,
    "faults caught": 6,
    "time": 7,
}


def verify(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SUITE]…", help="numeric, bytes, engines, complex-step, alias, cohort, field; all without one."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The published sizes: minutes, not seconds.")] = False,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write a record a run as JSON Lines.")
    ] = None,
) -> None:
    """Run seeded random programs through every replay engine and compare with independent derivatives and all bytes.

    cohort and field run on PyTorch, beside torch's own checkpoints. Exit code 1 if a suite finds a difference that it
    should not, an error above its bound, or does not catch a fault that was planted.
    """
    with answering(Answer("verify", ", ".join(suites or ()), False)) as answer:
        from regrad.verify.run import run_suites

        with progress_bar() as report:
            summaries = run_suites(suites or (), full=full, file=file, progress=report)
        answer.shown = [verify_report(summaries)]
        if file is not None:
            answer.shown.append(f"records in {file}")
        answer.exit_code = 1 if any(summary.failures for summary in summaries) else 0


def verify_report(summaries: list[Summary]) -> RenderableType:
    """A table with a row a suite, the histograms of gradients and errors, and what failed."""
    from regrad.verify.records import ERROR_EDGES, GRADIENT_EDGES

    parts: list[RenderableType] = [_table(summaries)]
    for summary in summaries:
        if summary.gradients:
            title = f"{summary.suite}: max |gradient| a program, median {summary.median_gradient:.2f}"
            parts += _bars(title, summary.histogram(summary.gradients, GRADIENT_EDGES), "{:>8.3f}")
        if summary.errors:
            title = f"{summary.suite}: gradient error a run, largest {summary.max_gradient_error:.3g}"
            parts += _bars(title, summary.histogram(summary.errors, ERROR_EDGES), "{:>8.2g}")
        for grid in summary.grids:
            parts += _grid(summary.suite, grid)
        notes = ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in summary.more.items())
        if notes:
            parts.append(Text(f"{summary.suite}: {notes}", style="dim"))
    failures = [f"{summary.suite}: {failure}" for summary in summaries for failure in summary.failures]
    parts += [Text(f"FAILED {failure}", style="bold red") for failure in failures]
    if not failures:
        parts.append(Text("every suite passed, and every planted fault was caught", style="green"))
    return Group(*parts)


def _table(summaries: list[Summary]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, header_style="bold")
    table.add_column("suite", no_wrap=True)
    for name, width in COLUMNS.items():
        table.add_column(name, justify="right", width=width)
    for summary in summaries:
        counts = (summary.programs, summary.exact, summary.diverged, summary.unsupported, summary.not_run)
        error = f"{summary.max_gradient_error:.1e}" if summary.errors else "–"
        missed = "" if summary.faults_caught == summary.faults_planted else f"/{summary.faults_planted:,}"
        faults = f"{summary.faults_caught:,}{missed}"
        cells = [f"{count:,}" for count in counts] + [error, faults, f"{summary.seconds:.1f}\u00a0s"]
        table.add_row(Text(summary.suite, style="bold red" if summary.failures else ""), *cells)
    return table


def _grid(suite: str, grid: Grid) -> list[RenderableType]:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, header_style="bold")
    for position, name in enumerate(grid.columns):
        table.add_column(name, justify="right" if position else "left")
    for row in grid.rows:
        table.add_row(*row)
    shown: list[RenderableType] = [Text(f"\n{suite}: {grid.title}", style="bold"), table]
    return [*shown, Text(grid.note, style="dim")] if grid.note else shown


def _bars(title: str, histogram: list[list[float]], edge: str) -> list[RenderableType]:
    most = max(count for _, count in histogram)
    lines = [
        f"  from {edge.format(start)}  {int(count):>6,}  {'█' * round(30 * count / most)}" for start, count in histogram
    ]
    return [Text(f"\n{title}", style="bold"), *map(Text, lines)]


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
