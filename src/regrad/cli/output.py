"""How every command answers: one JSON object or text on stdout, progress and errors on stderr, an exit code.

0  done            2  usage or bad input
1  infeasible, diverged or unsupported            3  the user's own model raised
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

import regrad
from regrad.core.codec import plain
from regrad.core.errors import USER_MODEL_EXIT, InfeasibleBudget, RegradError, is_users
from regrad.core.plan import Plan
from regrad.report.text import plan_report

Report = Callable[[str, float], None]
PACKAGE = Path(regrad.__file__).parent


@dataclass
class Answer:
    """What a command says. ``device`` becomes known while it runs."""

    command: str
    subject: str
    as_json: bool
    device: str | None = None
    exit_code: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    shown: list[RenderableType] = field(default_factory=list)

    def emit(self) -> None:
        """Print it: exactly one object with ``--json``, else what was collected in ``shown``."""
        if self.as_json:
            head = {"regrad": regrad.__version__, "command": self.command, "subject": self.subject}
            typer.echo(json.dumps(head | {"device": self.device} | self.body, indent=2, allow_nan=False))
            return
        console = Console()
        for renderable in self.shown:
            console.print(renderable, markup=False)


@contextmanager
def answering(answer: Answer) -> Iterator[Answer]:
    """Run a command's body, turn what it raises into a message and an exit code, and print the answer.

    An exception that is neither regrad's nor marked as the user's is a defect of regrad and passes through.
    """
    try:
        yield answer
    except Exception as error:
        if is_users(error):
            answer.exit_code = USER_MODEL_EXIT
            _show_users(error)
        elif isinstance(error, RegradError):
            answer.exit_code = error.exit_code
            _show_own(error)
        else:
            raise
        answer.body = {"error": describe(error)}
        answer.shown = []
        if answer.as_json:
            answer.emit()
    else:
        answer.emit()
    raise typer.Exit(answer.exit_code)


def describe(error: BaseException) -> dict[str, Any]:
    """An error as JSON: its type, its message and, of regrad's own, the figures that it carries."""
    figures: dict[str, Any] = {}
    for name, value in vars(error).items() if isinstance(error, RegradError) else ():
        if isinstance(value, Plan):
            figures[name] = plain(value)
        elif isinstance(value, (str, int, float, bool)):
            figures[name] = value
    return {"type": type(error).__name__, "message": str(error)} | figures


def _show_own(error: RegradError) -> None:
    console = Console(stderr=True)
    console.print(f"error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if isinstance(error, InfeasibleBudget) and isinstance(error.plan, Plan):
        console.print("\nThe plan that reaches the least:", highlight=False)
        console.print(plan_report(error.plan))


def _show_users(error: BaseException) -> None:
    typer.echo("the model, its loss or its factory raised; its own traceback (without regrad's frames):", err=True)
    shown = traceback.TracebackException.from_exception(error)
    _drop_own_frames(shown)
    typer.echo("".join(shown.format()).rstrip(), err=True)


def _drop_own_frames(shown: traceback.TracebackException) -> None:
    theirs = [frame for frame in shown.stack if PACKAGE not in Path(frame.filename).parents]
    # An error with no frame but ours (a batch that the model cannot be called with) keeps them: better than nothing.
    if theirs:
        shown.stack = traceback.StackSummary.from_list(theirs)
    # The step is tried on fake tensors before it is run for real; what the first try ran into is not the user's affair.
    if shown.__context__ is not None and any("fake_tensor" in frame.filename for frame in shown.__context__.stack):
        shown.__context__ = None
    for linked in (shown.__cause__, shown.__context__):
        if linked is not None:
            _drop_own_frames(linked)


@contextmanager
def progress_bar(first: str = "") -> Iterator[Report]:
    """``report(stage, done)``, from stage ``first`` on, with ``done`` from 0 to 1: drawn on stderr while it is a terminal,
    silent otherwise."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def report(stage: str, done: float) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    progress.update(earlier, completed=1.0)
                tasks[stage] = progress.add_task(stage, total=1.0)
            progress.update(tasks[stage], completed=min(max(done, 0.0), 1.0))

        if first:
            report(first, 0.0)
        yield report
    sys.stderr.flush()
