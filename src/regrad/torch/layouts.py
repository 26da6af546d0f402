"""Layouts of results where torch's shape functions say another one than its kernels give.

A fake step goes on from the layout that the shape function says. Where that is not the kernel's, a reshape further on may
copy what the real step views, or the other way round, and the fake step's peak is that copy off. The kernels below were
found by running shape function and kernel side by side on contiguous, transposed and channels-last arguments (torch
2.13, CPU); all are backward formulas that are given a gradient in one layout and an operand in another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_CONTIGUOUS = {
    _aten.native_layer_norm_backward.default,
    _aten._log_softmax_backward_data.default,
    _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss_backward.default,
}
"""Their first result is contiguous, whatever they are given."""
_AS_OPERAND = {
    _aten.elu_backward.default: 0,
    _aten.hardswish_backward.default: 0,
    _aten.hardtanh_backward.default: 0,
    _aten.softplus_backward.default: 0,
    _aten.native_dropout_backward.default: 0,
    _aten.binary_cross_entropy_backward.default: 1,
}
"""Their result lies as the argument at this position."""
_AS_FORMAT = {_aten.native_batch_norm_backward.default: 1, _aten.native_group_norm_backward.default: 1}
"""Their first result is channels-last if the argument at this position is, else contiguous."""


def as_the_kernel_does(func: Any, args: Any, result: Any, fake: FakeTensorMode) -> Any:
    """``result`` of the fake ``func(*args)``, its first tensor laid out as the kernel lays it out."""
    wanted = _format(func, args)
    if wanted is None:
        return result
    first = result[0] if isinstance(result, tuple) else result
    if first is None:
        return result
    pattern, memory_format = wanted
    with fake:
        laid = torch.empty_like(first if pattern is None else pattern, dtype=first.dtype, memory_format=memory_format)
    if laid.shape != first.shape or laid.stride() == first.stride():
        return result
    return (laid, *result[1:]) if isinstance(result, tuple) else laid


def _format(func: Any, args: Any) -> tuple[torch.Tensor | None, torch.memory_format] | None:
    """The tensor after which the first result is laid out (None: itself) and the format; None where nothing is wrong."""
    if func in _CONTIGUOUS:
        return None, torch.contiguous_format
    if func in _AS_OPERAND:
        return args[_AS_OPERAND[func]], torch.preserve_format
    if func in _AS_FORMAT:
        given = args[_AS_FORMAT[func]]
        last = given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last) and not given.is_contiguous()
        return given, torch.channels_last if last else torch.contiguous_format
    return None
