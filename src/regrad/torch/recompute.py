"""The seam between plans and the engine that runs a segment again. Nothing above this file knows which engine it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from regrad.torch.regions.discover.tensors import SMALL_BYTES, memory_of
from regrad.torch.regions.public import Checkpoint
from regrad.torch.regions.region import region_of
from regrad.torch.regions.watch import storage_key

ENGINE = Checkpoint()
"""The settings under which planned calls run; ``ENGINE.report()`` tells what became of them."""
_REHEARSAL = Checkpoint(guard="off")


def recompute(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    planned: Sequence[tuple[torch.Tensor, str]] = (),
) -> Any:
    """Run ``forward(*args, **kwargs)`` keeping its arguments and its state at entry; its backward runs it again.

    ``planned`` says by which engine this call brings large tensors back; of the others the engine finds out.
    """
    return ENGINE.planned(planned, forward, args, kwargs) if planned else ENGINE(forward, *args, **kwargs)


def log(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a call that is kept, and keep what it overwrites of large state for the replays of earlier calls."""
    return ENGINE.log(forward, *args, **kwargs)


def rehearse(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """:func:`recompute` for copies of a model: what is learnt of them, and counted, is kept apart."""
    return _REHEARSAL(forward, *args, **kwargs)


def prime(forward: Callable[..., Any], written: Mapping[torch.Tensor, str]) -> None:
    """Say before its first call that ``forward`` writes these tensors, and by which engine their old bytes are kept."""
    region = region_of(forward, ENGINE.settings)
    for tensor, engine in written.items():
        key = storage_key(tensor)
        if key is not None and memory_of(tensor).nbytes > SMALL_BYTES:
            region.engines[key] = engine


def replays() -> int:
    """How many calls have been run again under plans, in this process."""
    return sum(report.replays for report in ENGINE.report())
