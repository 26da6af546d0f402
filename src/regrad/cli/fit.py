"""``regrad fit``: the largest batch or sequence length under a budget, and the one that trains fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regrad.cli import names, options
from regrad.cli.output import Answer, answering, progress_bar
from regrad.core.codec import plain
from regrad.core.errors import UsageError
from regrad.core.fit import BATCH, SEQUENCE, Fit
from regrad.core.units import Budget
from regrad.memory.devices import Device, as_device
from regrad.report.fit import fit_report

if TYPE_CHECKING:
    from regrad.torch.step import Step

BudgetText = Annotated[
    str | None, typer.Option("--budget", help='"8 GiB", "8GB" or bytes.', show_default="what --device leaves")
]
Over = Annotated[Literal["batch", "sequence"], typer.Option("--over", help="What is made as large as it can be.")]
Effective = Annotated[
    int | None,
    typer.Option("--effective-batch", min=1, help="Samples to one optimizer step: smaller batches are accumulated."),
]
Most = Annotated[int | None, typer.Option("--most", min=1, help="Look at no size above it.")]
BatchSize = Annotated[
    int | None, typer.Option("--batch", min=1, help="With --over sequence: samples.", show_default="1")
]
SequenceLength = Annotated[
    int | None,
    typer.Option("--sequence", min=1, help="With --over batch: tokens.", show_default="what make_batch has"),
]
Segments = Annotated[str | None, typer.Option("--segments", help='Modules to choose among, such as "transformer.h.*".')]
Confirm = Annotated[bool, typer.Option("--confirm/--no-confirm", help="Run and measure the steps that are chosen.")]


def fit(
    subject: options.Subject,
    budget: BudgetText = None,
    over: Over = "batch",
    effective_batch: Effective = None,
    most: Most = None,
    batch: BatchSize = None,
    sequence: SequenceLength = None,
    segments: Segments = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    optimizer_dtype: options.OptimizerDtype = None,
    device: options.DeviceName = None,
    device_memory: options.DeviceMemory = None,
    config: options.Config = None,
    confirm: Confirm = True,
    as_json: options.Json = False,
) -> None:
    """Find the largest batch, or sequence length, whose training step fits BUDGET, and the one that trains fastest.

    SUBJECT's step needs a make_batch; models of transformers have one. Every size is tried by trace under its own best
    plan. The steps that are chosen are then run once, on a copy, and measured, unless they are for a --device. Exit code 1
    with the least feasible bytes if not even one sample fits.
    """
    with answering(Answer("fit", subject, as_json)) as answer:
        # Everything that can be refused without loading a framework is refused first.
        target = as_device(device, device_memory)
        wanted = _budget(budget, target)
        settings = options.read_config(config)
        _check(over, batch, sequence)
        import regrad.torch as rt
        from regrad.torch.fit_trials import takes_length
        from regrad.torch.moments import with_moments
        from regrad.torch.subject import Wishes, with_subject

        with progress_bar("building the model") as report:
            make = with_moments(names.optimizer(optimizer), names.dtype(optimizer_dtype))
            # A factory is not told the batch, which only make_batch needs here.
            wishes = Wishes(None, sequence, names.dtype(dtype), make, settings, without_bytes=target is not None)

            def fitted(step: Step) -> Fit:
                answer.device = str(step.device) if target is None else target.name
                # A factory that was told the length may have a make_batch that knows it.
                told = sequence if step.make_batch is not None and takes_length(step.make_batch) else None
                return rt.fit(
                    step, budget=wanted, over=over, effective_batch=effective_batch, most=most, batch_size=batch,
                    sequence_length=told, segments=segments, device=target, confirm=confirm, progress=report,
                )  # fmt: skip

            found = with_subject(subject, wishes, fitted)
        answer.body = _body(found, target)
        answer.shown = [fit_report(found)]


def _budget(budget: str | None, target: Device | None) -> Budget | None:
    """The budget that was given; None for what the device leaves."""
    if budget is None and target is None:
        raise UsageError('there is no budget: give --budget "8 GiB", or a device (--device h100-80gb) to fit.')
    return None if budget is None else Budget.parse(budget)


def _check(over: str, batch: int | None, sequence: int | None) -> None:
    """Refuse a value for the very thing that is searched."""
    for searched, option, value in ((BATCH, "--batch", batch), (SEQUENCE, "--sequence", sequence)):
        if over == searched and value is not None:
            raise UsageError(f"{option} {value} is what --over {over} searches. Leave it out, or give --most {value}.")


def _body(found: Fit, target: Device | None) -> dict[str, Any]:
    """The fit, with its headline figures once more on top."""
    body: dict[str, Any] = {
        "largest": found.largest.size,
        "best": found.best.size,
        "largest_eager": None if found.largest_eager is None else found.largest_eager.size,
        "accumulation_steps": found.best.accumulation_steps,
        "budget_bytes": found.budget_bytes,
        "confirmed": found.confirmed,
        "fit": plain(found),
    }
    return body if target is None else body | {"target": target.facts()}
