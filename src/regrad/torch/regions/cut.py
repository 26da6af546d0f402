"""Ends a replay's work early where the trace of the forward proves that nothing after it is needed.

Autograd saves the inputs of a product before the product is computed, so the last product of a region is often not
needed by its backward. No exception is thrown through user code: from the last needed tensor on, products and the
commonest operations by element give something of the right shape, and everything else runs on. Done only for calls
whose replay was compared with its forward before, and only if the rest of the region neither writes in place, nor
draws, nor lets Python look at a value (docs/concepts/state-safe-checkpoint.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode

from regrad.torch.regions.watch import Quiet, draws, writes_of

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_SAME = {
    _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.relu.default, _aten.gelu.default, _aten.silu.default,
    _aten.sigmoid.default, _aten.tanh.default,
}  # fmt: skip
_LOOKS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
PYTHON_LOOKS = {"numpy", "tolist", "__array__", "data_ptr"}


@cache
def _harmless(operation: Any) -> bool:
    """Whether running an operation on other numbers can have no consequence but other numbers."""
    if operation.namespace != "aten" or operation in _LOOKS or writes_of(operation) or draws(operation):
        return False
    tags = operation.tags
    return torch.Tag.data_dependent_output not in tags and torch.Tag.dynamic_output_shape not in tags


class Cut:
    """Where to cut: ``trigger`` is the saved tensor after which the mode is on, ``last`` the last one that is needed."""

    __slots__ = ("count", "last", "trigger")

    def __init__(self, count: int, trigger: int, last: int) -> None:
        self.count, self.trigger, self.last = count, trigger, last


def find_cut(operations: list[Any], positions: list[int], needed: list[bool], names: set[str]) -> Cut | None:
    """The cut of a call that did ``operations``, where saved tensor i came after ``positions[i]`` of them.

    ``needed`` says which saved tensors a replay must give; ``names`` are the names in the region's code.
    """
    if not any(needed) or names & PYTHON_LOOKS:
        return None
    last = max(index for index, wanted in enumerate(needed) if wanted)
    at = positions[last]
    rest = operations[at:]
    if not any(one in _PRODUCTS or one in _SAME for one in rest) or not all(map(_harmless, rest)):
        return None
    triggers = [index for index in range(last) if positions[index] < at]
    return Cut(len(positions), triggers[-1], last) if triggers else None


class Tail(Quiet):
    """Once ``armed``, gives zeros for products and the first operand for operations by element."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.armed and func in _PRODUCTS:
            one, other = args[-2:]
            if type(one) is torch.Tensor:
                return one.new_zeros((*one.shape[:-1], other.shape[-1]))
        elif self.armed and func in _SAME:
            first, rest = args[0], args[1:]
            if all(type(one) is torch.Tensor and one.shape == first.shape and one.dtype == first.dtype for one in rest):
                return first.detach()
        return func(*args, **(kwargs or {}))


class Cutter:
    """Watches the saved tensors of one replay, and puts :class:`Tail` on and takes it off."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.mode: Tail | None = None

    def saved(self, index: int) -> None:
        """Saved tensor ``index`` has come."""
        if index == self.cut.trigger and not torch._C._len_torch_dispatch_stack():
            self.mode = Tail()
            _push_mode(self.mode)
        elif index == self.cut.last and self.mode is not None:
            self.mode.armed = True

    def done(self) -> None:
        """The body has ended, one way or another."""
        if self.mode is not None:
            self.mode = None
            _pop_mode()
