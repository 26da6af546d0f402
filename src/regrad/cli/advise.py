"""``regrad advise``: what to change so that a step fits a budget, each change with its price."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regrad.cli import names, options
from regrad.cli.output import Answer, answering, progress_bar
from regrad.core.codec import plain
from regrad.core.errors import REFUSAL_EXIT, UsageError
from regrad.core.units import Budget
from regrad.memory.devices import as_device
from regrad.report.advice import advice_report

BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help='"8 GiB", "8GB", bytes, or "60%" of what the step needs.',
        show_default="what --device leaves",
    ),
]
Devices = Annotated[int | None, typer.Option("--devices", min=1, help="How many devices there are to shard over.")]
Folder = Annotated[
    Path | None,
    typer.Option("--offload-folder", help="Where an offloaded file would be.", show_default="for temporary files"),
]


def advise(
    subject: options.Subject,
    budget: BudgetText = None,
    devices: Devices = None,
    offload_folder: Folder = None,
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
    """What to change so that SUBJECT's training step fits BUDGET: ranked, with the peak and the time of each change.

    A plan, micro-batches, bf16, a lighter optimizer, a loss in chunks, offload and shards are priced on the step itself;
    what does not lower its peak is listed with its figure; known traps are named. Nothing is trained, and nothing is
    written but 32 MiB to a temporary file. Exit code 1 if nothing makes it fit.
    """
    with answering(Answer("advise", subject, as_json)) as answer:
        target = as_device(device, device_memory)
        if budget is not None:
            Budget.parse(budget)
        elif target is None:
            raise UsageError(
                'there is no budget: give --budget "8 GiB", or a device (--device h100-80gb) to advise for.'
            )
        settings = options.read_config(config)
        import regrad.torch as rt
        from regrad.torch.moments import with_moments
        from regrad.torch.subject import Wishes, with_subject

        with progress_bar("building the model") as report:
            make = with_moments(names.optimizer(optimizer), names.dtype(optimizer_dtype))
            wishes = Wishes(batch, sequence, names.dtype(dtype), make, settings, without_bytes=target is not None)

            def advised(step: Any) -> Any:
                answer.device = str(step.device) if target is None else target.name
                return rt.advise(
                    step, budget=budget, devices=devices, device=target, offload_folder=offload_folder, progress=report
                )

            found = with_subject(subject, wishes, advised)
        answer.body = {"advice": plain(found)} | ({} if target is None else {"target": target.facts()})
        answer.shown = [advice_report(found)]
        if not found.fits and found.best is None:
            answer.exit_code = REFUSAL_EXIT
