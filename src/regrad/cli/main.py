"""The ``regrad`` command: registers the commands, one file each."""

from __future__ import annotations

from typing import Annotated

import typer

import regrad
from regrad.cli.advise import advise
from regrad.cli.audit import audit
from regrad.cli.calibrate import calibrate
from regrad.cli.demo import demo
from regrad.cli.estimate import estimate
from regrad.cli.fit import fit
from regrad.cli.frontier import frontier
from regrad.cli.plan import plan
from regrad.cli.saved import saved
from regrad.cli.verify import verify

app = typer.Typer(
    name="regrad",
    help="Fit a training step into a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(plan)
app.command()(audit)
app.command()(frontier)
app.command()(estimate)
app.command()(advise)
app.command()(fit)
app.command()(saved)
app.command()(demo)
app.command()(verify)
app.command()(calibrate)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"regrad {regrad.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    """Fit a training step into a memory budget."""


def main() -> None:
    """Entry point of the console script."""
    app()
