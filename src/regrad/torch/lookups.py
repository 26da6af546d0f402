"""Rows that are not there: a fake table has no rows to miss, so an index beyond its end is looked for by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from regrad.torch.values import ValueMode

if TYPE_CHECKING:
    from regrad.torch.dryrun import Rehearsal

_ATEN = torch.ops.aten
_BY_DIMENSION = {_ATEN.index_select.default, _ATEN.gather.default}


def check_lookups(rehearsal: Rehearsal) -> None:
    """Run one fake forward and look at every index whose value is known, such as the positions of a sequence.

    Raises :class:`IndexError`, marked as the user's by the step, for the first that is out of range, as a real step would.
    A real rehearsal has run such a step already. Cost: one fake forward pass.
    """
    if rehearsal.mode is None:
        return
    with rehearsal.entered(), _Lookups():
        rehearsal.step.compute_loss()


class _Lookups(TorchDispatchMode):
    """Compares known indices with the table that they are for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN.embedding.default:
            _check(args[1], args[0].shape[0], "an embedding", negative=False)
        elif func in _BY_DIMENSION and args[0].dim():
            _check(args[2], args[0].shape[args[1]], f"{func._overloadpacket.__name__}", negative=False)
        elif func is _ATEN.index.Tensor:
            masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            for rows, index in zip(args[0].shape, () if masks else args[1], strict=False):
                if index is not None:
                    _check(index, rows, "an indexed tensor", negative=True)
        return func(*args, **(kwargs or {}))


def _check(index: torch.Tensor, rows: int, what: str, *, negative: bool) -> None:
    values = next((mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, ValueMode)), None)
    if values is None or not values.all_known([index]) or not index.numel():
        return
    lowest, highest = int(index.min()), int(index.max())
    if -rows * negative <= lowest and highest < rows:
        return
    wrong = highest if highest >= rows else lowest
    raise IndexError(f"index out of range: {wrong} for {what} of {rows} rows")
