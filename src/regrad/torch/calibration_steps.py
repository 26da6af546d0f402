"""The small steps that calibration records: real modules at several shapes, so that no kernel's arguments are written
down by hand.

Each :class:`Case` makes one step. Its module is reached through a factor with a gradient of its own, so that the backward
also makes the gradient of the input, as it does inside a model; ``first`` leaves that out, as it is in a first layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from regrad.torch.step import Step

_FLOATS = (torch.float32, torch.bfloat16)


class _Probe(nn.Module):
    """Calls ``inner`` on its batch and squares what comes out; a loss that comes out is left as it is."""

    def __init__(self, inner: nn.Module, first: bool) -> None:
        super().__init__()
        self.inner = inner
        self.factor = None if first else nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        if self.factor is not None and x.is_floating_point():
            x = x * self.factor.to(x.dtype)
        found = self.inner(x, *more)
        result: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return result if result.dim() == 0 else result.float().square().mean()


class _Function(nn.Module):
    """A function as a module, with the weights that it needs none of."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.function(*given)


class _Attention(nn.Module):
    """Projections around the fused kernel, or around the two products and the softmax."""

    def __init__(self, width: int, heads: int, *, fused: bool, masked: bool = False) -> None:
        super().__init__()
        self.heads, self.fused, self.masked = heads, fused, masked
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mask = torch.zeros(batch, 1, length, length, dtype=x.dtype) if self.masked else None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        else:
            y = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1) @ v
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


class _Language(nn.Module):
    """Embedding, output layer and cross-entropy."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(tokens))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


@dataclass(frozen=True, slots=True)
class Case:
    """One step: ``build`` makes the module, ``shape`` and ``dtype`` are those of what it is given (``classes`` is the
    number of token values where that is integers)."""

    family: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    classes: int = 0
    first: bool = False
    optimizer: str = ""

    def step(self) -> Step:
        """The step on the CPU. Seeded; the caller's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _Probe(self.build(), self.first).to(self.dtype)
            x = torch.randint(self.classes, self.shape) if self.classes else torch.rand(self.shape).to(self.dtype)
        optimizer = getattr(torch.optim, self.optimizer)(model.parameters(), lr=1e-3) if self.optimizer else None
        return Step(model, (x,), optimizer=optimizer)


def cases(*, quick: bool = False) -> list[Case]:
    """All steps of a calibration; with ``quick`` about one in six of every family."""
    found = [*_convolutions(), *_other_images(), *_sequences(), *_attention(), *_recurrent(), *_losses()]
    if not quick:
        return found
    kept: list[Case] = []
    for _, family in itertools.groupby(found, key=lambda case: case.family):
        kept += list(family)[::6]
    return kept


# channels in and out, kernel, stride, groups, side, batch
_CONVOLUTIONS = (
    (16, 16, 3, 1, 1, 8, 8), (16, 16, 3, 1, 1, 16, 32), (32, 32, 3, 1, 1, 16, 8), (32, 32, 3, 1, 1, 8, 32),
    (64, 64, 3, 1, 1, 8, 8), (64, 64, 3, 1, 1, 32, 4), (128, 128, 3, 1, 1, 8, 8), (128, 128, 3, 1, 1, 16, 16),
    (256, 256, 3, 1, 1, 8, 8), (256, 256, 3, 1, 1, 14, 2), (512, 512, 3, 1, 1, 7, 2), (8, 8, 3, 1, 1, 16, 16),
    (24, 24, 3, 1, 1, 16, 8), (48, 96, 3, 1, 1, 16, 8), (96, 48, 3, 1, 1, 8, 8), (20, 20, 3, 1, 1, 16, 8),
    (32, 64, 3, 2, 1, 16, 8), (64, 128, 3, 2, 1, 16, 8), (128, 256, 3, 2, 1, 16, 4), (16, 32, 3, 2, 1, 32, 16),
    (32, 64, 2, 2, 1, 16, 8), (64, 128, 2, 2, 1, 16, 8), (16, 32, 2, 2, 1, 32, 8), (64, 128, 1, 2, 1, 16, 8),
    (16, 64, 1, 1, 1, 16, 8), (64, 16, 1, 1, 1, 16, 8), (64, 64, 1, 1, 1, 16, 8), (128, 128, 1, 1, 1, 8, 16),
    (256, 64, 1, 1, 1, 14, 4), (64, 256, 1, 1, 1, 14, 4), (64, 1, 1, 1, 1, 16, 8), (16, 1, 1, 1, 1, 32, 8),
    (16, 32, 5, 1, 1, 14, 8), (32, 64, 5, 2, 1, 16, 8), (64, 64, 7, 1, 1, 16, 4),
    (32, 32, 3, 1, 32, 16, 8), (64, 64, 3, 1, 64, 16, 8), (128, 128, 3, 2, 128, 16, 8), (96, 96, 7, 1, 96, 14, 4),
    (64, 64, 3, 1, 4, 16, 8), (64, 128, 3, 2, 8, 16, 8),
)  # fmt: skip
# of the commonest kind, every combination: channels, (side, batch)
_COMMON = tuple(
    (c, c, 3, 1, 1, side, batch)
    for c, (side, batch) in itertools.product((16, 32, 64, 128), ((4, 8), (8, 16), (16, 16), (32, 8)))
)
# widths that do not fill a vector, which kernels pad or leave to other kernels: kernel, stride, widening
_UNEVEN = tuple(
    (c, c * wider, k, s, 1, side, 8)
    for c, (k, s, wider, side) in itertools.product(
        (4, 12, 20, 24, 40, 56, 80), ((3, 1, 1, 8), (3, 1, 1, 24), (3, 2, 2, 16), (1, 1, 2, 16))
    )
)
_FIRST_CONVOLUTIONS = (
    (1, 16, 3, 1, 1, 8, 32), (1, 32, 3, 1, 1, 32, 8), (3, 16, 3, 1, 1, 32, 16), (3, 64, 7, 2, 1, 64, 4),
    (3, 32, 3, 2, 1, 64, 8), (1, 6, 5, 1, 1, 28, 16), (3, 192, 4, 4, 1, 32, 8), (3, 128, 16, 16, 1, 64, 4),
)  # fmt: skip


def _same(module: nn.Module) -> nn.Module:
    return module


def _convolution(c: int, d: int, k: int, s: int, g: int) -> Callable[[], nn.Module]:
    padding = k // 2 if k % 2 else 0
    return lambda: nn.Conv2d(c, d, k, s, padding, groups=g, bias=g == 1)


def _transposed(c: int, d: int, k: int) -> Callable[[], nn.Module]:
    return lambda: nn.ConvTranspose2d(c, d, k, 2)


def _convolutions() -> Iterator[Case]:
    for dtype in _FLOATS:
        for c, d, k, s, g, side, batch in (*_CONVOLUTIONS, *_COMMON, *_UNEVEN):
            yield Case("convolution", _convolution(c, d, k, s, g), (batch, c, side, side), dtype)
    for dtype in _FLOATS:
        for c, d, k, s, g, side, batch in _FIRST_CONVOLUTIONS:
            shape = (batch, c, side, side)
            yield Case("first convolution", _convolution(c, d, k, s, g), shape, dtype, first=True)
    for dtype, (c, d, k, side, batch) in itertools.product(
        _FLOATS, ((32, 16, 2, 16, 8), (64, 32, 2, 8, 8), (128, 64, 2, 4, 8), (64, 64, 4, 8, 4))
    ):
        yield Case("transposed convolution", _transposed(c, d, k), (batch, c, side, side), dtype)
    for dtype, (c, d, length, batch) in itertools.product(_FLOATS, ((32, 32, 128, 8), (64, 128, 256, 4))):
        yield Case("1-d convolution", partial(nn.Conv1d, c, d, 3, padding=1), (batch, c, length), dtype)
    for dtype in _FLOATS:
        yield Case("3-d convolution", lambda: nn.Conv3d(16, 32, 3, padding=1), (2, 16, 8, 16, 16), dtype)


def _other_images() -> Iterator[Case]:
    shapes = ((8, 16, 16, 16), (32, 32, 16, 16), (8, 64, 32, 32), (4, 256, 14, 14))
    for dtype, shape in itertools.product(_FLOATS, shapes):
        yield Case("batch norm", partial(nn.BatchNorm2d, shape[1]), shape, dtype)
    for dtype, shape in itertools.product(_FLOATS, shapes):
        yield Case("group norm", partial(nn.GroupNorm, 8, shape[1]), shape, dtype)
    pools = (
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Upsample(scale_factor=2),
    )
    for dtype, pool, shape in itertools.product(_FLOATS, pools, shapes[1:3]):
        yield Case("pooling", partial(_same, pool), shape, dtype)


def _sequences() -> Iterator[Case]:
    linears = ((64, 256, 256), (256, 64, 256), (128, 128, 1024), (192, 768, 512), (768, 192, 512), (512, 512, 128),
               (256, 1024, 2048), (1024, 256, 1024), (768, 3072, 512), (512, 10, 64), (100, 300, 700))  # fmt: skip
    for dtype, (width, out, rows) in itertools.product(_FLOATS, linears):
        yield Case("linear", partial(nn.Linear, width, out), (rows, width), dtype)
    for dtype, (batch, length, width) in itertools.product(
        _FLOATS, ((8, 32, 64), (8, 128, 256), (4, 256, 768), (2, 512, 1024))
    ):
        yield Case("layer norm", partial(nn.LayerNorm, width), (batch, length, width), dtype)
    activations = (nn.GELU(), nn.SiLU(), nn.Softmax(-1), nn.LogSoftmax(-1), nn.Dropout(0.1))
    for dtype, activation, shape in itertools.product(_FLOATS, activations, ((8, 32, 64), (4, 256, 512))):
        yield Case("activation", partial(_same, activation), shape, dtype)
    index = torch.arange(32).flip(0)
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: x[:, index],
        lambda x: x.index_select(1, index),
        lambda x: x.gather(1, index.view(1, -1, 1).expand(len(x), -1, x.shape[2])),
        lambda x: torch.zeros_like(x).scatter_add(1, index.view(1, -1, 1).expand(len(x), -1, x.shape[2]), x[:, :32]),
        lambda x: x.cumsum(1),
        lambda x: x.sort(-1)[0],
        lambda x: x.topk(4, -1)[0],
        lambda x: x.std(1),
    )
    for dtype, function, shape in itertools.product(_FLOATS, functions, ((8, 32, 64), (4, 256, 256))):
        yield Case("index", partial(_Function, function), shape, dtype)


def _attention() -> Iterator[Case]:
    shapes = ((64, 4, 32, 8), (128, 4, 64, 8), (128, 4, 256, 8), (256, 4, 256, 4), (192, 6, 128, 4), (192, 6, 64, 8),
              (512, 8, 512, 2), (768, 12, 128, 2), (256, 8, 1024, 1))  # fmt: skip
    for dtype, (width, heads, length, batch) in itertools.product(_FLOATS, shapes):
        build = partial(_Attention, width, heads, fused=True)
        yield Case("fused attention", build, (batch, length, width), dtype)
    for dtype, (width, heads, length, batch) in itertools.product(_FLOATS, shapes[:6:2]):
        build = partial(_Attention, width, heads, fused=True, masked=True)
        yield Case("masked attention", build, (batch, length, width), dtype)
    for dtype, (width, heads, length, batch) in itertools.product(_FLOATS, shapes[:6]):
        build = partial(_Attention, width, heads, fused=False)
        yield Case("attention", build, (batch, length, width), dtype)


def _recurrent() -> Iterator[Case]:
    shapes = (
        (64, 32, 8),
        (64, 64, 16),
        (128, 32, 8),
        (128, 64, 8),
        (256, 32, 16),
        (256, 64, 4),
        (512, 32, 8),
        (96, 50, 20),
    )
    for width, length, batch in shapes:
        build = partial(nn.LSTM, width, width, batch_first=True)
        yield Case("LSTM", build, (batch, length, width))
    for width, length, batch in shapes[:4]:
        build = partial(nn.LSTM, width, width // 2, batch_first=True, bidirectional=True)
        yield Case("LSTM both ways", build, (batch, length, width))
    for width, length, batch in shapes[:3:2]:
        yield Case("GRU", partial(nn.GRU, width, width, batch_first=True), (batch, length, width))


def _losses() -> Iterator[Case]:
    languages = ((256, 64, 8, 64), (1000, 128, 4, 128), (8192, 64, 2, 128), (256, 192, 4, 128))
    for dtype, (vocabulary, width, batch, length) in itertools.product(_FLOATS, languages):
        build = partial(_Language, vocabulary, width)
        yield Case("language", build, (batch, length), dtype, classes=vocabulary)
    for optimizer in ("SGD", "AdamW"):
        yield Case("optimizer", lambda: nn.Linear(256, 1024), (64, 256), optimizer=optimizer)
