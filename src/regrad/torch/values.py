"""Fake tensors where a value does not matter, real ones where it may decide the path.

Under plain fake tensors a model cannot look at its own masks and lengths, and libraries that notice fakes take another
road: one builds an explicit attention mask that the eager step does not have. So tensors that depend on no weight keep
their values: integers and booleans of the batch and of the buffers, scalars on the CPU (the step counters of
optimizers), matrices of one number (what masks are made from), and whatever is computed from such tensors alone. All
else is fake, from the first operation on that mixes the two, and lies as the kernel would lay it
(:mod:`regrad.torch.layouts`). A tensor with values that is then written from a fake one loses them: from there on it
counts as fake.

What still needs a real step: control flow on activations or losses.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from regrad.torch.layouts import as_the_kernel_does


def operands(value: Any) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results: those nest in lists and tuples only, and time counts."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, (tuple, list)):
                found += operands(item)
    elif isinstance(value, dict):
        for item in value.values():
            found += operands(item)
    return found


LARGEST_BYTES = 1 << 28
"""A tensor above this size is fake even if its values could be known."""


def keeps_values(tensor: torch.Tensor) -> bool:
    """Whether a copy of ``tensor`` stays real: no gradient, and integer, boolean or a scalar on the CPU."""
    if tensor.requires_grad or tensor.nbytes > LARGEST_BYTES or tensor.layout != torch.strided:
        return False
    counts = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return counts or (tensor.numel() == 1 and tensor.device.type == "cpu")


class ValueMode(TorchDispatchMode):
    """Runs operations on real tensors alone for real, all others under ``fake``; enter it inside ``fake``."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self._lost: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = operands(args) + operands(kwargs)
        if self.all_known(tensors) and (tensors or _makes_known(func, args, kwargs)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._under_fake(func, args, kwargs)
        result = self._under_fake(func, args, kwargs)
        return self._mark_written(func, args, kwargs, result)

    def all_known(self, tensors: list[torch.Tensor]) -> bool:
        return not any(
            isinstance(t, FakeTensor) or t.requires_grad or t.untyped_storage() in self._lost for t in tensors
        )

    def _under_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation under the fake mode, which makes fakes of the real arguments that are left."""

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                return self.fake.from_tensor(leaf, static_shapes=True)
            return leaf

        if not all(isinstance(tensor, FakeTensor) for tensor in operands(args) + operands(kwargs)):
            args, kwargs = pytree.tree_map(fake, (args, kwargs))
        return as_the_kernel_does(func, args, func(*args, **kwargs), self.fake)

    def _mark_written(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """A real tensor that was written in place has unknown values now; it is still the object that comes back."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(given, torch.Tensor) and not isinstance(given, FakeTensor):
                self._lost.add(given.untyped_storage())
                if isinstance(result, FakeTensor):
                    result = given
        return result


def _makes_known(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a factory makes values that may steer the step: integers, booleans, a scalar from a Python number, or what a
    mask is made from, [batch, length] or [length, length] of one number."""
    if func in _MASK_FACTORIES and len(args[0]) == _MASK_DIMENSIONS and math.prod(args[0]) <= LARGEST_MASK:
        return True
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point and not dtype.is_complex
    return func in _INTEGER_FACTORIES


_INTEGER_FACTORIES = {torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step}
_MASK_FACTORIES = {torch.ops.aten.ones.default, torch.ops.aten.full.default}
_MASK_DIMENSIONS = 2
LARGEST_MASK = 1 << 20
"""Elements of a mask of ones that keeps its values."""
