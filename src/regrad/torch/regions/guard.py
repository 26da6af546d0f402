"""Digests that tell whether a replay computed what the forward computed.

A digest is a pair of weighted sums of the bytes taken as 64-bit numbers: order counts, and equal halves do not cancel
(an exclusive or of the words would miss both). Cost: about 0.2 ms per MiB.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from regrad.torch.regions.ambient import unseen
from regrad.torch.regions.discover.tensors import memory_of


class Check:
    """What the forward of a guarded call computed: digests of what it saved and returned, and where it saved them."""

    def __init__(self) -> None:
        self.saved: list[Any] = []
        self.outputs: list[Any] = []
        self.lines: list[str] = []


_WIDTH = 4096
_WEIGHTS: dict[torch.device, torch.Tensor] = {}
_EXACT_BYTES = 1024


def digest(tensor: torch.Tensor) -> Any:
    """A comparable summary of a tensor's values; ``None`` if it has no bytes to read."""
    memory = memory_of(tensor)
    if memory.view is None:
        return None
    with unseen(), torch.no_grad():
        flat = tensor.detach()
        if flat.is_conj() or flat.is_neg():
            flat = flat.resolve_conj().resolve_neg()
        flat = flat.contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() <= _EXACT_BYTES:
            return (tuple(tensor.shape), bytes(flat.cpu().numpy()))
        cut = flat.numel() // 8 * 8
        tail = bytes(flat[cut:].cpu().numpy())
        return (tuple(tensor.shape), _sums(_words(flat[:cut])), tail)


def _words(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.int64) if flat.data_ptr() % 8 == 0 else flat.clone().view(torch.int64)


def _sums(words: torch.Tensor) -> tuple[int, int]:
    weights = _weights(words.device)
    rows, rest = divmod(words.numel(), _WIDTH)
    first = second = 0
    step = 8  # 256 KiB at a time: a guard must not be what breaks a budget
    for start in range(0, rows, step):
        block = words[start * _WIDTH : min(rows, start + step) * _WIDTH].view(-1, _WIDTH)
        sums = (block * weights).sum(1)
        first += int((sums * weights[: len(sums)]).sum()) * (2 * start + 1)
        second ^= hash((start, int(sums.sum())))
    if rest:
        sums = (words[rows * _WIDTH :] * weights[:rest]).sum()
        first += int(sums) * 3
        second ^= hash((rows, int(sums)))
    return first, second


def _weights(device: torch.device) -> torch.Tensor:
    if device not in _WEIGHTS:
        generator = torch.Generator().manual_seed(0x5EED)
        drawn = torch.randint(-(2**62), 2**62, (_WIDTH,), generator=generator, dtype=torch.int64)
        _WEIGHTS[device] = (drawn * 2 + 1).to(device)
    return _WEIGHTS[device]


with unseen():
    _weights(torch.device("cpu"))  # 32 KiB for good: they must not come to be in the middle of somebody's step


def is_workspace(saved: torch.Tensor) -> bool:
    """Whether a saved tensor is a kernel's workspace by its kind (a row of bytes), as recurrent kernels keep one.

    Such a kernel leaves bytes of it unwritten, so two runs that agree in every result differ there.
    """
    return saved.dtype == torch.uint8 and saved.dim() == 1


def output_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in what a region returned."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def user_line() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor the library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "regrad.")) and name != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
