"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from regrad.cli.names import DtypeName, OptimizerName
from regrad.core.errors import InvalidSubject

Subject = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT",
        help="FILE:FACTORY, a function that returns an rt.Step, or transformers:CONFIGCLASS with random weights.",
        show_default=False,
    ),
]
BatchSize = Annotated[int | None, typer.Option("--batch", min=1, help="Batch size.", show_default="4")]
SequenceLength = Annotated[
    int | None, typer.Option("--sequence", min=1, help="Tokens per example.", show_default="256, or what the model has")
]
Dtype = Annotated[DtypeName | None, typer.Option("--dtype", help="Type of the weights.", show_default="fp32")]
Optimizer = Annotated[OptimizerName | None, typer.Option("--optimizer", help="Its state counts.", show_default="adamw")]
OptimizerDtype = Annotated[
    DtypeName | None,
    typer.Option("--optimizer-dtype", help="Type of the optimizer's moments.", show_default="that of the weights"),
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="A device that need not be here, such as h100-80gb, a100-40gb, l4, rtx-4090, t4."),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option("--device-memory", help="Its memory, such as 24GiB: of --device, or alone for one without a name."),
]
Config = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="KEY=VALUE", help="Change a setting of the configuration; may be repeated."),
]
Offload = Annotated[
    str | None,
    typer.Option(
        "--offload",
        metavar="FOLDER|host",
        help="Saved tensors may go to a file in this folder, or to the host's memory from CUDA.",
        show_default="nowhere",
    ),
]
NoPack = Annotated[bool, typer.Option("--no-pack", help="Hold no saved tensor in fewer bytes.")]
NoRecompute = Annotated[bool, typer.Option("--no-recompute", help="Run nothing again.")]
KeepCalls = Annotated[
    list[str] | None,
    typer.Option(
        "--keep", metavar="NAME", help="Leave torch calls of this name alone, such as linear; may be repeated."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def read_config(pairs: list[str] | None) -> dict[str, str]:
    """``["n_layer=4"]`` as ``{"n_layer": "4"}``. Raises :class:`InvalidSubject` for anything without a name and '='."""
    settings = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise InvalidSubject(f"cannot read --config {pair!r}: write KEY=VALUE, such as num_hidden_layers=4.")
        settings[key.strip()] = value.strip()
    return settings
