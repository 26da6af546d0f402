"""The one table that maps names of the command line to values.

The values are looked up in torch when a command runs, so that ``regrad --help`` loads no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

DtypeName = Literal["fp32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "adam", "sgd", "momentum"]

# name on the command line: its name in torch
DTYPES: dict[DtypeName, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# name on the command line: the class in torch.optim and its arguments
OPTIMIZERS: dict[OptimizerName, tuple[str, dict[str, float]]] = {
    "adamw": ("AdamW", {"lr": 1e-4}),
    "adam": ("Adam", {"lr": 1e-4}),
    "sgd": ("SGD", {"lr": 1e-2}),
    "momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9}),
}


def dtype(name: DtypeName | None) -> Any:
    """The ``torch.dtype`` called ``name``; None stays None."""
    if name is None:
        return None
    import torch

    return getattr(torch, DTYPES[name])


def optimizer(name: OptimizerName | None) -> Callable[[Any], Any] | None:
    """What makes the optimizer called ``name`` for given parameters; None stays None."""
    if name is None:
        return None
    import torch

    kind, arguments = OPTIMIZERS[name]
    return lambda parameters: getattr(torch.optim, kind)(parameters, **arguments)
