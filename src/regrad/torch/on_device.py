"""Runs a fake step with the kernels that another device would use, on fake tensors of this one.

Fake tensors of a device that is not here cannot be made, but most of what differs between a CPU's step and a GPU's is
*which operation* a torch call ends in, and those can be called by name: their shapes and what autograd saves of them are
torch's own. Two calls matter for memory:

* dropout: the CPU keeps a mask as wide as its data, a GPU one byte an element (``aten.native_dropout``);
* attention: a GPU has fused kernels with dropout and for every type, which keep query, key, value, result and one
  number a row (``aten._scaled_dot_product_flash_attention`` and ``…_efficient_attention``); the CPU writes the weights
  out wherever there is dropout.

The order in which attention kernels are tried is torch's: flash, memory-efficient, written out
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``). Optimizers run in their default form for GPUs, ``foreach``.
Not covered: what C++ decides below these calls, such as recurrent layers and the choice among convolutions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from regrad.memory.devices import Device

_HALF = (torch.float16, torch.bfloat16)
_LONGEST_HEAD = 256
"""The longest head that torch's flash attention takes."""


@contextlib.contextmanager
def on_device(device: Device | None) -> Iterator[None]:
    """While this is entered, torch calls on fake tensors end in the operations of ``device``; None changes nothing."""
    if device is None:
        yield
    else:
        with Kernels(device):
            yield


def device_form(optimizer: torch.optim.Optimizer | None) -> None:
    """Turn an optimizer of a *copy* to the form that is the default on a GPU, where its user left that open."""
    for group in optimizer.param_groups if optimizer is not None else ():
        chosen = (group.get(name) for name in ("foreach", "fused", "differentiable", "capturable"))
        if "foreach" in group and not any(chosen) and group["foreach"] is None:
            group["foreach"] = True


class Kernels(TorchFunctionMode):
    """Replaces the calls named above. It has no state: what runs under it twice does the same twice."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACED.get(func)
        if replacement is not None:
            result = replacement(self.device, *args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


def _dropout(
    device: Device, input: torch.Tensor, p: float = 0.5, train: bool = True, training: bool | None = None
) -> torch.Tensor | None:
    """``torch.dropout``, where a GPU takes its fused kernel."""
    if training is not None:  # as torch.nn.functional names it
        train = training
    if not isinstance(input, FakeTensor) or not train or not 0 < p < 1 or not input.numel():
        return None
    result: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return result


def _functional_dropout(
    device: Device, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor | None:
    # In place nothing but the mask is made, on either device; that call goes on to torch.dropout_.
    return None if inplace else _dropout(device, input, p, training)


def _attention(
    device: Device,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """``F.scaled_dot_product_attention``, where a GPU takes one of its fused kernels."""
    if not isinstance(query, FakeTensor) or query.dim() != 4 or (attn_mask is not None and attn_mask.requires_grad):
        return None
    query, key, value = (_autocast(part) for part in (query, key, value))
    same_heads = query.shape[-3] == key.shape[-3] == value.shape[-3]
    if query.dtype != key.dtype or key.dtype != value.dtype or query.shape[-1] != value.shape[-1]:
        return None
    if query.dtype in _HALF and device.flash and attn_mask is None and query.shape[-1] <= _LONGEST_HEAD:
        if same_heads or enable_gqa:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        return None
    if not same_heads or (query.dtype == torch.bfloat16 and not device.flash):
        return None
    return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, scale: float | None
) -> torch.Tensor:
    """Flash attention. Heads are padded to a multiple of eight, as torch does before it calls the kernel."""
    depth = query.shape[-1]
    scale = 1 / math.sqrt(depth) if scale is None else scale
    padded = (F.pad(part, (0, -depth % 8)) if depth % 8 else part for part in (query, key, value))
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        *padded, dropout, causal, False, scale=scale
    )[0]
    return result[..., :depth] if depth % 8 else result


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Memory-efficient attention. A mask of booleans becomes one of numbers, expanded but not copied, as torch does."""
    bias = None
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
        bias = mask.to(query.dtype).expand(*query.shape[:3], key.shape[-2])
    logs = any(part.requires_grad for part in (query, key, value))
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, logs, dropout, causal, scale=scale
    )[0]
    return result


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The cast that autocast would do on the way into attention."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


_REPLACED: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.dropout: _dropout,
    F.dropout: _functional_dropout,
    F.scaled_dot_product_attention: _attention,
}
